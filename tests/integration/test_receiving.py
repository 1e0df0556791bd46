"""How a worker process receives messages while a generation ends, or while it cannot run tasks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis import Redis

from orchestrator import Settings
from orchestrator.domain.tasks.task import Dispatch, Returned
from orchestrator.transport.codec import encode
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys, private_queue
from orchestrator.transport.worker import Received, WorkerStreams
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.receiving import Age, Receiver
from orchestrator.workers.reporting.kept import PendingReport
from orchestrator.workers.reporting.reporter import Reporter
from orchestrator.workers.running.job import Job
from tests.waiting import eventually

WORKER = "w1"
OWN = private_queue(WORKER)


class KeepingPool:
    """A pool that stores jobs without running them, with room for executions, and with or without free slots."""

    def __init__(self) -> None:
        self.jobs: dict[bytes, Job] = {}
        self.driver = self.received = self
        self.slots = 0
        self.asked = 0
        self.standstill = SimpleNamespace(hands_back=False)

    def wait_for_room(self, timeout: float) -> int:
        if threading.current_thread().name == "executions":
            return 10
        self.asked += 1
        if not self.slots:
            threading.Event().wait(min(timeout, 0.01))
        return self.slots

    def submit(self, jobs: Sequence[Job]) -> None:
        self.jobs.update({job.dispatch.id: job for job in jobs})

    execute = submit

    def is_parent_silent(self) -> bool:
        return False

    def hand_back_executions(self) -> int:
        return 0

    def hand_back_waiting(self) -> int:
        return 0


class DelayedStreams(WorkerStreams):
    """Returns the messages that it has read only when the test allows it."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        super().__init__(redis, keys)
        self.has_read = threading.Event()
        self.may_return = threading.Event()

    def take(self, *arguments: Any) -> list[Received]:
        received = super().take(*arguments)
        if received:
            self.has_read.set()
            assert self.may_return.wait(60)
        return received


class Harness:
    """A receiving worker process; the test plays the leader."""

    def __init__(self, redis_url: str) -> None:
        self.settings = Settings(redis_url=redis_url)
        self.redis, self.keys = connect(redis_url), Keys()
        self.redis.flushall()
        self.redis.set(self.keys.server, str(self.redis.info("server")["run_id"]))
        self.pool, self.held = KeepingPool(), HeldAttempts(capacity=1_000)
        self.late = DelayedStreams(connect(redis_url), self.keys)
        self.reporter = Reporter(WorkerStreams(connect(redis_url), self.keys), WORKER, self.held)
        pool: Any = self.pool
        self.receiver = Receiver(
            self.settings,
            WORKER,
            ["default"],
            held=self.held,
            reporter=self.reporter,
            pool=pool,
            age=Age(None, pool, print),
        )
        self.receiver._connect = lambda: self.late  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self.receiver.run)

    def begin(self, generation: str) -> None:
        """Begin a generation like a leader."""
        self.redis.xadd(self.keys.events(generation), {"d": b""})
        self.redis.set(self.keys.generation, generation)
        if not self._thread.is_alive():
            self._thread.start()
        eventually(lambda: self.receiver._joined == generation, "it has joined")

    def send(self, generation: str, letter: bytes, entry: str = "*", *, is_task: bool = False) -> str:
        """Send an execution to this worker, or a task to the queue."""
        stream = self.keys.queue(generation, "default" if is_task else OWN)
        options = None if is_task else '{"executor": {"name": "process"}}'
        task = Dispatch(letter * 16, 1, "outside", b"", "default", options)
        body = self.keys.signing.sign(stream, encode([task]))
        return cast("bytes", self.redis.xadd(stream, {"d": body}, id=entry)).decode()

    def entries(self, generation: str) -> list[str]:
        found = cast("list[tuple[bytes, Any]]", self.redis.xrange(self.keys.queue(generation, OWN)))
        return [entry.decode() for entry, _ in found]

    def close(self) -> None:
        self.late.may_return.set()
        self.receiver.close()
        self._thread.join(30)
        self.redis.close()


@pytest.fixture
def harness(redis_url: str) -> Iterator[Harness]:
    harness = Harness(redis_url)
    yield harness
    harness.close()


def test_messages_of_an_ended_generation_drop_none_of_the_next(harness: Harness) -> None:
    """One thread has read an execution when another thread joins the next generation."""
    harness.begin("first")
    harness.send("first", b"a")
    eventually(lambda: b"a" * 16 in harness.pool.jobs, "from now on a thread of its own receives executions")
    entry = harness.send("first", b"b")
    assert harness.late.has_read.wait(60)
    harness.begin("second")
    harness.send("second", b"c", entry)  # a server whose clock was set back issues ids twice
    harness.late.may_return.set()
    job = eventually(lambda: harness.pool.jobs.get(b"b" * 16), "what was read is taken in")
    assert job.bundle.generation == "first"
    batch = [PendingReport(Returned(b"b" * 16, 1, "it is over"), job)]
    while batch:
        batch = harness.reporter._flush(batch)
    assert harness.reporter.generation == "second"
    assert harness.entries("second") == [entry]
    eventually(lambda: b"c" * 16 in harness.pool.jobs, "the message of the next generation is received")


def test_a_process_that_cannot_run_tasks_leaves_them_to_other_workers(harness: Harness) -> None:
    """Redis gives a message to the consumer that has waited longest, so such a process does not block in Redis."""
    harness.pool.slots, harness.pool.standstill.hands_back = 5, True
    harness.begin("first")
    other = WorkerStreams(connect(harness.settings.require_redis(), timeout=120), harness.keys)
    for letter in (b"a", b"b", b"c"):
        _send_while_it_waits(harness, other, letter)
    other._connection.close()
    assert harness.pool.jobs == {}
    harness.send("first", b"d", is_task=True)
    eventually(lambda: b"d" * 16 in harness.pool.jobs, "it takes what nobody else does")


def _send_while_it_waits(harness: Harness, other: WorkerStreams, letter: bytes) -> None:
    """Have another worker block in Redis, later than the first, and receive the task that is sent."""
    asked, connection = harness.pool.asked, other._connection.call("CLIENT", "ID")
    eventually(lambda: harness.pool.asked > asked + 2, "it looks for tasks")
    taken: list[Received] = []
    thread = threading.Thread(target=lambda: taken.extend(other.take("first", "other", ["default"], 1, 60.0)))
    thread.start()
    eventually(lambda: "b" in harness.redis.client_list(client_id=[connection])[0]["flags"], "the other waits in Redis")
    harness.send("first", letter, is_task=True)
    thread.join(60)
    assert [task.id for message in taken for task in message.tasks] == [letter * 16]
