"""Samples the system periodically with a few bounded statements, and keeps the counts of the last minute."""

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
from orchestrator.store import insights, postgres_errors
from orchestrator.store.insights import Leader, RunFilter, RunView, activity
from orchestrator.store.insights.activity import FailureGroup, TaskInFlight, WorkerNow
from orchestrator.store.insights.system import find_leader
from orchestrator.store.load import QueueLoad, SystemLoad, queue_loads, system_load, use_indexes
from orchestrator.telemetry import first_line
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.journal import read_all_progress
from orchestrator.transport.keys import Keys

MINUTE = 60
_RECOUNT = 4.0
"""Seconds that every sample counts again: a tick may commit tasks that ended a little earlier."""
_RATE_WINDOW = 5
"""Seconds over which rates are averaged."""
_GRACE = 2.0
"""Seconds without a sample, beyond three intervals, after which Postgres is reported as not answering."""
_STATEMENT_TIMEOUT = 5.0
"""Seconds that one statement may take."""
_MAX_RUNS = 50


@dataclass(frozen=True, kw_only=True)
class QueueNow(QueueLoad):
    """One queue, with its counts of the last minute."""

    rate: float = 0.0
    """Tasks that ended per second, over the last seconds."""
    failing: float = 0.0
    """Tasks that failed per second, over the last seconds."""
    minute: tuple[int, ...] = ()
    """Tasks that ended in each second of the last minute."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The result of one sample."""

    at: datetime
    leader: Leader | None = None
    load: SystemLoad
    """Totals of the whole system."""
    queues: Sequence[QueueNow] = ()
    """Queues with open tasks, workers, or tasks that ended in the last minute."""
    running: Sequence[TaskInFlight] = ()
    """Tasks in flight, the longest first."""
    workers: Sequence[WorkerNow] = ()
    failures: Sequence[FailureGroup] = ()
    """Recent failures, by task and type of error."""
    runs: Sequence[RunView] = ()
    """Running runs, the newest first."""
    redis: str | None = None
    """Why Redis cannot be used; None if it can."""
    redis_memory: int = 0
    """Bytes that Redis uses."""
    quarantined: int = 0
    """Messages in quarantine."""
    done: Mapping[str, float] = field(default_factory=dict)
    """Progress that running tasks report, as fractions by task id."""
    took: float = 0.0
    """Seconds that the sample took."""
    minute: tuple[int, ...] = ()
    """Tasks of all queues that ended in each second of the last minute."""

    @property
    def hears_workers(self) -> bool:
        """Return whether a leader exists and hears from the workers; otherwise their numbers are outdated."""
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
    """Tasks that ended per queue and second, over the last minute."""

    _ended: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _failed: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _has_sampled: bool = False

    def sample(self, connection: Connection, now: float) -> None:
        """Add the tasks that have ended since the last sample."""
        rows: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
        for row in activity.recently_ended(connection, _RECOUNT if self._has_sampled else MINUTE):
            rows[row.queue, row.second][0] += row.tasks
            rows[row.queue, row.second][1] += row.tasks if row.status == "failed" else 0
        for (queue, second), (ended, failed) in rows.items():
            self._ended[queue][second] = max(ended, self._ended[queue][second])
            self._failed[queue][second] = max(failed, self._failed[queue][second])
        self._has_sampled = True
        for counts in (*self._ended.values(), *self._failed.values()):
            for second in [second for second in counts if second < now - MINUTE - 2]:
                del counts[second]

    def of(self, load: QueueLoad, now: float) -> QueueNow:
        ended, failed = self._ended[load.queue], self._failed[load.queue]
        last = range(int(now) - _RATE_WINDOW, int(now))
        return QueueNow(
            **{name: getattr(load, name) for name in load.__dataclass_fields__},
            rate=sum(ended[second] for second in last) / _RATE_WINDOW,
            failing=sum(failed[second] for second in last) / _RATE_WINDOW,
            minute=tuple(ended[second] for second in range(int(now) - MINUTE, int(now))),
        )

    def queues(self, loads: Sequence[QueueLoad], now: float) -> list[QueueNow]:
        """Return all queues that have tasks or workers, or had tasks end in the last minute."""
        loaded = {load.queue for load in loads}
        idle = [
            QueueLoad(queue=queue, ready=0, delayed=0, in_flight=0, oldest=None, slots=0, paused=False)
            for queue, counts in self._ended.items()
            if queue not in loaded and counts
        ]
        return [self.of(load, now) for load in (*loads, *idle)]


