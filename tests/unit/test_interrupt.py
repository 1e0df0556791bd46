"""Interrupting running code, and the table in which parent and child see which attempts must end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orchestrator import SoftTimeout
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.errors import TaskAborted, TaskTimeout
from orchestrator.transport.codec import unpack_attempts
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.running.delivery import Interruptible
from orchestrator.workers.running.job import Bundle, Job

A, B = b"a" * 16, b"b" * 16


def interrupted(function: Callable[[], Awaitable[Any]], cancellations: int = 1) -> Any:
    """Run a coroutine, cancel it this often, and return its result; only the first cancellation is soft."""

    async def run() -> Any:
        soft = True
        task = asyncio.ensure_future(_await(Interruptible(function(), lambda: soft)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for _ in range(cancellations):
            task.cancel()
            for _ in range(10):  # turns of the event loop that its reaction may take
                await asyncio.sleep(0)
        return await task

    return asyncio.run(run())


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_coroutine_may_catch_its_soft_timeout_and_continue() -> None:
    async def task() -> str:
        try:
            await forever()
        except SoftTimeout:
            assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
            async with asyncio.timeout(5):
                await asyncio.sleep(0)
        return "cleaned up"

    assert interrupted(task) == "cleaned up"


def test_timeouts_within_a_coroutine_still_work_after_a_soft_timeout() -> None:
    async def task() -> str:
        try:
            await forever()
        except SoftTimeout:
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.01):
                    await forever()
            assert not isinstance(caught.value, SoftTimeout)
        return "cleaned up"

    assert interrupted(task) == "cleaned up"


def test_only_the_first_cancellation_is_soft() -> None:
    async def task() -> None:
        try:
            await forever()
        except SoftTimeout:
            await forever()

    with pytest.raises(asyncio.CancelledError):
        interrupted(task, cancellations=2)


def test_awaited_child_tasks_are_cancelled_with_their_coroutine() -> None:
    ended: list[str] = []

    async def child() -> None:
        try:
            await forever()
        finally:
            ended.append("child")

    async def task() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())

    with pytest.raises(SoftTimeout):
        interrupted(task)
    assert ended == ["child", "child"]


def test_results_and_errors_pass_through() -> None:
    async def run() -> None:
        async def value() -> int:
            await asyncio.sleep(0)
            return 7

        async def error() -> None:
            await asyncio.sleep(0)
            raise LookupError("x")

        assert await Interruptible(value(), lambda: False) == 7
        with pytest.raises(LookupError):
            await Interruptible(error(), lambda: False)

    asyncio.run(run())


# -- jobs


def running_job() -> tuple[Job, list[type[BaseException]]]:
    job = Job(Dispatch(A, 1, "task", b"", "default"), Bundle("", "", "", 1), 0, 0.0)
    reasons: list[type[BaseException]] = []
    assert job.begin(0.0)
    job.interruptible(reasons.append)
    return job, reasons


def test_a_job_is_warned_once_and_stopped_once() -> None:
    job, reasons = running_job()
    job.warn()
    job.warn()
    job.stop_with(TaskTimeout, 1.0)
    job.stop_with(TaskAborted, 2.0)
    assert reasons == [SoftTimeout, TaskTimeout]
    assert not job.outlives_stop(1.5, grace=1.0)
    assert job.outlives_stop(2.5, grace=1.0)


def test_a_stopped_job_is_not_warned() -> None:
    job, reasons = running_job()
    job.stop_with(TaskAborted, 1.0)
    job.warn()
    assert reasons == [TaskAborted]


def test_a_warning_alone_starts_no_grace_period() -> None:
    job, _ = running_job()
    job.warn()
    assert not job.outlives_stop(1e9, grace=1.0)


def test_a_stop_requested_before_the_code_begins_takes_effect_then() -> None:
    job = Job(Dispatch(A, 1, "task", b"", "default"), Bundle("", "", "", 1), 0, 0.0)
    job.begin(0.0)
    job.stop_with(TaskAborted, 1.0)
    reasons: list[type[BaseException]] = []
    job.interruptible(reasons.append)
    assert reasons == [TaskAborted]
    job.uninterruptible()


def test_ended_code_is_not_interrupted() -> None:
    job, reasons = running_job()
    job.uninterruptible()
    job.stop_with(TaskTimeout, 1.0)
    assert reasons == []


# -- the table of held attempts


def test_the_parent_sees_overdue_attempts() -> None:
    held = HeldAttempts(capacity=4)
    first, second = held.add(A, 3), held.add(B, 1)
    held.limit(first, deadline=10.0, timeout=4.0, retryable=True)
    assert held.overdue(9.0) == []
    assert held.overdue(11.0) == [(A, 3, 10.0, 4.0, True)]
    held.unlimit(first)
    assert held.overdue(11.0) == []
    held.drop(second)
    assert held.unended() == [(A, 3)]


def test_lingering_ended_attempts_are_listed_but_not_lost() -> None:
    held = HeldAttempts(capacity=4)
    slot = held.add(A, 1)
    held.add(B, 1)
    held.mark_ended(slot)
    assert unpack_attempts(held.snapshot()[0]) == [(A, 1), (B, 1)]
    assert held.unended() == [(B, 1)]
    held.drop(slot)
    assert held.add(A, 2) == slot
    assert (A, 2) in held.unended(), "a slot that is used again has no past"


def test_the_pulse_is_the_last_written_beat() -> None:
    held = HeldAttempts(capacity=1)
    assert held.pulse() == (0.0, 0.0)
    held.beat(time.monotonic(), 0.5)
    assert held.pulse()[1] == 0.5
