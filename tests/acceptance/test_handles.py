"""Handles report the truth about existing tasks: with keys, after a retry, and in an asynchronous transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import project
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from orchestrator import (
    Handle,
    InvalidTask,
    NotFound,
    PayloadError,
    Task,
    TaskCancelled,
    TaskFailed,
    as_completed,
    gather,
)
from orchestrator.store.database import engine_for
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Stack
from tests.acceptance.ways import Way, both_ways, in_database, use_route  # noqa: F401

pytestmark = pytest.mark.long_for("http")  # test_enqueue_to_result.py covers HTTP in each build


@pytest.fixture(scope="module")
def running(way: Way, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        stack.scheduler()
        stack.worker("--database")
        use_route(way, stack, project.app)
        yield stack


# -- keys inside a task


@pytest.mark.parametrize(
    "parent",
    [project.parent_with_keys, project.parent_with_keys_isolated, project.parent_with_keys_in_transaction],
    ids=lambda task: task.name,
)
def test_a_unique_key_inside_a_task_returns_the_existing_task(running: Stack, parent: Task[[str], list[str]]) -> None:
    ids = parent.enqueue(parent.name).result(60)
    assert len(set(ids)) == 1
    _cancel(project.app.handle(ids[0]))
    again = project.add.options(unique_key=parent.name, delay=3600).enqueue(5, 5)
    assert parent.enqueue(parent.name).result(60) == [again.id] * 3
    _cancel(again)


def _cancel(waiting: Handle[Any]) -> None:
    """Cancel a delayed task, which releases its key."""
    assert waiting.status() == "pending"
    waiting.cancel()
    with pytest.raises(TaskCancelled):
        waiting.result(60)


def test_an_idempotency_key_inside_a_task_belongs_to_one_call(running: Stack) -> None:
    ids = project.parent_with_another_call.enqueue("invoice-7").result(60)
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert project.app.handle(ids[0]).result(60) == 2


# -- retries


def _failed_once(path: Path) -> tuple[Any, str]:
    handle = project.flaky.options(retries=0).enqueue(str(path), 1)
    with pytest.raises(TaskFailed):
        handle.result(60)
    return handle, str(path)


def test_a_handle_returns_the_new_outcome_after_a_retry(running: Stack, tmp_path: Path) -> None:
    handle, _ = _failed_once(tmp_path / "a")
    handle.retry()
    assert handle.result(60) == 2


def test_a_handle_returns_the_new_outcome_after_another_handles_retry(running: Stack, tmp_path: Path) -> None:
    handle, _ = _failed_once(tmp_path / "a")
    project.app.handle(handle.id).retry()
    assert asyncio.run(handle.aresult(60)) == 2


def test_handles_return_the_new_outcomes_after_a_bulk_retry(running: Stack, tmp_path: Path) -> None:
    handles = [_failed_once(tmp_path / name)[0] for name in "abc"]
    assert project.app.retry_failed(name="project.flaky") >= 3
    assert gather(handles, timeout=60) == [2, 2, 2]
    others = [_failed_once(tmp_path / name)[0] for name in "de"]
    project.app.retry_failed(name="project.flaky", error="failure 1")
    assert [handle.result(60) for handle in as_completed(others, timeout=60)] == [2, 2]


def test_tasks_retried_during_as_completed_return_their_new_outcomes(running: Stack, tmp_path: Path) -> None:
    handles = [project.flaky.options(retries=0).enqueue(str(tmp_path / name), 1) for name in "ab"]
    for handle in as_completed(handles, timeout=60):
        handle.retry()
    assert [handle.result(60) for handle in handles] == [2, 2]
    for handle in handles:
        assert handle.result(60) == 2


# -- gather


def test_a_missing_task_does_not_affect_other_gathered_results(running: Stack) -> None:
    missing = project.app.handle("01a1e011-4f75-7579-9901-0c678cdbf6c0")
    handles = [project.add.enqueue(1, 1), missing, project.broken.enqueue("x"), project.add.enqueue(2, 2)]
    first, second, third, fourth = gather(handles, timeout=60, return_exceptions=True)
    assert (first, fourth) == (2, 4)
    assert isinstance(second, NotFound)
    assert isinstance(third, TaskFailed)
    with pytest.raises(NotFound):
        missing.result(1)


def test_a_mistyped_result_does_not_affect_other_gathered_results(running: Stack) -> None:
    """The result was stored by a release in which the task returned another type."""
    other = project.add.enqueue(1, 1)
    unfit: Handle[Any] = Handle(project.app._client, other._id, project.move._signature)
    found, good = gather([unfit, project.add.enqueue(2, 2)], timeout=60, return_exceptions=True)
    assert isinstance(found, PayloadError)
    assert "The result of task 'project.move' does not match its annotation: expected Point" in str(found)
    assert good == 4


def test_a_result_that_is_not_stored_is_none(running: Stack) -> None:
    unkept = project.add.options(store_result=False)
    handles = [unkept.enqueue(1, 1), project.completes_with_nothing.enqueue(), project.add.enqueue(2, 2)]
    assert gather(handles, timeout=60) == [None, None, 4]
    assert [handle.result(60) for handle in handles] == [None, None, 4]
    assert project.app.start_many(unkept, [(1, 1), (2, 2)]).results(60) == [None, None]


def test_an_optional_context_is_passed_by_the_worker(running: Stack) -> None:
    assert project.attempt_of(7) == 107
    assert project.attempt_of.enqueue(7).result(60) == 8


# -- in a transaction


@pytest.fixture
def asynchronous(running: Stack) -> AsyncEngine:
    url = running.settings.database_url
    return create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))


@in_database
def test_tasks_are_enqueued_in_an_asynchronous_transaction(running: Stack, asynchronous: AsyncEngine) -> None:
    async def main() -> list[Any]:
        handles = []
        async with AsyncSession(asynchronous) as session:
            handles.append(await project.add.aenqueue_in(session, 1, b=2))
            handles.append(await project.add.options(unique_key="q", delay=0.1).aenqueue_in(session, 1, 3))
            handles.append(await project.add.options(unique_key="q").aenqueue_in(session, 1, 3))
            await session.commit()
        async with asynchronous.begin() as connection:
            handles.append(
                await project.add.options(priority=1, concurrency_key="k", timeout=9).aenqueue_in(connection, 1, 4)
            )
        async with AsyncSession(asynchronous) as session:
            undone = await project.add.aenqueue_in(session, 1, 2)
        with pytest.raises(NotFound):
            undone.status()
        with pytest.raises(InvalidTask, match=r"`await task.aenqueue_in\(session, …\)`"):
            async with AsyncSession(asynchronous) as session:
                project.add.enqueue_in(session, 1, 2)
        with pytest.raises(InvalidTask, match=r"`await task.aenqueue_in\(session, …\)`"):
            async with asynchronous.connect() as connection:
                project.add.enqueue_in(connection, 1, 2)
        found = [await handle.aresult(60) for handle in handles]
        await asynchronous.dispose()
        return found

    assert asyncio.run(main()) == [3, 4, 4, 5]


@in_database
def test_tasks_are_enqueued_in_the_transaction_of_a_session(running: Stack) -> None:
    engine = engine_for(running.settings.database_url)
    with Session(engine) as session:
        first = project.add.enqueue_in(session, 1, 2)
        with pytest.raises(NotFound):
            first.status()
        session.commit()
    scoped = scoped_session(sessionmaker(engine))
    second = project.add.enqueue_in(scoped, 1, 3)
    scoped.commit()
    scoped.remove()
    assert (first.result(60), second.result(60)) == (3, 4)
    with Session(engine) as session, pytest.raises(InvalidTask, match="aenqueue_in: expected an AsyncSession"):
        asyncio.run(project.add.aenqueue_in(session, 1, 2))
    with pytest.raises(
        InvalidTask, match="enqueue_in: expected a connection or a session of SQLAlchemy, or .*, found .*Engine"
    ):
        project.add.enqueue_in(engine, 1, 2)
    engine.dispose()