class Sampler:
    """Samples in its own thread, so that a server that hangs does not block the keyboard."""

    def __init__(self, settings: Settings, interval: float) -> None:
        self._settings = settings
        self._interval = interval
        self._history = History()
        self._redis: Redis = connect(settings.require_redis(), timeout=1.0)
        self._keys = Keys.of(settings)
        self._stopping = threading.Event()
        self.latest: Snapshot | None = None
        self.sampled_at = time.monotonic()
        """The monotonic time at which the latest sample ended."""
        self._trouble: str | None = None

    def sample(self, connection: Connection) -> Snapshot:
        """Take one sample."""
        began = time.monotonic()
        loads, load = queue_loads(connection), system_load(connection)
        now = activity.time_of(connection)
        self._history.sample(connection, now)
        queues = self._history.queues(loads, now)
        runs, _ = insights.list_runs(connection, RunFilter(statuses=(ShownRunState.RUNNING,)), limit=_MAX_RUNS)
        snapshot = Snapshot(
            at=datetime.now(UTC),
            leader=find_leader(connection),
            load=load,
            queues=queues,
            running=activity.in_flight(connection),
            workers=activity.workers_now(connection),
            failures=activity.recent_failures(connection),
            runs=runs,
            minute=tuple(sum(column) for column in zip(*(queue.minute for queue in queues), strict=True)),
        )
        return replace(self._with_redis(snapshot), took=time.monotonic() - began)

    def _with_redis(self, snapshot: Snapshot) -> Snapshot:
        try:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.info("memory")
            pipeline.xlen(self._keys.quarantine)
            memory, quarantined = pipeline.execute(raise_on_error=False)
            if isinstance(memory, Exception):
                raise memory
            running = {UUID(task.id).bytes: task for task in snapshot.running if task.status == "running"}
            progress = read_all_progress(self._redis, self._keys, [*running])
        except UNAVAILABLE as error:
            return replace(snapshot, redis=first_line(error))
        in_quarantine = quarantined if isinstance(quarantined, int) else 0
        done = {
            running[id].id: report.fraction
            for id, report in progress.items()
            if report and report.attempt == running[id].attempt
        }
        return replace(snapshot, redis_memory=memory["used_memory"], quarantined=in_quarantine, done=done)

    def sample_once(self) -> Snapshot:
        """Take one sample on a new connection; errors are raised."""
        with reading(self._settings) as connection:
            use_indexes(connection, _STATEMENT_TIMEOUT)
            return self.sample(connection)

    def start(self, notify: Callable[[], None]) -> None:
        """Sample periodically in a thread; call `notify` after each sample."""
        threading.Thread(target=self._run, args=(notify,), name="look", daemon=True).start()

    @property
    def trouble(self) -> str | None:
        """Why no new samples arrive: Postgres refuses connections or does not answer. None if all is well."""
        return self._trouble or ("it does not answer" if self.age > _GRACE + 3 * self._interval else None)

    @property
    def age(self) -> float:
        """Seconds since the latest sample ended."""
        return time.monotonic() - self.sampled_at

    def stop(self) -> None:
        self._stopping.set()

    def _run(self, notify: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                with reading(self._settings) as connection:
                    use_indexes(connection, _STATEMENT_TIMEOUT)
                    while not self._stopping.is_set():
                        self.latest = self.sample(connection)
                        self.sampled_at, self._trouble = time.monotonic(), None
                        notify()
                        self._stopping.wait(self._interval)
            except (*postgres_errors.UNAVAILABLE, OrchestratorError) as error:
                self._trouble = first_line(error)
                notify()
                self._stopping.wait(max(1.0, self._interval))
