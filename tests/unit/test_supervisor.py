"""What the parent of a worker's processes says, and tells them, while nobody can hear of it."""

from __future__ import annotations

import logging
from contextlib import closing, suppress
from multiprocessing.connection import Pipe

import pytest

from orchestrator.settings import Settings
from orchestrator.transport.codec import decode
from orchestrator.transport.connection import UNAVAILABLE
from orchestrator.workers.parent.child import Child
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.parent.supervisor import Supervisor
from orchestrator.workers.process import Command
from orchestrator.workers.spec import WorkerSpec


@pytest.mark.parametrize("draining", [False, True])
def test_a_worker_that_is_not_heard_says_so_once_and_then_seldom(
    caplog: pytest.LogCaptureFixture, draining: bool
) -> None:
    """And it tells its processes once: one that stands still reads nothing, and the pipe to it would fill up."""
    caplog.set_level(logging.WARNING, "orchestrator.worker")
    supervisor = Supervisor(WorkerSpec(app="shop:app"), Settings(redis_url="redis://localhost:1"))
    ours, theirs = Pipe()
    with closing(ours), closing(theirs):
        child = Child("w1", 1, ours, HeldAttempts(capacity=4))
        child.names, child.draining = ["job"], draining
        supervisor._children[1] = child
        supervisor._beating._last = 1_000.0
        for second in range(1_001, 1_131):
            with suppress(*UNAVAILABLE):
                supervisor._beat(float(second))
        told: list[str] = []
        while theirs.poll():
            told.append(decode(Command, theirs.recv_bytes()).verb)
    assert [record.getMessage() for record in caplog.records] == [
        f"unheard for {seconds}.0 s; asking which tasks still count" for seconds in (6, 66, 126)
    ]
    assert told == ["pause"]
