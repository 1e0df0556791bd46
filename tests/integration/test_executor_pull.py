"""The `pull` executor and the routes of pull workers: leases, heartbeats, and rejected late requests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from redis import Redis

from orchestrator.api.routes import pull as routes
from orchestrator.domain.executors.builtin import Pull
from orchestrator.domain.executors.options import Broken, Execution, Finished
from orchestrator.errors import PayloadError
from orchestrator.settings import Settings, load_settings
from orchestrator.store.database import engine_for
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from orchestrator.workers.executors import pull
from orchestrator.workers.executors.protocol import Gone, Setup
from orchestrator.workers.executors.pull import PullExecutor
from tests.integration.executing import Heard, until
from tests.integration.serving import serving

KEYS = Keys()
EXAMPLES = Path(__file__).parents[2] / "examples"
SIGNED = {"signing_keys": "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="}
SEALED = {"data_keys": "k1:MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="}


@pytest.fixture(scope="module")
def settings(database_url: str, redis_url: str) -> Settings:
    return load_settings(environ={}, database_url=database_url, redis_url=redis_url)


@pytest.fixture(scope="module")
def address(settings: Settings) -> Iterator[str]:
    with serving(settings) as found:
        yield found


@pytest.fixture(autouse=True)
def redis(redis_url: str) -> Iterator[Redis]:
    redis = connect(redis_url)
    redis.flushdb()
    begin(redis, "1-1-a")
    yield redis
    redis.flushdb()
    redis.close()


def begin(redis: Redis, generation: str) -> None:
    """Write the keys that a leader writes when it begins a generation."""
    redis.set(KEYS.server, redis.info("server")["run_id"])
    redis.set(KEYS.generation, generation)


def execution(name: str = "e-1", *, task_id: str | None = None, **options: Any) -> Execution:
    return Execution(
        name=name,
        task="shop.sum",
        task_id=task_id or str(uuid4()),
        attempt=1,
        queue="default",
        options=Pull(service="sum", params={"k": 1}, **options),
        input={"input": [1, 2]},
    )


class Client(httpx.AsyncClient):
    """A worker that pulls tasks."""

    async def poll(self, *, worker: str = "w", wait: float = 30, services: tuple[str, ...] = ("sum",)) -> Any:
        answer = await self.post("/queue/poll", json={"worker_id": worker, "services": services, "wait": wait})
        assert answer.status_code in (200, 204), answer.text
        return answer.json() if answer.status_code == 200 else None

    async def complete(self, work: Any, **said: Any) -> httpx.Response:
        return await self.post("/queue/complete", json={"queue_id": work["queue_id"], **said})

    async def beat(self, work: Any) -> httpx.Response:
        return await self.post("/queue/heartbeat", json={"queue_id": work["queue_id"]})


Story = Callable[[PullExecutor, Client], Coroutine[Any, Any, None]]


def tell(story: Story, address: str, settings: Settings) -> None:
    async def go() -> None:
        executor = PullExecutor(Setup(settings=settings))
        try:
            async with Client(base_url=address, timeout=90) as client:
                await asyncio.wait_for(story(executor, client), 120)
        finally:
            await executor.close()

    asyncio.run(go())


async def offered(executor: PullExecutor, work: Execution) -> None:
    """Offer work without a watcher."""
    await executor.submit(work)
    await asyncio.to_thread(executor._pulls.poll, [work.name])


async def fall_silent(executor: PullExecutor, redis: Redis) -> None:
    """Take the lease back, as a watcher does after one lease without a heartbeat."""
    beat = redis.hget(KEYS.pull("e-1"), "u")
    assert isinstance(beat, bytes)
    await asyncio.to_thread(executor._pulls.poll, ["e-1"], {"e-1": beat})


async def watched(executor: PullExecutor, work: Execution) -> asyncio.Task[Any]:
    return asyncio.create_task(executor.watch(work, await executor.submit(work), Heard()))


@pytest.mark.parametrize("more", [{}, SIGNED, SEALED, {**SIGNED, **SEALED}], ids=["plain", "signed", "sealed", "both"])
def test_a_completion_is_confirmed_only_when_it_is_durable(settings: Settings, more: dict[str, str]) -> None:
    settings = load_settings(
        environ={},
        database_url=settings.database_url,
        redis_url=settings.redis_url,
        **more,  # type: ignore[arg-type]
    )

    async def story(executor: PullExecutor, client: Client) -> None:
        polling = asyncio.create_task(client.poll())  # before any work exists
        work = execution()
        watching = await watched(executor, work)
        found = await polling
        assert (found["input"], found["params"], found["service"]) == ([1, 2], {"k": 1}, "sum")
        assert (found["request_id"], found["attempt"], found["lease"]) == ("e-1", 1, 60)
        assert (await client.beat(found)).json() == {"ok": "1"}
        completing = asyncio.create_task(client.complete(found, result={"sum": 3}))
        assert await watching == Finished({"sum": 3})
        assert await client.poll(wait=0) is None  # a later request, answered first
        assert not completing.done(), "it is not in Postgres yet"
        await executor.release(work, "e-1")
        answer = await completing
        assert (answer.status_code, answer.json()) == (200, {"ok": "1"})
        assert (await client.complete(found, result={"sum": 3})).status_code == 200, "the same again changes nothing"
        other = await client.complete(found, result={"sum": 4})
        assert (other.status_code, "different result" in other.json()["detail"]) == (409, True)
        late = await client.beat(found)
        assert (late.status_code, "has ended" in late.json()["detail"]) == (409, True)

    with serving(settings) as address:
        tell(story, address, settings)


def test_work_of_another_shard_is_pulled_and_completed(address: str, settings: Settings, redis: Redis) -> None:
    of_shard = dataclasses.replace(settings, shards=2).of_shard(1)
    redis.set(Keys.of(of_shard).server, redis.info("server")["run_id"])
    redis.set(Keys.of(of_shard).generation, "7-1-b")  # a generation unknown to the API

    async def story(executor: PullExecutor, client: Client) -> None:
        watching = await watched(executor, execution())
        found = await client.poll()
        assert (await client.beat(found)).json() == {"ok": "1"}
        completing = asyncio.create_task(client.complete(found, result={"sum": 3}))
        assert await watching == Finished({"sum": 3})
        await executor.release(execution(), "e-1")
        assert (await completing).status_code == 200

    tell(story, address, of_shard)


def test_an_error_from_a_puller_fails_the_attempt(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        for error, expected in (
            ("no luck", Broken("ServiceError", "no luck")),
            ({"kind": "Sold", "message": "out", "retryable": False}, Broken("Sold", "out", retryable=False)),
        ):
            name = f"e-{expected.kind}"
            watching = await watched(executor, execution(name))
            completing = asyncio.create_task(client.complete(await client.poll(), error=error))
            assert await watching == expected
            await executor.release(execution(name), name)
            assert (await completing).status_code == 200

    tell(story, address, settings)


def test_a_poll_without_matching_work_returns_nothing(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        await offered(executor, execution())
        assert await client.poll(wait=0, services=("other",)) is None
        assert (await client.poll(wait=0, services=("other", "sum")))["request_id"] == "e-1"
        assert await client.poll(wait=0.2) is None

    tell(story, address, settings)


def test_resubmitted_work_is_offered_once(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        for _ in range(2):
            await offered(executor, execution())
        assert await client.poll(wait=0) is not None
        await executor.submit(execution())
        assert await client.poll(wait=0) is None

    tell(story, address, settings)


def test_a_lost_lease_moves_on_and_late_requests_are_rejected(address: str, settings: Settings, redis: Redis) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        watching = await watched(executor, execution())
        first = await client.poll(worker="first")
        await fall_silent(executor, redis)
        second = await client.poll(worker="second")
        assert (second["request_id"], second["attempt"]) == ("e-1", 2)
        assert second["queue_id"] != first["queue_id"]
        for late in (await client.beat(first), await client.complete(first, result=1)):
            assert (late.status_code, "another worker" in late.json()["detail"]) == (409, True)
        completing = asyncio.create_task(client.complete(second, result=2))
        assert await watching == Finished(2)
        await executor.release(execution(), "e-1")
        assert (await completing).status_code == 200

    tell(story, address, settings)


def test_heartbeats_keep_a_lease_and_silence_loses_it(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        watching = await watched(executor, execution(lease=1, max_leases=1))
        work = await client.poll()
        for _ in range(7):
            assert (await client.beat(work)).status_code == 200
            assert await client.poll(wait=0.2) is None, "nobody else gets it"
        assert not watching.done(), "it was kept for longer than one lease"
        began = time.monotonic()
        assert (await watching).kind == "LeaseLost"
        assert time.monotonic() - began > 0.5

    tell(story, address, settings)


def test_a_late_completion_counts_while_no_other_worker_has_the_work(
    address: str, settings: Settings, redis: Redis
) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        watching = await watched(executor, execution())
        work = await client.poll()
        await fall_silent(executor, redis)
        completing = asyncio.create_task(client.complete(work, result=1))
        assert await watching == Finished(1)
        await executor.release(execution(), "e-1")
        assert (await completing).status_code == 200
        assert await client.poll(wait=0) is None

    tell(story, address, settings)


def test_work_that_loses_too_many_leases_fails(address: str, settings: Settings, redis: Redis) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        watching = await watched(executor, execution(max_leases=1))
        await client.poll(worker="w-7")
        await fall_silent(executor, redis)
        found = await watching
        assert (found.kind, found.retryable, "w-7 last" in found.message) == ("LeaseLost", True, True)

    tell(story, address, settings)


def test_a_cancel_withdraws_the_work(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        watching = await watched(executor, execution())
        work = await client.poll()
        await executor.cancel(execution(), "e-1")
        with pytest.raises(Gone):
            await watching
        for late in (await client.beat(work), await client.complete(work, result=1)):
            assert (late.status_code, "cancelled" in late.json()["detail"]) == (409, True)
        await executor.submit(execution("e-2"))
        await executor.cancel(execution("e-2"), "e-2")
        assert await client.poll(wait=0) is None

    tell(story, address, settings)


@pytest.mark.parametrize("more", [{}, {**SIGNED, **SEALED}], ids=["plain", "sealed"])
def test_large_input_is_offered_by_reference(
    settings: Settings, redis: Redis, tmp_path: Path, more: dict[str, str]
) -> None:
    folder, aside = tmp_path / "store", tmp_path / "aside"
    folder.mkdir()
    settings = load_settings(
        environ={},
        database_url=settings.database_url,
        redis_url=settings.redis_url,
        payload_store=str(folder),
        **more,  # type: ignore[arg-type]
    )
    large = {"name": "Zoë", "rows": list(range(100_000))}

    async def story(executor: PullExecutor, client: Client) -> None:
        work = dataclasses.replace(execution(), input={"input": large})
        watching = await watched(executor, work)
        assert sum(map(len, redis.hvals(KEYS.pull("e-1")))) < 10_000, "it stands in Redis as a whole"
        folder.rename(aside)
        asked = {"worker_id": "w", "services": ["sum"], "wait": 0}
        refused = await client.post("/queue/poll", json=asked)
        assert (refused.status_code, "payload store" in refused.text) == (503, True), refused.text
        aside.rename(folder)
        found = await client.poll()
        assert (found["input"], found["params"], found["attempt"]) == (large, {"k": 1}, 1)
        assert json.loads(found["input_json"])["input"] == large
        completing = asyncio.create_task(client.complete(found, result=3))
        assert await watching == Finished(3)
        await executor.release(work, "e-1")
        assert (await completing).status_code == 200

    with serving(settings) as address:
        tell(story, address, settings)


def test_too_large_input_is_not_offered(
    address: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "MAX_BODY", 200_000)
    settings = dataclasses.replace(settings, payload_store=str(tmp_path))

    async def story(executor: PullExecutor, client: Client) -> None:
        with pytest.raises(PayloadError, match=r"'shop\.sum' has 200,\d+ bytes as JSON.* at most 200,000"):
            await executor.submit(dataclasses.replace(execution(), input={"input": "x" * 200_000}))
        assert await client.poll(wait=0) is None

    tell(story, address, settings)


def test_a_cancel_before_the_offer_withdraws_the_work(address: str, settings: Settings, redis: Redis) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        await executor.cancel(execution(), "")
        await executor.submit(execution())
        assert await client.poll(wait=0) is None
        assert redis.hgetall(KEYS.pull("e-1")) == {b"s": b"cancelled"}
        assert 0 < redis.ttl(KEYS.pull("e-1")) <= 3_600
        await executor.cancel(execution(), "e-1")
        with pytest.raises(Gone):
            await executor.watch(execution(), "e-1", Heard())

    tell(story, address, settings)


def test_a_second_watcher_continues_after_the_first_is_killed(address: str, settings: Settings, redis: Redis) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        watching = await watched(executor, execution())
        work = await client.poll()
        watching.cancel()
        completing = asyncio.create_task(client.complete(work, result=5))
        await until(lambda: redis.hget(KEYS.pull("e-1"), "s") == b"done")
        successor = PullExecutor(Setup(settings=settings))
        name = await successor.submit(execution())
        assert await successor.watch(execution(), name, Heard()) == Finished(5)
        await successor.release(execution(), name)
        assert (await completing).status_code == 200
        assert await client.poll(wait=0) is None
        await successor.close()

    tell(story, address, settings)


def test_a_completion_that_is_not_applied_must_be_retried(
    address: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_APPLY_TIMEOUT", 0.3)

    async def story(executor: PullExecutor, client: Client) -> None:
        work = execution()
        watching = await watched(executor, work)
        found = await client.poll()
        kept = await client.complete(found, result=1)
        assert (kept.status_code, "retry the request" in kept.json()["detail"]) == (503, True)
        assert await watching == Finished(1)
        await executor.release(work, "e-1")
        assert (await client.complete(found, result=1)).status_code == 200

    tell(story, address, settings)


def test_a_completion_is_confirmed_from_postgres_if_the_watcher_died(
    address: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_POLL_INTERVAL", 0.1)
    looks, has_ended = list[object](), routes._has_ended
    monkeypatch.setattr(routes, "_has_ended", lambda *given: looks.append(given) or has_ended(*given))
    task = UUID(int=77)
    engine = engine_for(settings.database_url, autocommit=True)

    async def story(executor: PullExecutor, client: Client) -> None:
        await offered(executor, execution(task_id=str(task)))
        completing = asyncio.create_task(client.complete(await client.poll(), result=1))
        await until(lambda: len(looks) > 1)
        assert not completing.done()
        with engine.connect() as connection:
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.ended_tasks (id, name, queue, payload, status, attempt, failures, losses,"
                " priority, seq, created_at, ended_at)"
                " VALUES (%s, 'a', 'q', '', 'success', 1, 0, 0, 0, 1, now(), now())",
                (task.hex,),
            )
        assert (await completing).status_code == 200

    try:
        tell(story, address, settings)
    finally:
        with engine.connect() as connection:
            connection.exec_driver_sql("DELETE FROM orchestrator.ended_tasks WHERE id = %s", (task.hex,))
        engine.dispose()


def test_sixty_polls_need_few_threads(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        limits = httpx.Limits(max_connections=None)
        async with Client(base_url=address, timeout=90, limits=limits) as crowd:
            polls = [asyncio.create_task(crowd.poll(worker=f"w-{number}", wait=60)) for number in range(60)]
            async with asyncio.timeout(60):
                while len(waiting_polls()) < 60:
                    await asyncio.sleep(0.05)
            assert threading.active_count() < 45
            for number in range(60):
                await offered(executor, execution(f"e-{number}"))
            found = await asyncio.gather(*polls)
        assert len({work["request_id"] for work in found}) == 60

    def waiting_polls() -> list[Any]:
        import gc

        from orchestrator.transport.pull_notifications import PullNotifications

        found = [one for one in gc.get_objects() if isinstance(one, PullNotifications) and one._one_by_one]
        return [wake for one in found for wake in one._waiting.get("sum", ())]

    tell(story, address, settings)


def test_a_too_large_result_is_rejected(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        await offered(executor, execution())
        answer = await client.complete(await client.poll(), result="x" * 1_100_000)
        assert (answer.status_code, "max_payload" in answer.json()["detail"]) == (413, True)

    tell(story, address, settings)


def test_the_example_reports_an_error_if_its_result_is_rejected() -> None:
    if missing := [name for name in ("curl", "jq") if shutil.which(name) is None]:
        pytest.skip(f"there is no {missing[0]} here")
    completions: list[dict[str, Any]] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = 200, {"queue_id": "q", "lease": 60, "input": {"text": "one"}}
            if self.path.endswith("complete"):
                completions.append(body)
                status = 422 if len(completions) == 1 else 200
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {**os.environ, "API": f"http://127.0.0.1:{server.server_port}", "ONCE": "1"}
        subprocess.run(["sh", str(EXAMPLES / "pull.sh")], env=environment, timeout=60, check=True)
        server.shutdown()
    assert [body.get("result") for body in completions] == [1, None]
    assert completions[1]["error"] == "The API refused the result: 422"


def test_a_worker_in_another_language_completes_work(address: str, settings: Settings) -> None:
    if missing := [name for name in ("curl", "jq") if shutil.which(name) is None]:
        pytest.skip(f"there is no {missing[0]} here")
    work = Execution(
        name="e-1",
        task="count",
        task_id=str(uuid4()),
        attempt=1,
        queue="default",
        options=Pull(),
        input={"text": "one two  three"},
    )

    async def story(executor: PullExecutor, _: Client) -> None:
        watching = await watched(executor, work)
        process = await asyncio.create_subprocess_exec(
            "sh", str(EXAMPLES / "pull.sh"), env={**os.environ, "API": address, "ONCE": "1"}
        )
        try:
            assert await asyncio.wait_for(watching, 60) == Finished(3)
            await executor.release(work, "e-1")
            assert await asyncio.wait_for(process.wait(), 60) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    tell(story, address, settings)


def test_the_shell_example_has_at_most_thirty_lines() -> None:
    lines = (EXAMPLES / "pull.sh").read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 30
