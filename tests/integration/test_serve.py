"""`orchestrator serve`: tasks as services, registered and counted; each request id runs once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.domain.executors.builtin import Http, request_body
from orchestrator.domain.executors.options import Broken, Finished
from orchestrator.errors import PayloadError
from orchestrator.settings import Settings, load_settings
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from orchestrator.workers.executors.http import HttpExecutor
from orchestrator.workers.executors.protocol import Setup
from orchestrator.workers.serving.server import Registration
from tests import forking
from tests.integration.executing import Heard
from tests.integration.serving import serving
from tests.integration.test_executor_http import execution
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def settings(database_url: str, redis_url: str) -> Settings:
    return load_settings(environ={}, database_url=database_url, redis_url=redis_url)


@pytest.fixture(scope="module")
def registry(settings: Settings) -> Iterator[str]:
    redis = connect(settings.redis_url)
    redis.delete(Keys().services)
    redis.close()
    with serving(settings) as address:
        yield address


@contextmanager
def served(app: str, folder: Path, *options: str, **environ: str) -> Iterator[tuple[forking.Program, str]]:
    """Serve an application in a child process; yield the process and its URL."""
    words = ("serve", "--app", app, "--port", "0", *options)
    process = forking.begin(*words, environment={**os.environ, **environ}, folder=folder, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        url = ""
        while not url:
            line = process.stderr.readline()
            assert line, "it ended before it served"
            url = line.rsplit(" url=", 1)[1].strip() if "service.ready" in line else ""
        rest = threading.Thread(target=process.stderr.read, daemon=True)
        rest.start()
        yield process, url
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(90)
        rest.join()
        process.stderr.close()


@pytest.fixture(scope="module")
def service(registry: str) -> Iterator[str]:
    with served("served:app", Path(__file__).parent, "--registry", registry) as (_, url):
        eventually(lambda: listed(registry, "move"), "it has registered")
        yield url


def send(url: str, name: str, **given: Any) -> httpx.Response:
    return httpx.post(f"{url}/exec/{name}", timeout=90, **given)


def ask(url: str, name: str, body: Any) -> Any:
    return send(url, name, json=body).json()


@pytest.mark.parametrize(
    ("name", "body", "result"),
    [
        ("move", {"input": {"point": {"x": 1}}}, {"x": 2, "y": 0}),
        ("move", {"input": {"point": {"x": 1}, "other": 5}, "params": {"by": 3}}, {"x": 4, "y": 0}),
        ("move", {"input": None, "arguments": [{"x": 1}, 7]}, {"x": 8, "y": 0}),
        ("nap", {"input": 0.01}, "woken"),
        ("who", {}, "who"),
        ("who", {"input": 5}, "who"),
        ("told", {"input": 5, "params": {"a": 1}}, {"a": 1}),
    ],
)
def test_a_request_calls_the_function(service: str, name: str, body: Any, result: Any) -> None:
    assert ask(service, name, body) == {"result": result, "error": ""}


def test_failures_have_a_message_and_machine_readable_fields(service: str) -> None:
    found = ask(service, "fail", {"input": {"message": "no luck"}})
    assert (found["error"], found["kind"], found["retryable"]) == ("no luck", "ValueError", True)
    assert "served.py" in found["detail"]
    final = ask(service, "fail", {"input": {"message": "never", "final": True}})
    assert (final["kind"], final["retryable"]) == ("GiveUp", False)
    wrong = ask(service, "move", {"input": {"points": 1}})
    assert (wrong["kind"], wrong["retryable"], "point" in wrong["error"]) == ("InvalidTask", False, True)
    assert ask(service, "odd", {})["kind"] == "PayloadError"


def test_tasks_with_an_executor_are_not_served(service: str) -> None:
    found = send(service, "elsewhere", json={"input": "hello"})
    assert (found.status_code, found.json()["error"]) == (404, "There is no service 'elsewhere' here.")


def test_any_task_name_is_a_valid_service_name(service: str, registry: str, settings: Settings) -> None:
    assert ask(service, "shop%2Fgr%C3%B6%C3%9Fe", {"input": 3.0}) == {"result": 3.0, "error": ""}
    [offered] = listed(registry, "shop/größe")
    assert {"move", "shop/größe"} <= {*offered["services"]}

    async def go() -> None:
        executor = HttpExecutor(Setup(settings=settings))
        work = execution(Http(service="shop/größe"), name="s-1", number=2.0)
        assert await executor.watch(work, await executor.submit(work), Heard()) == Finished(2.0)
        await executor.close()

    asyncio.run(go())


def test_the_timeout_of_a_task_holds_for_its_service(service: str) -> None:
    found = ask(service, "hasty", {"input": 60.0})
    assert (found["kind"], found["error"]) == ("TaskTimeout", "Task 'hasty' ran for more than 0.3 s.")


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_result_after_the_timeout_is_ignored(service: str, how: str) -> None:
    found = ask(service, "stubborn", {"input": how})
    assert (found["result"], found["kind"]) == (None, "TaskTimeout")


def test_a_closed_idle_connection_is_reopened(caplog: pytest.LogCaptureFixture) -> None:
    """The registry closes it at the moment when the next heartbeat is sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

    def read(file: Any) -> None:
        head = [line.lower() for line in iter(file.readline, b"\r\n")]
        file.read(sum(int(line.split(b":")[1]) for line in head if line.startswith(b"content-length")))

    def serve_connections() -> None:
        for answers in (1, 2):
            line, _ = listener.accept()
            with line, line.makefile("rb") as file:
                for _ in range(answers):
                    read(file)
                    line.sendall(answer)
                if answers == 1:
                    read(file)  # then close the connection

    other_side = threading.Thread(target=serve_connections, daemon=True)
    other_side.start()
    where = load_settings(environ={}, api_url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    registration = Registration(where, "w", "http://127.0.0.1:1", ["sum"], lambda: 0.0)
    with caplog.at_level("WARNING"):
        assert registration._ask("register", services=["sum"])
        assert registration._ask("heartbeat")
        assert registration._ask("heartbeat")
    assert caplog.records == []
    registration._http.close()
    other_side.join(60)
    listener.close()


def test_nan_and_infinity_are_rejected(service: str, settings: Settings) -> None:
    found = ask(service, "nan", {})
    assert (found["result"], found["kind"], found["retryable"]) == (None, "PayloadError", False)
    assert "found nan at `result[0].mean`" in found["error"]
    for value in (float("nan"), float("-inf")):
        with pytest.raises(PayloadError, match=f"found {value} at `input.values.1.`"):
            request_body(execution(Http(service="move"), name="n-1", values=[None, value]), {})
        with pytest.raises(PayloadError, match="JSON"):
            _ = execution(Http(service="move"), name="n-1", values=[None, value]).specification


def test_a_too_large_request_is_not_retried(service: str, settings: Settings) -> None:
    async def go() -> Any:
        executor = HttpExecutor(Setup(settings=settings))
        work = execution(Http(service="move"), name="l-1", text="x" * 33_000_000)
        async with asyncio.timeout(90):
            outcome = await executor.watch(work, await executor.submit(work), Heard())
        await executor.close()
        return outcome

    outcome = asyncio.run(go())
    assert isinstance(outcome, Broken)
    assert (outcome.kind, outcome.retryable, "33,000," in outcome.message) == ("RequestTooLarge", False, True)


def test_invalid_requests_are_rejected(service: str) -> None:
    assert ask(service, "mvoe", {})["error"].endswith("Did you mean 'move'?")
    assert send(service, "move", content=b"{").status_code == 400
    assert send(service, "move", content=b"[" * 100_000).status_code == 400
    assert send(service, "move", content=b" " * 3_000_000).status_code == 400
    assert send(service, "move", content=b" " * 32_000_001).status_code == 413
    assert send(service, "who", json={}, headers={"Origin": "http://evil"}).status_code == 403


def test_repeated_request_ids_run_once_even_concurrently(service: str, tmp_path: Path) -> None:
    file = tmp_path / "calls"
    body = {"input": {"file": str(file), "seconds": 0.5}, "request_id": "r-1"}
    found: list[Any] = []
    crowd = [threading.Thread(target=lambda: found.append(ask(service, "note", body))) for _ in range(3)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert [*found, ask(service, "note", body)] == [{"result": "noted", "error": ""}] * 4
    assert file.read_text() == "x\n"


def test_a_second_watcher_joins_running_work(service: str, settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "calls"
    work = execution(Http(service="note"), name="w-1", file=str(file), seconds=1.0)

    async def go() -> None:
        first, second = HttpExecutor(Setup(settings=settings)), HttpExecutor(Setup(settings=settings))
        url = await first.submit(work)
        watching = asyncio.create_task(first.watch(work, url, Heard()))
        async with asyncio.timeout(60):
            while not file.exists():
                await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.wait([watching])
        assert await second.watch(work, url, Heard()) == Finished("noted")
        await first.close()
        await second.close()

    asyncio.run(go())
    assert file.read_text() == "x\n"


def test_a_cancel_ends_running_work(service: str, settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "nap"
    work = execution(Http(service="nap"), name="c-1", seconds=60.0, file=str(file))

    async def go() -> Any:
        executor = HttpExecutor(Setup(settings=settings))
        url = await executor.submit(work)
        watching = asyncio.create_task(executor.watch(work, url, Heard()))
        async with asyncio.timeout(60):
            while not file.exists():
                await asyncio.sleep(0.01)
        await executor.cancel(work, url)
        found = await asyncio.wait_for(watching, 60)
        await executor.close()
        return found

    found = asyncio.run(go())
    assert isinstance(found, Broken)
    assert found.kind == "Cancelled"


def listed(registry: str, name: str) -> list[Any]:
    found: list[Any] = httpx.get(f"{registry}/workers/list", params={"service": name}, timeout=60).json()
    return found


def test_a_service_registers_and_deregisters(registry: str) -> None:
    options = ("--registry", registry, "--service", "sum", "--service", "route")
    with served("services:app", ROOT / "examples", *options) as (process, url):
        eventually(lambda: listed(registry, "sum"), "it has registered")
        [entry] = listed(registry, "sum")
        assert (entry["url"], entry["services"]) == (url, ["route", "sum"])
        assert ask(url, "sum", {"input": [1, 2, 3]}) == {"result": 6.0, "error": ""}
        assert ask(url, "route", {"input": None, "params": {"action": "goC"}})["result"] == {"action": "goC"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert listed(registry, "sum") == []


def test_the_transform_example_answers_and_fails(registry: str) -> None:
    with served("services:app", ROOT / "examples") as (_, url):
        assert ask(url, "transform", {"input": 2, "params": {"mul": 3}})["result"] == 6
        assert ask(url, "transform", {"input": "a", "params": {"op": "upper"}})["result"] == "A"
        wrong = ask(url, "transform", {"input": "a"})
        assert (wrong["kind"], wrong["retryable"]) == ("GiveUp", False)


def test_an_unknown_service_name_gets_a_suggestion(tmp_path: Path) -> None:
    done = forking.run("serve", "--app", "services:app", "--service", "sun", folder=ROOT / "examples")
    assert done.returncode != 0
    assert "Did you mean 'sum'?" in done.stderr
    assert "Traceback" not in done.stderr


LOCKED = """
from orchestrator import Orchestrator
app = Orchestrator()
@app.task(name="echo_locked")
def echo(input: int) -> int:
    return input
"""
OLD, NEW = "old-" + 32 * "1", "new-" + 32 * "2"


def test_workers_send_the_service_key_that_requests_need(registry: str, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "locked.py").write_text(LOCKED)
    keys = {"ORCHESTRATOR_SERVICE_KEYS": f"{NEW},{OLD}"}
    with served("locked:app", tmp_path, "--registry", registry, **keys) as (_, url):

        def post(**headers: str) -> int:
            return send(url, "echo_locked", json={"input": 1}, headers=headers).status_code

        assert [post(), post(Authorization=f"Bearer {NEW}1"), post(Authorization=NEW)] == [401, 401, 401]
        assert [post(Authorization=f"Bearer {key}") for key in (OLD, NEW)] == [200, 200]
        refused = httpx.delete(f"{url}/exec/echo_locked/1", timeout=60)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200

        async def do(service_keys: str) -> Finished | Broken:
            executor = HttpExecutor(
                Setup(settings=load_settings(environ={}, redis_url=settings.redis_url, service_keys=service_keys))
            )
            try:
                asked = execution(Http(service="echo_locked"), input=2)
                return await executor.watch(asked, await executor.submit(asked), Heard())
            finally:
                await executor.close()

        redis = connect(settings.redis_url)
        eventually(lambda: "echo_locked" in str(redis.hgetall(Keys().services)), "it has registered")
        redis.close()
        assert asyncio.run(do(OLD)) == Finished(2)
        without = asyncio.run(do(""))
        assert isinstance(without, Broken)
        assert "service_keys" in without.message
        fixed = asyncio.run(_fixed(url, settings))
        assert isinstance(fixed, Broken), "an address that stands in a task is sent no key"


async def _fixed(url: str, settings: Settings) -> Finished | Broken:
    more: dict[str, Any] = {"service_keys": NEW, "webhook_allow": "127.0.0.0/8", "redis_url": settings.redis_url}
    executor = HttpExecutor(Setup(settings=load_settings(environ={}, **more)))
    try:
        asked = execution(Http(service="echo_locked", url=url), input=2)
        return await executor.watch(asked, await executor.submit(asked), Heard())
    finally:
        await executor.close()


@pytest.mark.parametrize(
    ("host", "keys", "said"), [("0.0.0.0", "", "There is no key"), ("127.0.0.1", "short", "expected keys of 32")]
)
def test_serving_other_hosts_requires_a_valid_key(host: str, keys: str, said: str) -> None:
    ended = forking.run(
        *("serve", "--app", "served:app", "--port", "0", "--host", host),
        environment={**os.environ, "ORCHESTRATOR_SERVICE_KEYS": keys},
        folder=Path(__file__).parent,
    )
    assert ended.returncode != 0
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
