"""Child processes of a worker: reused while there is work, and ended when there is none."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from uuid import uuid4

import msgspec
import psutil
import pytest

from orchestrator.domain.tasks.task import Dispatch, Succeeded
from orchestrator.errors import TaskAborted
from orchestrator.workers.running import isolated
from orchestrator.workers.running.isolated import Isolation
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.spec import WorkerSpec
from tests.outbox import ClosedOutbox
from tests.waiting import eventually

APPLICATION = "tests.acceptance.project"


@pytest.fixture
def isolation() -> Iterator[Isolation]:
    isolation = Isolation(WorkerSpec(app=f"{APPLICATION}:app"), ClosedOutbox(), kept_warm=600.0)
    yield isolation
    isolation.close()


def new_job() -> Job:
    payload = msgspec.msgpack.encode(((7,), {}))
    dispatch = Dispatch(uuid4().bytes, 1, f"{APPLICATION}.isolated", payload, "default")
    job = Job(dispatch, Bundle("", "", "", 1), 0, time.monotonic())
    job.begin(time.monotonic())
    return job


def run(isolation: Isolation) -> int:
    """Run a task in a child; return the child's process id."""
    report = isolation.run(new_job(), lambda _: None)
    assert isinstance(report, Succeeded), report
    number, process = msgspec.msgpack.decode(report.result)
    assert number == 7
    return int(process)


def children() -> set[int]:
    found: set[int] = set()
    for child in psutil.Process(os.getpid()).children():
        with suppress(psutil.Error):  # it has just ended
            command = child.cmdline()
            is_dying = not command and child.status() != psutil.STATUS_ZOMBIE  # and may still look alive
            if is_dying or "orchestrator.workers.running.isolated" in command:
                found.add(child.pid)
    return found


def test_children_are_reused(isolation: Isolation) -> None:
    first = run(isolation)
    assert run(isolation) == first


def test_idle_children_exit() -> None:
    isolation = Isolation(WorkerSpec(app=f"{APPLICATION}:app"), ClosedOutbox(), kept_warm=0.5)
    with ThreadPoolExecutor(3) as threads:
        used = set(threads.map(lambda _: run(isolation), range(3)))
    eventually(lambda: not children(), "every child has ended", 60)
    assert run(isolation) not in used, "another one is started when there is work again"
    eventually(lambda: not children(), "every child has ended", 60)
    isolation.close()


def test_running_children_take_over_the_work_of_starting_ones(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker once died of many short tasks, because starting processes for them takes long."""
    monkeypatch.setattr(isolated, "_MAX_STARTING", 1)
    with ThreadPoolExecutor(16) as threads:
        used = list(threads.map(lambda _: run(isolation), range(32)))
    assert len(used) == 32
    assert len(set(used)) <= 8


def test_a_job_waiting_for_a_child_can_be_stopped(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_MAX_STARTING", 0)
    job = new_job()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(isolation.run, job, lambda _: None)
        job.stop_with(TaskAborted, time.monotonic())
        with pytest.raises(TaskAborted):
            waiting.result(30)
