"""A scheduler process: wait for Postgres and Redis, wire the parts together, and run until stopped."""

from __future__ import annotations

import gc
import os
import secrets
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psycopg2
from redis import Redis
from sqlalchemy import Engine, exc

from orchestrator.domain.fleet.announced import Standby
from orchestrator.memory import freeze_before_fork
from orchestrator.monitoring.exposition import Family, gauge, own_metrics
from orchestrator.monitoring.listener import serve_metrics
from orchestrator.monitoring.system import SystemGauges
from orchestrator.prerequisites import Prerequisites
from orchestrator.scheduler.loop import Scheduler
from orchestrator.scheduler.pruning import Pruner
from orchestrator.scheduler.spans import LeaderSpans
from orchestrator.scheduler.upkeep import Janitor, LogKeeping, PayloadCollection
from orchestrator.settings import Settings
from orchestrator.store import database, shards
from orchestrator.store.database import engine_for
from orchestrator.store.deadlines import Deadlines
from orchestrator.store.leases import RELEASED
from orchestrator.telemetry import first_line, get_logger
from orchestrator.terminal_safe import without_password
from orchestrator.tracing.entry import LAST_SPANS, begin_tracing
from orchestrator.transport import announcements
from orchestrator.transport.client import nudge
from orchestrator.transport.connection import UNAVAILABLE, connect, connect_shared, prerequisite
from orchestrator.transport.keys import Keys
from orchestrator.transport.leader.streams import LeaderStreams

_CLOSE_TIMEOUT = 1.0
"""Seconds that a stopping scheduler waits for the withdrawal of its announcement."""
_MAX_OFFER_INTERVAL = 31
"""Heartbeats between two offers of a lease, at most."""


class StandbyNotice:
    """Announces a standby in Redis at intervals while another scheduler leads, until this one leads or ends."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        leading: threading.Event,
        *,
        every: float,
        ttl: float,
        offer: Callable[[], None] | None = None,
    ) -> None:
        """With several shards, `offer` lets another scheduler take the lease, to share the shards evenly."""
        self._offer = offer
        self._process = os.getpid() if offer is None else os.getppid()  # one scheduler for all shards has one address
        self._redis = redis
        self._keys = keys
        self._leading = leading
        self._every = every
        self._ttl = ttl
        self._name = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._since: datetime | None = None
        """The announced start of the standby; None while nothing is announced."""
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread. A scheduler that leads at once is never announced as a standby."""
        threading.Thread(target=self._run, name="standby", daemon=True).start()

    def close(self) -> None:
        """Withdraw the announcement. If Redis takes long, leave it to expire."""
        self._is_over.set()
        if self._lock.acquire(timeout=_CLOSE_TIMEOUT):
            self._lock.release()
            self._announce()

    def _run(self) -> None:
        waits, interval = 0, 0
        while not self._is_over.is_set():
            (self._is_over if self._leading.is_set() else self._leading).wait(self._every)
            self._announce()
            if self._offer is None or not self._leading.is_set() or self._should_lead():
                waits, interval = 0, 0
            elif waits:
                waits -= 1
            else:  # a failed standby does not take the lease, and each offer interrupts leadership for a moment
                self._offer()
                waits = interval = min(2 * interval + 1, _MAX_OFFER_INTERVAL)

    def _announce(self) -> None:
        with self._lock:
            try:
                if not (self._leading.is_set() or self._is_over.is_set()):
                    self._since = self._since or datetime.now(UTC)
                    standby = Standby(address=self._address, since=self._since)
                    announcements.announce(self._redis, self._keys, self._name, standby, self._ttl)
                elif self._since is not None:
                    announcements.withdraw(self._redis, self._keys, self._name)
                    self._since = None
            except UNAVAILABLE as error:  # the announcement expires; readers see that Redis is down
                log.debug("scheduler.standby_unannounced error=%s", first_line(error))

    @property
    def _address(self) -> str:
        return f"{socket.gethostname()}:{self._process}"

    def _should_lead(self) -> bool:
        """Return whether this scheduler should lead this shard: by address, each gets every n-th shard."""
        try:
            found = {standby.address for standby in announcements.list_standbys(self._redis, self._keys)}
        except UNAVAILABLE:
            return True
        order = sorted(found | {self._address})
        return order[int(self._keys.namespace.partition("/")[2] or 0) % len(order)] == self._address


def listen(settings: Settings, keys: Keys, lease_released: Callable[[], None]) -> None:
    """Listen to Postgres forever, across outages. Wake the standby, or nudge the leader."""
    redis = connect(settings.require_redis())
    engine = engine_for(settings.require_database(), autocommit=True, pool_size=1, name="orchestrator notifications")
    pause = threading.Event()
    while True:
        try:
            with engine.connect() as connection:
                raw: Any = connection.connection.dbapi_connection  # the driver's connection, for `select`
                connection.exec_driver_sql(f'LISTEN "{settings.namespace}"')
                while True:
                    select.select([raw], [], [])
                    raw.poll()
                    payloads = {notification.payload for notification in raw.notifies}
                    raw.notifies.clear()
                    if RELEASED in payloads:
                        lease_released()
                    if payloads - {RELEASED}:
                        nudge(redis, keys)
        except (exc.SQLAlchemyError, psycopg2.Error, OSError) as error:
            log.debug("postgres.notifications_interrupted error=%s", error)
            pause.wait(1.0)


