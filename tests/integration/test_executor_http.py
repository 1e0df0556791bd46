"""The `http` executor against real services: up, down, slow, or sending invalid, oversized or duplicate answers."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from orchestrator.domain.executors.builtin import Http, request_body
from orchestrator.domain.executors.options import Broken, Execution, Finished, Outcome
from orchestrator.domain.executors.services import ServiceWorker
from orchestrator.settings import load_settings
from orchestrator.transport import announcements
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from orchestrator.workers.executors.http import HttpExecutor
from orchestrator.workers.executors.protocol import Setup, Unreachable
from tests.integration import executing
from tests.integration.executing import Driver, Heard
from tests.integration.http_service import Service, serving

KEYS = Keys()


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    redis = connect(redis_url)
    redis.delete(KEYS.services)
    yield redis
    redis.close()


def register(redis: Redis, id: str, url: str, *offered: str, load: float = 0) -> None:
    _, now = announcements.find(redis, KEYS, id)
    announcements.write(redis, KEYS, ServiceWorker(id=id, url=url, services=offered, load=load, heard_at=now))


def execution(options: Http, *arguments: Any, name: str = "e-1", **input: Any) -> Execution:
    return executing.execution(
        options, *arguments, name=name, task="shop.sum", task_id="t", queue="default", input=input
    )


def run(redis_url: str, work: Execution, heard: Heard | None = None, **settings: Any) -> Outcome:
    """Submit and watch an execution with a new executor."""
    given: dict[str, Any] = {"webhook_allow": "127.0.0.0/8", "max_payload": 100_000} | settings
    known = load_settings(environ={}, redis_url=redis_url, **given)
    return Driver(lambda: HttpExecutor(Setup(settings=known))).run(work, heard)


@pytest.fixture
def away() -> Iterator[str]:
    """A reserved address without a listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_service_receives_the_request_and_returns_the_result(redis: Redis, redis_url: str) -> None:
    with serving(lambda _, body: (200, {"result": sum(body["input"]) * body["params"]["mul"], "error": ""})) as service:
        register(redis, "a", service.url, "sum")
        work = execution(Http(service="sum", params={"mul": 2}), [1, 2, 3])
        assert run(redis_url, work) == Finished(12)
    assert service.paths == ["/exec/sum"]
    assert service.bodies == [{"input": [1, 2, 3], "params": {"mul": 2}, "request_id": "e-1"}]


@pytest.mark.parametrize(
    ("arguments", "keywords", "sent"),
    [
        ((), {"a": 1, "b": 2}, {"input": {"a": 1, "b": 2}, "params": {"k": 0}}),
        ((5,), {}, {"input": 5, "params": {"k": 0}}),
        ((), {"input": [1], "params": {"k": 1}}, {"input": [1], "params": {"k": 1}}),
        (([1],), {"params": {"m": 1}}, {"input": [1], "params": {"k": 0, "m": 1}}),
        ((1, 2), {"c": 3}, {"input": {"c": 3}, "params": {"k": 0}, "arguments": [1, 2]}),
    ],
)
def test_arguments_are_mapped_to_the_request_body(arguments: Any, keywords: Any, sent: Any) -> None:
    import json

    work = execution(Http(params={"k": 0}), *arguments, **keywords)
    assert json.loads(request_body(work, {"k": 0})) == {**sent, "request_id": "e-1"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((200, {"result": None, "error": ""}), Finished(None)),
        ((200, {"result": {"a": [1]}}), Finished({"a": [1]})),
        ((200, {"result": 1, "error": "out of stock"}), Broken("ServiceError", "out of stock")),
        ((500, {"error": "out of stock"}), Broken("ServiceError", "out of stock")),
        ((422, {"error": "no list"}), Broken("ServiceError", "no list", retryable=False)),
        (
            (200, {"error": {"kind": "Sold", "message": "out", "retryable": False, "detail": "line 3"}}),
            Broken("Sold", "out", retryable=False, detail="line 3"),
        ),
    ],
)
def test_a_reported_result_or_error_is_final_for_the_attempt(redis_url: str, answer: Any, expected: Outcome) -> None:
    with serving(lambda *_: answer) as service:
        assert run(redis_url, execution(Http(service="sum", url=service.url))) == expected
    assert service.requests["e-1"] == 1


TWICE = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n" + b'{"result":1}'


