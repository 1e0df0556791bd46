"""Look at the system again and again, with a handful of bounded statements, and remember the last minute."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from uuid import UUID

from redis import Redis
from sqlalchemy import Connection

from orchestrator.cli.terminal.reading import reading
from orchestrator.domain.states import ShownRunState
from orchestrator.errors import OrchestratorError
from orchestrator.settings import Settings
from orchestrator.store import database, insights
from orchestrator.store.insights import Leader, RunFilter, RunView, activity
from orchestrator.store.insights.activity import FailureGroup, TaskInFlight, WorkerNow
from orchestrator.store.insights.system import find_leader
from orchestrator.store.load import QueueLoad, SystemLoad, queue_loads, system_load, use_indexes
from orchestrator.telemetry import first_line
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.journal import read_marks
from orchestrator.transport.keys import Keys

MINUTE = 60
_AGAIN = 4.0
"""Seconds that are counted anew with each look: what a tick commits may have ended a little before."""
_STEADY = 5
"""Seconds over which a rate is taken."""
_LATE = 2.0
"""Seconds after which a look is late."""
_LONGEST = 5.0
"""Seconds that a statement may take."""
_MOST_RUNS = 50


@dataclass(frozen=True, kw_only=True)
class QueueNow(QueueLoad):
    """One queue, and what it has done in the last minute."""

    rate: float = 0.0
    """Tasks that end in a second, of late."""
    failing: float = 0.0
    """How many of these fail."""
    minute: tuple[int, ...] = ()
    """Tasks that ended in each of the last seconds."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that one look has found."""

    at: datetime
    """When it was."""
    leader: Leader | None = None
    """The leader."""
    load: SystemLoad
    """Numbers about the whole."""
    queues: Sequence[QueueNow] = ()
    """Every queue with something to do, or done."""
    running: Sequence[TaskInFlight] = ()
    """What is with the workers, the longest first."""
    workers: Sequence[WorkerNow] = ()
    """The fleet."""
    failures: Sequence[FailureGroup] = ()
    """What fails, by task and type of error."""
    runs: Sequence[RunView] = ()
    """Runs that are under way, the newest first."""
    redis: str | None = None
    """Why Redis cannot be used, if it cannot."""
    redis_memory: int = 0
    """Bytes that it uses."""
    quarantined: int = 0
    """Messages that were set aside."""
    done: Mapping[str, float] = field(default_factory=dict)
    """How far running tasks say they have come, by id, as fractions."""
    took: float = 0.0
    """Seconds that the look took."""
    minute: tuple[int, ...] = ()
    """Tasks that ended in each of the last seconds, of all queues."""

    @property
    def hears_workers(self) -> bool:
        """A scheduler leads and hears the workers; if not, their numbers say nothing."""
        is_heard = not self.workers or any(worker.state != "unheard" for worker in self.workers)
        return self.leader is not None and is_heard

    @property
    def rate(self) -> float:
        return sum(queue.rate for queue in self.queues)

    @property
    def failing(self) -> float:
        return sum(queue.failing for queue in self.queues)


@dataclass
class History:
    """How many tasks ended in which second, by queue; a minute of it."""

    _ended: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _failed: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _looked: bool = False

    def look(self, connection: Connection, now: float) -> None:
        """Count what has ended since the last look."""
        found: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
        for row in activity.ended_lately(connection, _AGAIN if self._looked else MINUTE):
            found[row.queue, row.second][0] += row.tasks
            found[row.queue, row.second][1] += row.tasks if row.status == "failed" else 0
        for (queue, second), (ended, failed) in found.items():
            self._ended[queue][second] = max(ended, self._ended[queue][second])
            self._failed[queue][second] = max(failed, self._failed[queue][second])
        self._looked = True
        for counts in (*self._ended.values(), *self._failed.values()):
            for second in [second for second in counts if second < now - MINUTE - 2]:
                del counts[second]

    def of(self, load: QueueLoad, now: float) -> QueueNow:
        ended, failed = self._ended[load.queue], self._failed[load.queue]
        last = range(int(now) - _STEADY, int(now))
        return QueueNow(
            **{name: getattr(load, name) for name in load.__dataclass_fields__},
            rate=sum(ended[second] for second in last) / _STEADY,
            failing=sum(failed[second] for second in last) / _STEADY,
            minute=tuple(ended[second] for second in range(int(now) - MINUTE, int(now))),
        )

    def queues(self, loads: Sequence[QueueLoad], now: float) -> list[QueueNow]:
        """Return all queues that have something to do, or have done something in the last minute."""
        known = {load.queue for load in loads}
        idle = [
            QueueLoad(queue=queue, ready=0, delayed=0, in_flight=0, oldest=None, slots=0, paused=False)
            for queue, counts in self._ended.items()
            if queue not in known and counts
        ]
        return [self.of(load, now) for load in (*loads, *idle)]


