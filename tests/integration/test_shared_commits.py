"""Coroutines that enqueue concurrently share commits; each gets the outcome that a single call would have."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from orchestrator import Duplicate, Handle, InvalidTask, Orchestrator, Task, Unavailable, Uncertain
from orchestrator.sdk.backend import shared_commits as shared
from orchestrator.store import database
from tests.chaos.cutting import Cutting
from tests.emptying import empty
from tests.integration.api_client import empty_engine  # noqa: F401


@pytest.fixture
def line(database_url: str) -> Iterator[Cutting]:
    with tempfile.TemporaryDirectory() as folder, Cutting(database_url, Path(folder)) as line:
        yield line
        line.go_on()


@pytest.fixture
def app(line: Cutting, redis_url: str, engine: Engine) -> Iterator[Orchestrator]:
    app = Orchestrator(database_url=line.url, redis_url=redis_url, database_timeout=60)
    yield app
    app.close()


@pytest.fixture
def job(app: Orchestrator) -> Task[[int], int]:
    @app.task(name="job")
    def job(number: int) -> int:
        return number

    return job


def rows(engine: Engine, sql: str) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(sql))]


async def together(*calls: Coroutine[Any, Any, Handle[int]]) -> list[Any]:
    """Run calls in one turn of the event loop; return their results or exceptions."""
    return await asyncio.gather(*calls, return_exceptions=True)


def stored(engine: Engine) -> set[str]:
    return {str(id) for (id,) in rows(engine, "SELECT id FROM orchestrator.tasks")}


def test_coroutines_share_commits_and_keep_their_order(job: Task[[int], int], engine: Engine) -> None:
    async def main() -> list[Any]:
        first = await job.aenqueue(0)  # opens the backend that the others share
        return [first, *await together(*(job.aenqueue(number) for number in range(300)))]

    handles = asyncio.run(main())
    in_order = rows(engine, "SELECT id, xmin::text FROM orchestrator.tasks ORDER BY seq")
    assert [str(id) for id, _ in in_order] == [handle.id for handle in handles]
    assert len({transaction for _, transaction in in_order[1:]}) <= 2


def test_all_options_are_stored_as_by_single_calls(app: Orchestrator, job: Task[[int], int], engine: Engine) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"priority": 7, "delay": 3600},
        {"expires": 3600, "concurrency_key": 'a "b" \\c'},
        {"unique_key": "all options", "retries": 3},
        {"idempotency_key": "all options"},
        {"on_success": job, "queue": "other", "concurrency_key": "a"},
    ]

    async def main() -> None:
        found = await together(*(job.options(**given).aenqueue(1) for given in options))
        assert {type(one) for one in found} == {Handle}

    def found() -> list[tuple[Any, ...]]:
        tasks = rows(
            engine,
            "SELECT name, queue, priority, status, payload, options::text, lane, unique_key, callbacks::text,"
            " round(extract(epoch FROM wake_at - created_at)), round(extract(epoch FROM expires_at - created_at)),"
            " (SELECT (scope, round(extract(epoch FROM until - created_at)))::text FROM orchestrator.unique_keys WHERE"
            " task_id = tasks.id), (SELECT (kind, body)::text FROM orchestrator.inbox WHERE target = tasks.id)"
            " FROM orchestrator.tasks ORDER BY seq",
        )
        with engine.connect() as connection:
            empty(connection)
        return tasks

    asyncio.run(main())
    shared_ones = found()
    for given in options:
        job.options(**given).enqueue(1)
    assert shared_ones == found()
    assert len(shared_ones) == len(options)


def test_a_failed_enqueue_does_not_affect_others_of_its_commit(
    app: Orchestrator, job: Task[[int], int], engine: Engine
) -> None:
    refused = app.task(name="refused")(lambda number: number)
    with engine.connect() as connection:
        connection.execute(text("ALTER TABLE orchestrator.tasks ADD CONSTRAINT none_refused CHECK (name <> 'refused')"))
    with pytest.raises(IntegrityError) as alone:
        refused.enqueue(0)

    async def main() -> list[Any]:
        await job.aenqueue(0)
        return await together(
            *((refused if number in (7, 47, 87) else job).aenqueue(number) for number in range(100)),
            job.aenqueue("no number"),  # type: ignore[arg-type]
        )

    *outcomes, unsent = asyncio.run(main())
    assert isinstance(unsent, InvalidTask)
    errors = {number: one for number, one in enumerate(outcomes) if isinstance(one, BaseException)}
    assert errors.keys() == {7, 47, 87}
    assert {type(error) for error in errors.values()} == {alone.type}
    assert len(set(map(id, errors.values()))) == 3
    assert {one.id for one in outcomes if isinstance(one, Handle)} < stored(engine)
    assert len(stored(engine)) == 98
    with engine.connect() as connection:
        connection.execute(text("ALTER TABLE orchestrator.tasks DROP CONSTRAINT none_refused"))


def test_enqueues_of_one_commit_respect_a_common_key(job: Task[[int], int], engine: Engine) -> None:
    def with_key(number: int, policy: str) -> Coroutine[Any, Any, Handle[int]]:
        return job.options(unique_key=policy, on_duplicate=policy).aenqueue(number)  # type: ignore[arg-type]

    async def main() -> list[Any]:
        return await together(
            *(with_key(number, "return") for number in range(3)),
            *(with_key(number, "raise") for number in range(2)),
            *(with_key(number, "replace") for number in range(3)),
            *(job.options(idempotency_key="same call").aenqueue(number) for number in (1, 1, 2)),
        )

    found = asyncio.run(main())
    assert found[0] == found[1] == found[2]
    assert isinstance(found[4], Duplicate)
    assert found[4].task_id == found[3].id
    assert found[5] == found[6] == found[7]
    assert found[8] == found[9]
    assert isinstance(found[10], Duplicate)
    assert found[10].task_id == found[8].id
    payloads = {str(id): bytes(payload) for id, payload in rows(engine, "SELECT id, payload FROM orchestrator.tasks")}
    assert payloads.keys() == {found[place].id for place in (0, 3, 5, 8)}
    assert payloads[found[5].id] == payloads[found[0].id].replace(b"\x00", b"\x02")  # the arguments of the last call


def test_a_shared_commit_respects_the_period_of_a_key(job: Task[[int], int], engine: Engine) -> None:
    async def main() -> None:
        keyed = job.options(unique_key="later", unique_for=3600)
        first, other = await together(keyed.aenqueue(1), job.aenqueue(1))
        again, _ = await together(keyed.aenqueue(2), job.aenqueue(2))
        assert again == first != other
        rows(engine, "UPDATE orchestrator.unique_keys SET until = now() RETURNING 1")
        anew, _ = await together(keyed.aenqueue(3), job.aenqueue(3))
        assert anew != first

    asyncio.run(main())


def test_a_call_that_waits_for_a_key_does_not_delay_others(
    job: Task[[int], int], engine: Engine, database_url: str
) -> None:
    keyed = job.options(unique_key="held")
    transactions = database.engine_for(database_url)

    async def main() -> None:
        with transactions.begin() as connection:
            held = keyed.enqueue_in(connection, 1)
            waits = asyncio.create_task(keyed.aenqueue(2))
            for _ in range(3):
                others = await asyncio.wait_for(together(*(job.aenqueue(number) for number in range(5))), 60)
                assert all(isinstance(other, Handle) for other in others)
            assert not waits.done()
        assert await asyncio.wait_for(waits, 60) == held

    asyncio.run(main())
    transactions.dispose()


@pytest.mark.parametrize("count", [1, 20])
def test_a_lost_commit_reply_raises_uncertain_in_each_call(
    job: Task[[int], int], engine: Engine, line: Cutting, count: int
) -> None:
    async def main() -> None:
        before = {(await job.aenqueue(0)).id}
        line.arm(b"enqueue.insert" if count == 1 else b"enqueue.shared")
        errors = await together(*(job.aenqueue(number) for number in range(count)))
        assert {type(error) for error in errors} == {Uncertain}
        told = {str(error).partition("whether task ")[2].partition(" was stored")[0] for error in errors}
        assert told == stored(engine) - before  # the reply was lost, but the tasks were stored
        assert len(told) == count
        assert isinstance(await job.aenqueue(1), Handle)

    asyncio.run(main())


def test_a_lost_connection_raises_the_error_of_a_single_call(job: Task[[int], int], engine: Engine) -> None:
    async def ended(calls: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        with engine.connect() as connection:
            connection.execute(text("BEGIN; LOCK TABLE orchestrator.tasks IN SHARE MODE"))
            under_way = asyncio.ensure_future(calls)
            while not (waiting := rows(engine, _WAITING)):
                await asyncio.sleep(0.01)
            rows(engine, f"SELECT pg_terminate_backend({waiting[0][0]})")
            errors = await under_way
            connection.execute(text("ROLLBACK"))
        return errors

    async def main() -> None:
        await job.aenqueue(0)
        (alone,) = await ended(together(asyncio.to_thread(job.enqueue, 0)))
        errors = await ended(together(*(job.aenqueue(number) for number in range(20))))
        assert isinstance(alone, (Uncertain, Unavailable))
        assert {type(error) for error in errors} == {type(alone)}
        assert len({str(error) for error in errors}) == 20
        assert isinstance(await job.aenqueue(1), Handle)
        assert len(stored(engine)) == 2

    asyncio.run(main())


_WAITING = "SELECT pid FROM pg_stat_activity WHERE query LIKE '%/* enqueue.%' AND wait_event_type = 'Lock'"


def test_ten_thousand_coroutines_need_a_few_threads(job: Task[[int], int], engine: Engine) -> None:
    most = 0
    before = set(threading.enumerate())  # clients of other tests may still be closing

    async def main() -> list[Any]:
        nonlocal most
        calls = asyncio.gather(*(job.aenqueue(number) for number in range(10_000)))
        while not calls.done():
            ours = {*threading.enumerate()} - before
            most = max(most, sum(thread.name.startswith("orchestrator-") for thread in ours))
            await asyncio.sleep(0)
        return await calls

    handles = asyncio.run(main())
    assert stored(engine) == {handle.id for handle in handles}
    assert len(handles) == 10_000
    assert 0 < most <= shared._MAX_COMMITS + 3  # the other threads load the store, and watch for hanging statements


def test_event_loops_in_several_threads_can_enqueue(job: Task[[int], int], engine: Engine) -> None:
    found: list[Sequence[Any]] = []

    async def main() -> None:
        found.append(await together(*(job.aenqueue(number) for number in range(50))))

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stored(engine) == {handle.id for handles in found for handle in handles}
    assert len(stored(engine)) == 300


def test_a_cancelled_call_does_not_affect_others(job: Task[[int], int], engine: Engine) -> None:
    async def main() -> None:
        await job.aenqueue(0)
        calls = [asyncio.create_task(job.aenqueue(number)) for number in range(9)]
        while not any(thread.name.startswith("orchestrator-commits") for thread in threading.enumerate()):
            await asyncio.sleep(0)
        calls[3].cancel()
        others = [await call for call in calls if call is not calls[3]]
        with pytest.raises(asyncio.CancelledError):
            await calls[3]
        assert {other.id for other in others} < stored(engine)

    asyncio.run(main())


def test_a_program_completes_running_enqueues_before_it_exits(
    database_url: str, redis_url: str, engine: Engine
) -> None:
    program = """
import asyncio, sys
from orchestrator import Orchestrator
app = Orchestrator(database_url=sys.argv[1], redis_url=sys.argv[2])
job = app.task(name="job")(lambda: None)
async def main():
    await job.aenqueue()
    calls = [asyncio.create_task(job.aenqueue()) for _ in range(50)]
    for _ in range(3):
        await asyncio.sleep(0)  # until they are handed to a thread
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, database_url, redis_url],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(stored(engine)) == 51
