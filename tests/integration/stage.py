"""A scheduler on a real Postgres and Redis, with workers that the test controls step by step.

No process is started and no time passes on its own: tests advance the leader's monotonic clock, and give it an offset
to Postgres's clock where something must become due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from redis import Redis
from sqlalchemy import Engine, text

from orchestrator import Handle, Orchestrator, RunHandle, Settings, WorkflowHandle
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.domain.tasks.task import Dispatch, Enqueued, Failed, Recalled, Started, Succeeded, TaskError
from orchestrator.scheduler.loop import Scheduler
from orchestrator.sdk.ids import new_id
from orchestrator.store import database
from orchestrator.transport.codec import Heartbeat, Order, decode, digest_of, encode, names_digest, pack_attempt
from orchestrator.transport.connection import FULL, connect
from orchestrator.transport.keys import Keys, private_queue
from orchestrator.transport.leader.streams import LeaderStreams
from orchestrator.transport.signing import OFF
from orchestrator.transport.worker import OrderInbox, Receipt, WorkerStreams
from tests.emptying import empty
from tests.integration.serving import Way, serving

KEYS = Keys()
ERROR = TaskError("ValueError", "no", "a traceback")
ONE = b"\x01"
"""The number 1, encoded as a result."""
TTL = 5.0
ID = time_ordered_id(5, bytes(10))
"""The id of a task that does not exist."""


class Clock:
    """The leader's monotonic clock; only tests advance it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """A worker that consists of its Redis streams only."""

    def __init__(
        self,
        redis: Redis,
        name: str,
        *,
        knows: Sequence[str],
        slots: int,
        queues: Sequence[str],
        keys: Keys = KEYS,
        executions: int = 0,
    ) -> None:
        self.name = name
        self.alive = True
        self.doubtful = self.burst = self.draining = self.hungry = False
        self.still = 0.0
        self.parent: bytes | None = new_id()
        self.memory = 0
        self.release = ""
        self.parameters = b""
        self.held: list[tuple[bytes, int]] = []
        self._redis = redis
        self._streams = WorkerStreams(redis, keys)
        self._knows = list(knows)
        self._slots = slots
        self._executions = executions
        self._queues = list(queues)
        self._messages: list[tuple[str, str, set[tuple[bytes, int]]]] = []
        self._inbox: OrderInbox | None = None
        self._beats = 0

    def learn(self, *names: str) -> None:
        self._knows.extend(names)

    def beat(self) -> None:
        held = b"".join(pack_attempt(*attempt) for attempt in self.held)
        self._beats += 1
        beat = Heartbeat(
            self.name,
            "host",
            1,
            self._queues,
            self._slots,
            names_digest(self._knows),
            "",
            1.0,
            held,
            len(self.held),
            self.doubtful,
            self.burst,
            self.draining,
            number=self._beats,
            hungry=self.hungry,
            still=self.still,
            executions=self._executions,
            parent=self.parent,
            memory=self.memory,
            release=self.release,
            parameters=digest_of(self.parameters) if self.parameters else "",
        )
        if self.parameters:
            self._streams.publish_parameters(self.parameters)
        self._streams.beat([beat], self._knows, 600.0)

    def close(self) -> None:
        self._streams._connection.close()
        if self._inbox is not None:
            self._inbox._connection.disconnect()

    def die(self) -> None:
        """Stop sending heartbeats, and expire the last heartbeat."""
        self.alive = False
        self._redis.delete(KEYS.worker(self.name))

    def leave(self) -> None:
        """Shut down gracefully."""
        self.alive = False
        self._streams.deregister([self.name], [self.name])

    def join(self) -> tuple[str, list[str]]:
        """Make the worker's queues readable; return the generation and the queues."""
        generation = self._streams.generation()
        assert generation is not None
        queues = [*self._queues, private_queue(self.name)]
        self._streams.join(generation, queues)
        return generation, queues

    def take(self) -> list[Dispatch]:
        """Receive all messages of the worker's queues, and hold their tasks."""
        generation, queues = self.join()
        taken: list[Dispatch] = []
        for _, queue, entry, tasks in self._streams.take(generation, self.name, queues, 1_000, 0.001):
            self._messages.append((queue, entry, {(task.id, task.attempt) for task in tasks}))
            taken += tasks
        self.held += [(task.id, task.attempt) for task in taken]
        return taken

    def report(self, *reports: Report, turns: Sequence[Activated] = ()) -> Receipt:
        """Report outcomes, and acknowledge the messages whose tasks have all ended."""
        ended = {
            (report.id, report.attempt) for report in reports if not isinstance(report, (Started, Enqueued, Recalled))
        }
        done: dict[str, list[str]] = {}
        for queue, entry, members in self._messages:
            members -= ended
            if not members:
                done.setdefault(queue, []).append(entry)
        self._messages = [message for message in self._messages if message[2]]
        self.held = [attempt for attempt in self.held if attempt not in ended]
        return self.flush(encode(Flush(self.name, list(reports), list(turns))), done)

    def flush(self, body: bytes, done: dict[str, list[str]] | None = None) -> Receipt:
        generation = self._streams.generation()
        assert generation is not None
        receipt = self._streams.flush(generation, body, done or {})
        assert receipt.entry is not None
        return receipt

    def succeed(self, *tasks: Dispatch, result: bytes = ONE) -> None:
        self.report(*(Succeeded(task.id, task.attempt, 0.1, result) for task in tasks))

    def fail(self, *tasks: Dispatch, retryable: bool = True) -> None:
        self.report(*(Failed(task.id, task.attempt, 0.1, ERROR, retryable) for task in tasks))

    def start(self, *tasks: Dispatch) -> None:
        self.report(*(Started(task.id, task.attempt, 0.1) for task in tasks))

    def orders(self) -> list[Order]:
        if self._inbox is None:
            self._inbox = self._streams.order_inbox()
            self._inbox.add(self.name)
        self._inbox.ask(0.001)
        return [order for _, order in self._inbox.read()]