class ObservedScheduler:
    """Metrics of one scheduler and of the whole system. It reads Postgres and Redis only when it is scraped."""

    def __init__(self, settings: Settings) -> None:
        self._system = SystemGauges(settings)
        self._labels = {"shard": str(settings.shard)} if settings.shards > 1 else {}
        self.scheduler: Scheduler | None = None
        """None while the process waits for Postgres and Redis."""

    def metrics(self) -> Iterator[Family]:
        scheduler = self.scheduler
        if scheduler is None:
            yield from own_metrics("scheduler")
        else:
            yield from own_metrics("scheduler", postgres=scheduler.postgres, redis=scheduler.redis)
            leads = float(scheduler.leading.is_set())
            help = "Whether this scheduler leads; 0 for a standby."
            yield gauge("orchestrator_scheduler_leading", help, (self._labels, leads))
            yield from scheduler.meter.metrics()
        yield from self._system.metrics()

    def obstacles(self) -> dict[str, str]:
        """Return what keeps this scheduler from leading, or from taking the lead."""
        if self.scheduler is None:
            return {"start": "waiting for Postgres and Redis, or for the tables of this release"}
        found = {}
        if self.scheduler.postgres.is_down:
            found["postgres"] = self.scheduler.postgres.reason
        if self.scheduler.redis.is_down:
            found["redis"] = self.scheduler.redis.reason
        elif not self.scheduler.leading.is_set() and (trouble := self._system.redis_trouble()) is not None:
            found["redis"] = trouble
        if not found and self.scheduler.trouble is not None:
            found["leading"] = self.scheduler.trouble
        return found


log = get_logger("scheduler")


def run_scheduler(settings: Settings) -> int:
    """Run a scheduler process. Return its exit code."""
    keys = Keys.of(settings)
    url, namespace = settings.require_database(), settings.namespace
    deadlines = Deadlines(max(settings.database_timeout, settings.lease), late=settings.lease)
    engine = database.engine_for(
        url, pool_size=3, name="orchestrator scheduler", namespace=namespace, deadlines=deadlines
    )
    redis_url = settings.require_redis()
    redis = connect(redis_url)
    log.info("scheduler.started postgres=%s redis=%s", without_password(url), without_password(redis_url))
    observed = ObservedScheduler(settings)
    serve_metrics(settings.metrics, observed, log)
    prerequisites = Prerequisites(log, [shards.prerequisite(engine, settings), prerequisite(redis)])
    if prerequisites.wait():
        upkeep_engine = database.engine_for(
            url, autocommit=True, pool_size=4, name="orchestrator janitor", namespace=namespace
        )
        janitor = Janitor(upkeep_engine)
        spans = _leader_spans()
        streams = LeaderStreams(redis, keys, connect_shared(settings, redis, timeout=1.0))
        scheduler = Scheduler(engine, streams, settings, on_ended=janitor.note, spans=spans, on_timeout=janitor.analyse)
        deadlines.on_late = scheduler.misses_postgres
        observed.scheduler = scheduler
        _stop_on_signal(scheduler, settings, keys)
        if prerequisites.is_stopped:
            scheduler.stop()
        threading.Thread(
            target=listen, args=(settings, keys, scheduler.try_to_lead), name="notifications", daemon=True
        ).start()
        janitor.start()
        Pruner(upkeep_engine, settings, scheduler.leading).start()
        if "/" not in namespace:  # the first shard collects for all shards
            PayloadCollection(_engine_of_all_shards(settings) or upkeep_engine, settings, scheduler.leading).start()
        log_redis = connect(redis_url)
        LogKeeping(upkeep_engine, log_redis, keys, scheduler.leading, connect_shared(settings, log_redis)).start()
        notice = StandbyNotice(
            connect(redis_url, timeout=1.0),
            keys,
            scheduler.leading,
            every=settings.heartbeat,
            ttl=settings.worker_ttl,
            offer=partial(scheduler.offer_lease, upkeep_engine) if settings.shards > 1 else None,
        )
        notice.start()
        _relax_garbage_collector()
        log.info("scheduler.ready")
        scheduler.run()
        notice.close()
        if spans is not None:
            spans.close(LAST_SPANS)
    engine.dispose()
    log.info("scheduler.stopped")
    return 0


def _engine_of_all_shards(settings: Settings) -> Engine | None:
    """Return an engine that reads all shards, or None if there is only one."""
    if settings.shards == 1:
        return None
    namespace = settings.of_shard("all").namespace
    return database.engine_for(
        settings.require_database(), autocommit=True, pool_size=1, name="orchestrator janitor", namespace=namespace
    )


def _leader_spans() -> LeaderSpans | None:
    spans = begin_tracing("scheduler")
    return None if spans is None else LeaderSpans(spans)


def _relax_garbage_collector() -> None:
    """Run the garbage collector seldom: a tick makes thousands of tuples and no cycles."""
    freeze_before_fork()
    gc.set_threshold(20_000, 20, 20)


def _stop_on_signal(scheduler: Scheduler, settings: Settings, keys: Keys) -> None:
    waker = connect(settings.require_redis(), timeout=1.0)

    def stop() -> None:
        scheduler.stop()
        nudge(waker, keys)  # the scheduler may be waiting for an event
        threading.Event().wait(settings.lease)
        log.warning("scheduler.stopped_hard: the scheduler did not stop in time; the lease will expire")
        os._exit(0)

    def on_signal(*_: object) -> None:
        # A signal interrupts the main thread anywhere, even while it holds a lock that stopping needs.
        threading.Thread(target=stop, name="stop", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, on_signal)