class Sampler:
    """Looks in a thread of its own, so that a server that hangs keeps nobody from the keyboard."""

    def __init__(self, settings: Settings, interval: float) -> None:
        self._settings = settings
        self._interval = interval
        self._history = History()
        self._redis: Redis = connect(settings.require_redis(), timeout=1.0)
        self._keys = Keys.of(settings)
        self._stopping = threading.Event()
        self.latest: Snapshot | None = None
        self.looked_at = time.monotonic()
        """When the latest look ended."""
        self._trouble: str | None = None

    def look(self, connection: Connection) -> Snapshot:
        """Look once."""
        began = time.monotonic()
        loads, load = queue_loads(connection), system_load(connection)
        now = activity.time_of(connection)
        self._history.look(connection, now)
        queues = self._history.queues(loads, now)
        runs, _ = insights.list_runs(connection, RunFilter(statuses=(ShownRunState.RUNNING,)), limit=_MOST_RUNS)
        found = Snapshot(
            at=datetime.now(UTC),
            leader=find_leader(connection),
            load=load,
            queues=queues,
            running=activity.in_flight(connection),
            workers=activity.workers_now(connection),
            failures=activity.failures_lately(connection),
            runs=runs,
            minute=tuple(sum(column) for column in zip(*(queue.minute for queue in queues), strict=True)),
        )
        return replace(self._with_redis(found), took=time.monotonic() - began)

    def _with_redis(self, found: Snapshot) -> Snapshot:
        try:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.info("memory")
            pipeline.xlen(self._keys.quarantine)
            memory, quarantined = pipeline.execute(raise_on_error=False)
            if isinstance(memory, Exception):
                raise memory
            running = {UUID(task.id).bytes: task for task in found.running if task.status == "running"}
            marks = read_marks(self._redis, self._keys, [*running])
        except UNAVAILABLE as error:
            return replace(found, redis=first_line(error))
        set_aside = quarantined if isinstance(quarantined, int) else 0
        done = {
            running[id].id: mark.fraction for id, mark in marks.items() if mark and mark.attempt == running[id].attempt
        }
        return replace(found, redis_memory=memory["used_memory"], quarantined=set_aside, done=done)

    def look_once(self) -> Snapshot:
        """Look, and raise what is wrong."""
        with reading(self._settings) as connection:
            use_indexes(connection, _LONGEST)
            return self.look(connection)

    def start(self, told: Callable[[], None]) -> None:
        """Look again and again; `told` is called after each look."""
        threading.Thread(target=self._run, args=(told,), name="look", daemon=True).start()

    @property
    def trouble(self) -> str | None:
        """Why nothing new is seen, if that is so: Postgres refuses, or does not answer."""
        return self._trouble or ("it does not answer" if self.age > _LATE + 3 * self._interval else None)

    @property
    def age(self) -> float:
        """Seconds since the latest look ended."""
        return time.monotonic() - self.looked_at

    def stop(self) -> None:
        self._stopping.set()

    def _run(self, told: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                with reading(self._settings) as connection:
                    use_indexes(connection, _LONGEST)
                    while not self._stopping.is_set():
                        self.latest = self.look(connection)
                        self.looked_at, self._trouble = time.monotonic(), None
                        told()
                        self._stopping.wait(self._interval)
            except (*database.UNAVAILABLE, OrchestratorError) as error:
                self._trouble = first_line(error)
                told()
                self._stopping.wait(max(1.0, self._interval))
