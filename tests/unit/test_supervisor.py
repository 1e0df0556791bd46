"""The parent of a worker's processes: logs and commands during an outage, orders, reports and heartbeats."""

from __future__ import annotations

import logging
import os
from contextlib import closing, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest

from orchestrator.domain.tasks.task import Lost, Returned
from orchestrator.settings import Settings
from orchestrator.transport.codec import Attempt, Order, decode
from orchestrator.transport.connection import UNAVAILABLE
from orchestrator.workers.parent.child import Child
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.parent.messages import Command
from orchestrator.workers.parent.supervisor import Supervisor
from orchestrator.workers.spec import WorkerSpec


@pytest.mark.parametrize("draining", [False, True])
def test_an_unheard_worker_logs_once_and_then_rarely(caplog: pytest.LogCaptureFixture, draining: bool) -> None:
    """The parent pauses its processes once: a blocked process reads nothing, and its pipe would fill up."""
    caplog.set_level(logging.WARNING, "orchestrator.worker")
    supervisor = Supervisor(WorkerSpec(app="shop:app"), Settings(redis_url="redis://localhost:1"))
    ours, theirs = Pipe()
    with closing(ours), closing(theirs):
        child = Child("w1", 1, ours, HeldAttempts(capacity=4))
        child.names, child.draining = ["job"], draining
        supervisor._children[1] = child
        supervisor._heartbeats._last_sent_at = 1_000.0
        for second in range(1_001, 1_131):
            with suppress(*UNAVAILABLE):
                supervisor._beat(float(second))
        told: list[str] = []
        while theirs.poll():
            told.append(decode(Command, theirs.recv_bytes()).verb)
    assert [record.getMessage() for record in caplog.records] == [
        f"worker.cut_off seconds={seconds}.0: no heartbeat got through; "
        "the worker asks which of its tasks are still its own"
        for seconds in (6, 66, 126)
    ]
    assert told == ["pause"]


def received_commands(pipe: Connection[Any, Any]) -> list[str]:
    """Return the commands that a process has received."""
    verbs: list[str] = []
    while pipe.poll():
        verbs.append(decode(Command, pipe.recv_bytes()).verb)
    return verbs


def test_an_order_to_end_drains_every_process_once_and_is_no_signal() -> None:
    """The process that the order names, its neighbor, and one that has not loaded the application yet."""
    supervisor = Supervisor(WorkerSpec(app="shop:app"), Settings(redis_url="redis://localhost:1"))
    pipes = [Pipe() for _ in range(3)]
    children = [Child(f"w{place}", place, ours, HeldAttempts(capacity=4)) for place, (ours, _) in enumerate(pipes, 1)]
    killed: list[str] = []
    for child in children:
        supervisor._children[child.pid] = child
        child.kill = lambda child=child: killed.append(child.worker)  # type: ignore[method-assign, misc]
    children[0].names = children[1].names = ["job"]
    try:
        supervisor._apply_order("somebody else", Order(end=True))
        supervisor._handle_signals()
        assert [received_commands(theirs) for _, theirs in pipes] == [[], [], []]
        for _ in range(2):  # the leader repeats the order until it hears that they drain
            supervisor._apply_order("w1", Order(end=True))
            supervisor._handle_signals()
        assert [received_commands(theirs) for _, theirs in pipes] == [["drain"], ["drain"], ["drain"]]
        assert all(child.draining for child in children)
        supervisor._on_signal()
        supervisor._handle_signals()
        assert killed == []
        supervisor._on_signal()
        supervisor._handle_signals()
        assert killed == ["w1", "w2", "w3"]
    finally:
        for ours, theirs in pipes:
            ours.close()
            theirs.close()


def test_a_process_receives_the_attempts_that_the_leader_recalls() -> None:
    supervisor = Supervisor(WorkerSpec(app="shop:app"), Settings(redis_url="redis://localhost:1"))
    asked = [Attempt(b"a" * 16, 3)]
    pipes = [Pipe() for _ in range(2)]
    for place, (ours, _) in enumerate(pipes, 1):
        supervisor._children[place] = Child(f"w{place}", place, ours, HeldAttempts(capacity=4))
    try:
        supervisor._apply_order("w2", Order(spare=asked))
        assert not pipes[0][1].poll()
        assert decode(Command, pipes[1][1].recv_bytes()) == Command("spare", spare=asked)
    finally:
        for ours, theirs in pipes:
            ours.close()
            theirs.close()


def test_tasks_not_begun_in_a_dead_process_are_returned() -> None:
    """Tasks that only waited in the process used to be lost, too, and then ran in processes of their own."""
    ours, theirs = Pipe()
    with closing(ours), closing(theirs):
        held = HeldAttempts(capacity=4)
        slot, _ = held.add_all([(b"a" * 16, 1), (b"b" * 16, 1)])
        child = Child("w1", 1, ours, held)
        unknown = child.final_reports(1.0, "signal 9 (SIGKILL)")
        assert [type(one) for one in unknown] == [Lost, Lost], "either may have been the cause"
        held.mark_begun(slot)
        begun, waiting = child.final_reports(1.0, "signal 9 (SIGKILL)")
    assert begun == Lost(b"a" * 16, 1, alone=False, reason="signal 9 (SIGKILL)")
    assert isinstance(waiting, Returned)
    assert (waiting.id, waiting.begun) == (b"b" * 16, False)


def test_a_heartbeat_contains_the_parent_id_and_both_memory_sizes() -> None:
    spec = WorkerSpec(app="shop:app")
    supervisor = Supervisor(spec, Settings(redis_url="redis://localhost:1"))
    ours, theirs = Pipe()
    with closing(ours), closing(theirs):
        child = Child("w1", os.getpid(), ours, HeldAttempts(capacity=4))
        supervisor._children[1] = child
        supervisor._check_children(1_000.0)
        beat = child.heartbeat(spec, 1, supervisor._heartbeats.own, hungry=False)
    assert beat.parent == supervisor._heartbeats.own.id
    assert 2**20 < beat.memory < 2**36
    assert 2**20 < beat.parent_memory < 2**36
    other = Supervisor(spec, Settings(redis_url="redis://localhost:1"))
    assert other._heartbeats.own.id != supervisor._heartbeats.own.id
