"""Child processes of a worker: used again while there is work, and ended when there is none."""

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

from orchestrator.domain.task import Dispatch, Succeeded
from orchestrator.workers.isolated import Isolation
from orchestrator.workers.job import Bundle, Job
from orchestrator.workers.spec import WorkerSpec
from tests.waiting import eventually

APPLICATION = "tests.acceptance.project"


class Nobody:
    """An outbox that is not used."""

    def hand_over(self, tasks: object) -> None:  # noqa: ARG002
        raise AssertionError("no task enqueues here")


@pytest.fixture
def isolation() -> Iterator[Isolation]:
    isolation = Isolation(WorkerSpec(app=f"{APPLICATION}:app"), Nobody(), kept_warm=2.0)
    yield isolation
    isolation.close()


def run(isolation: Isolation) -> int:
    """Run a task in a child; return the child's process id."""
    payload = msgspec.msgpack.encode(((7,), {}))
    dispatch = Dispatch(uuid4().bytes, 1, f"{APPLICATION}.isolated", payload, "default")
    job = Job(dispatch, Bundle("", "", "", 1), 0, time.monotonic())
    job.begin(time.monotonic())
    report = isolation.run(job, lambda _: None)
    assert isinstance(report, Succeeded), report
    number, process = msgspec.msgpack.decode(report.result)
    assert number == 7
    return int(process)


def children() -> set[int]:
    found: set[int] = set()
    for child in psutil.Process(os.getpid()).children():
        with suppress(psutil.Error):  # it has just ended
            if "orchestrator.workers.isolated" in child.cmdline():
                found.add(child.pid)
    return found


def test_children_are_used_again_and_then_retire(isolation: Isolation) -> None:
    first = run(isolation)
    assert run(isolation) == first
    with ThreadPoolExecutor(3) as threads:
        used = set(threads.map(lambda _: run(isolation), range(3)))
    eventually(lambda: not children(), "every child has ended", 60)
    assert run(isolation) not in used, "another one is started when there is work again"
    eventually(lambda: not children(), "every child has ended", 60)