@pytest.mark.parametrize(
    ("answer", "kind", "retryable"),
    [
        (b"\x00\x01\x02 I am no web server\r\n\r\n", "BadAnswer", True),
        ((200, b"<html>hello</html>"), "BadAnswer", True),
        ((200, [1, 2]), "BadAnswer", True),
        ((200, {"answer": 42}), "BadAnswer", True),
        ((200, b'{"result": ' + b"[" * 100_000), "BadAnswer", True),
        ((200, b'{"result": 1e999}'), "BadAnswer", True),
        ((200, b'{"result": "a\\u0000b"}'), "UnreadableOutput", False),
        ((302, b""), "BadAnswer", False),
        ((400, b"what?"), "BadAnswer", False),
        ((200, b'{"result": "' + b"x" * 10_000_000 + b'"}'), "AnswerTooLarge", False),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"x" * 1_000_000 + b"\r\n\r\n", "BadAnswer", True),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_answers_fail_with_a_clear_error(redis_url: str, answer: Any, kind: str, retryable: bool) -> None:
    with serving(lambda *_: answer) as service:
        found = run(redis_url, execution(Http(service="sum", url=service.url)))
    assert isinstance(found, Broken), found
    assert (found.kind, found.retryable) == (kind, retryable), found
    assert len(found.message) < 1_000


def test_logs_in_the_answer_go_to_the_tasks_log(redis_url: str) -> None:
    heard = Heard()
    with serving(lambda *_: (200, {"result": 1, "error": "", "logs": ["first", {"a": 1}]})) as service:
        assert run(redis_url, execution(Http(service="sum", url=service.url)), heard) == Finished(1)
    assert heard.lines == ["info: first", 'info: {"a":1}']


def test_a_duplicate_answer_counts_once(redis_url: str) -> None:
    with serving(lambda *_: TWICE + TWICE.replace(b"1}", b"2}")) as service:
        assert run(redis_url, execution(Http(service="sum", url=service.url))) == Finished(1)
    assert service.requests["e-1"] == 1


def test_an_unreachable_worker_is_skipped_for_the_next(redis: Redis, redis_url: str, away: str) -> None:
    heard = Heard()
    with serving() as service:
        register(redis, "away", away, "sum")
        register(redis, "here", service.url, "sum", load=1e6)
        for number in range(5):
            assert run(redis_url, execution(Http(service="sum"), 7, name=f"e-{number}"), heard) == Finished(7)
    assert set(service.requests.values()) == {1}
    assert any("warning: sum: 127.0.0.1" in line for line in heard.lines), "the one with no load was asked first"


@pytest.mark.parametrize("answer", [b"", (503, {}), (404, {"error": "no such service"}), TWICE[:20]], ids=repr)
def test_a_worker_that_disconnects_or_declines_is_skipped(redis: Redis, redis_url: str, answer: Any) -> None:
    with serving(lambda *_: answer) as bad, serving() as good:
        register(redis, "bad", bad.url, "sum")
        register(redis, "good", good.url, "sum", load=1e6)
        assert run(redis_url, execution(Http(service="sum"), 7)) == Finished(7)
    assert (bad.requests["e-1"], good.requests["e-1"]) == (1, 1)


def test_a_slow_worker_is_left_after_the_request_timeout(redis: Redis, redis_url: str) -> None:
    slow: Service
    with serving() as good, serving(lambda *_: (200, {"result": slow.go_on.wait(90)})) as slow:
        register(redis, "slow", slow.url, "sum")
        register(redis, "good", good.url, "sum", load=1e6)
        # On a busy machine the other worker may time out too; it is asked again.
        patient = Http(service="sum", request_timeout=0.3, max_attempts=100, attempt_delay=0)
        assert run(redis_url, execution(patient, 7)) == Finished(7)
    assert slow.requests["e-1"] >= 1


def test_without_workers_the_service_is_unreachable_or_fails(redis: Redis, redis_url: str, away: str) -> None:
    with pytest.raises(Unreachable, match="No worker offers the service 'sum'"):
        run(redis_url, execution(Http(service="sum")))
    none = run(redis_url, execution(Http(service="sum", max_attempts=2, attempt_delay=0)))
    assert isinstance(none, Broken)
    assert (none.kind, none.retryable) == ("ServiceUnreachable", True)
    register(redis, "away", away, "sum")
    with pytest.raises(Unreachable, match="cannot be reached"):
        run(redis_url, execution(Http(service="sum")))
    heard = Heard()
    found = run(redis_url, execution(Http(service="sum", max_attempts=3, attempt_delay=0.01)), heard)
    assert isinstance(found, Broken)
    assert "3 requests" in found.message
    assert len(heard.lines) == 3


def test_less_busy_workers_get_more_requests(redis: Redis, redis_url: str) -> None:
    with serving() as idle, serving() as busy:
        register(redis, "idle", idle.url, "sum")
        register(redis, "busy", busy.url, "sum", load=9)

        async def go() -> None:
            executor = HttpExecutor(Setup(settings=load_settings(environ={}, redis_url=redis_url)))
            for number in range(60):
                work = execution(Http(service="sum"), name=f"e-{number}")
                await executor.watch(work, await executor.submit(work), Heard())
            await executor.close()

        asyncio.run(go())
    asked = Counter(idle=sum(idle.requests.values()), busy=sum(busy.requests.values()))
    assert asked.total() == 60
    assert asked["idle"] > 40  # 55 are expected


def test_an_address_option_cannot_reach_internal_hosts(redis_url: str) -> None:
    with serving() as service:
        work = execution(Http(service="sum", url=service.url))
        refusing: list[dict[str, Any]] = [
            {"webhook_allow": ""},
            {"webhooks": "off"},
            {"webhooks": "allowed", "webhook_allow": "a.b"},
        ]
        for settings in refusing:
            found = run(redis_url, work, **settings)
            assert isinstance(found, Broken)
            assert (found.kind, found.retryable) == ("NotAllowed", False)
    assert not service.requests


def test_a_registered_service_may_be_internal(redis: Redis, redis_url: str) -> None:
    with serving() as service:
        register(redis, "a", service.url, "sum")
        assert run(redis_url, execution(Http(service="sum"), 1), webhook_allow="") == Finished(1)


def test_a_second_watcher_repeats_the_request_to_the_same_worker(redis: Redis, redis_url: str) -> None:
    """The first watcher's loop ends without a message, as in a killed process."""
    first: Service

    def answer(_: str, body: Any) -> tuple[int, Any]:
        if first.requests[body["request_id"]] == 1:
            first.go_on.wait(90)
        return 200, {"result": "done"}

    with serving() as other, serving(answer) as first:
        register(redis, "other", other.url, "sum")
        register(redis, "first", first.url, "sum")

        async def go() -> Outcome:
            executor = HttpExecutor(Setup(settings=load_settings(environ={}, redis_url=redis_url)))
            work = execution(Http(service="sum"))
            watching = asyncio.create_task(executor.watch(work, first.url, Heard()))
            await asyncio.to_thread(first.has_begun.wait, 60)
            watching.cancel()
            await asyncio.wait([watching])
            await executor.close()
            successor = HttpExecutor(Setup(settings=load_settings(environ={}, redis_url=redis_url)))
            found = await successor.watch(work, first.url, Heard())
            await successor.close()
            return found

        assert asyncio.run(go()) == Finished("done")
    assert (first.requests["e-1"], other.requests["e-1"]) == (2, 0)


def test_a_cancel_is_sent_to_the_worker_with_the_request(redis: Redis, redis_url: str) -> None:
    slow: Service
    with serving(lambda *_: (200, {"result": slow.go_on.wait(90)})) as slow:
        register(redis, "slow", slow.url, "sum")

        async def go() -> None:
            executor = HttpExecutor(Setup(settings=load_settings(environ={}, redis_url=redis_url)))
            work = execution(Http(service="sum"))
            watching = asyncio.create_task(executor.watch(work, await executor.submit(work), Heard()))
            await asyncio.to_thread(slow.has_begun.wait, 60)
            watching.cancel()
            await asyncio.wait([watching])
            await executor.cancel(work, slow.url)
            await executor.close()

        asyncio.run(go())
    assert slow.cancelled == ["/exec/sum/e-1"]


def test_a_cancel_of_an_unreachable_worker_is_not_retried(redis_url: str, away: str) -> None:
    async def go() -> None:
        executor = HttpExecutor(Setup(settings=load_settings(environ={}, redis_url=redis_url)))
        for nobody in (away, "nobody yet"):
            async with asyncio.timeout(60):
                await executor.cancel(execution(Http(service="sum")), nobody)
        await executor.close()

    asyncio.run(go())


def test_three_hundred_requests_need_few_threads(redis: Redis, redis_url: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        waiting.append(writer)
        if len(waiting) == 300:
            for one in waiting:
                one.write(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"result":1}')

    waiting: list[asyncio.StreamWriter] = []

    async def go() -> None:
        import threading

        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=300)
        register(redis, "a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "sum")
        executor = HttpExecutor(Setup(settings=load_settings(environ={}, redis_url=redis_url)))
        before = threading.active_count()
        works = [execution(Http(service="sum"), name=f"e-{number}") for number in range(300)]
        found = await asyncio.gather(*(executor.watch(work, "", Heard()) for work in works))
        assert found == [Finished(1)] * 300
        assert threading.active_count() - before < 20  # the loop's threads, which resolve names
        for one in waiting:
            one.close()
        server.close()
        await executor.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (Http(service="a b"), "service"),
        (Http(url="ftp://h"), "url"),
        (Http(url="http://u:p@h"), "url"),
        (Http(max_attempts=0), "max_attempts"),
        (Http(attempt_delay=-1), "attempt_delay"),
        (Http(request_timeout=0), "request_timeout"),
    ],
)
def test_invalid_options_are_named(options: Http, wrong: str) -> None:
    assert [name for name, _ in options.problems()] == [wrong]
    assert Http(service="sum").problems() == []