class System:
    """A leader, its services, and an application that enqueues tasks."""

    def __init__(self, engine: Engine, redis: Redis, settings: Settings) -> None:
        self.engine = engine
        self.redis = redis
        self.settings = settings
        self.keys = Keys.of(settings)
        self.clock = Clock()
        self.workers: list[Worker] = []
        self.schedulers: list[Scheduler] = []
        self._leaders: list[LeaderStreams] = []
        self.app = Orchestrator(settings)
        self.job = self.app.task(name="job")(lambda number=0: number)

    @property
    def scheduler(self) -> Scheduler:
        return self.schedulers[-1]

    def close(self) -> None:
        for scheduler in self.schedulers:
            scheduler._leadership.disconnect()
        for leader in self._leaders:
            leader.close()
            leader._redis.close()
        for worker in self.workers:
            worker.close()
        self.app.close()

    # -- the leader

    def stand_by(self, *, offset: float = 0.0) -> Scheduler:
        """Return a standby scheduler."""
        streams = LeaderStreams(connect(self.settings.redis_url), self.keys)
        self._leaders.append(streams)
        return Scheduler(
            self.engine, streams, self.settings, clock_offset=timedelta(seconds=offset), monotonic=self.clock
        )

    def lead(self, *, offset: float = 0.0) -> Scheduler:
        """Let a new scheduler, whose clock is `offset` seconds ahead, take over."""
        scheduler = self.stand_by(offset=offset)
        self.expire_lease()
        assert scheduler._leadership.acquire()
        scheduler.take_over()
        self.schedulers.append(scheduler)
        return scheduler

    def expire_lease(self) -> None:
        self.sql("UPDATE orchestrator.leases SET expires_at = now() - interval '1 second'")

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduler.tick()

    def pass_seconds(self, times: int = 1, *, after: float = 1.0) -> None:
        """For each of `times`: advance the clock, send heartbeats of live workers, and tick."""
        for _ in range(times):
            self.clock.now += after
            for worker in self.workers:
                if worker.alive:
                    with suppress(FULL):  # as a real worker does when Redis is full
                        worker.beat()
            self.scheduler.tick()

    def tick_until(self, condition: Callable[[], object], *, after: float = 1.0) -> None:
        """Let time pass until a condition is true, at most 30 ticks."""
        for _ in range(30):
            if condition():
                return
            self.pass_seconds(after=after)
        raise AssertionError("not within 30 looks")

    def settle(self) -> None:
        """Let time pass until the grace period of a new leader is over."""
        self.tick_until(
            lambda: not self.scheduler.term.fleet.in_grace, after=TTL / 2
        )  # the leader counts at most TTL / 2 for one tick

    # -- workers

    def worker(
        self,
        name: str = "w1",
        *,
        knows: Sequence[str] = ("job",),
        slots: int = 10,
        queue: str = "default",
        executions: int = 0,
    ) -> Worker:
        more: dict[str, Any] = {"keys": self.keys, "executions": executions}
        worker = Worker(self.redis, name, knows=knows, slots=slots, queues=[queue], **more)
        worker.beat()
        self.workers.append(worker)
        return worker

    def dispatch(self, count: int = 1, **options: Any) -> list[Handle[Any]]:
        """Enqueue tasks and wait until they are dispatched."""
        task = self.job.options(**options)
        handles = [task.enqueue(number) for number in range(count)]
        self.pass_seconds()
        assert self.states(*handles) == ["dispatched"] * count
        return handles

    # -- stored state

    def sql(self, statement: str, **parameters: Any) -> list[Any]:
        with self.engine.begin() as connection:
            result = connection.execute(text(statement), parameters)
            return list(result.mappings()) if result.returns_rows else []

    def row(self, handle: Handle[Any] | str | bytes) -> dict[str, Any]:
        """Return a task's row from `tasks` or `ended_tasks`."""
        identifier = UUID(bytes=handle) if isinstance(handle, bytes) else getattr(handle, "id", handle)
        for table in ("tasks", "ended_tasks"):
            for row in self.sql(f"SELECT * FROM orchestrator.{table} WHERE id = CAST(:id AS uuid)", id=str(identifier)):
                return dict(row)
        raise AssertionError(f"{identifier} is nowhere")

    def states(self, *handles: Handle[Any]) -> list[str]:
        return [self.row(handle)["status"] for handle in handles]

    def count(self, table: str) -> int:
        return int(self.sql(f"SELECT count(*) AS count FROM orchestrator.{table}")[0]["count"])

    def make_old(self) -> None:
        """Move the dispatch time of all tasks in flight one minute back."""
        self.sql("UPDATE orchestrator.tasks SET dispatched_at = dispatched_at - interval '1 minute'")

    @property
    def generation(self) -> str:
        value = self.redis.get(KEYS.generation)
        assert isinstance(value, bytes)
        return value.decode()

    def messages(self, queue: str = "default") -> list[tuple[bytes, int]]:
        """Return the attempts in a queue's stream."""
        entries: Any = self.redis.xrange(KEYS.queue(self.generation, queue))
        bodies = [OFF.body("", fields[b"d"]) for _, fields in entries]
        return [(task.id, task.attempt) for body in bodies for task in decode(list[Dispatch], body)]

    def quarantine(self) -> list[dict[bytes, bytes]]:
        entries: Any = self.redis.xrange(KEYS.quarantine)
        return [fields for _, fields in entries]


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine_for(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def system(engine: Engine, database_url: str, redis_url: str) -> Iterator[System]:
    """A system with empty tables, an empty Redis, and a leader in its first term."""
    with fresh_system(engine, database_url, redis_url) as system:
        yield system


@contextmanager
def fresh_system(engine: Engine, database_url: str, redis_url: str, **options: Any) -> Iterator[System]:
    """Yield a system with empty tables, an empty Redis, a leader in its first term, and the given settings."""
    settings = Settings(
        database_url=database_url, redis_url=redis_url, lease=60.0, safety_scan=0.01, worker_ttl=TTL, **options
    )
    redis = connect(redis_url)
    redis.flushall()
    with engine.begin() as connection:
        empty(connection)
    system = System(engine, redis, settings)
    system.lead()
    yield system
    system.close()
    redis.close()


@pytest.fixture(scope="module")
def way() -> Way:
    """The route by which commands reach the servers, unless a module tests both routes."""
    return "database"


@pytest.fixture(scope="module")
def addresses(way: Way, database_url: str, redis_url: str) -> Iterator[dict[str, str]]:
    """Addresses of the servers, as environment variables of commands."""
    if way == "database":
        yield {"ORCHESTRATOR_DATABASE_URL": database_url, "ORCHESTRATOR_REDIS_URL": redis_url}
        return
    with serving(Settings(database_url=database_url, redis_url=redis_url)) as url:
        yield {"ORCHESTRATOR_API_URL": url}


@pytest.fixture
def in_empty_folder(addresses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with the environment variables of commands."""
    monkeypatch.chdir(tmp_path)
    for name, value in addresses.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def raw(handle: Handle[Any] | RunHandle[Any] | WorkflowHandle[Any]) -> bytes:
    return UUID(handle.id).bytes
