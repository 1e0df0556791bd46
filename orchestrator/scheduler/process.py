"""A scheduler process: waits for its servers, wires the parts together, and runs until it is stopped."""

from __future__ import annotations

import gc
import os
import signal
import threading
from functools import partial

from sqlalchemy import Engine

from orchestrator.monitoring.listener import serve_metrics
from orchestrator.prerequisites import Prerequisites
from orchestrator.scheduler.announcing import StandbyNotice
from orchestrator.scheduler.loop import Scheduler
from orchestrator.scheduler.notifications import listen
from orchestrator.scheduler.observed import ObservedScheduler
from orchestrator.scheduler.spans import LeaderSpans
from orchestrator.scheduler.upkeep.collecting import PayloadCollection
from orchestrator.scheduler.upkeep.janitor import Janitor
from orchestrator.scheduler.upkeep.log_keeping import LogKeeping
from orchestrator.scheduler.upkeep.pruning import Pruner
from orchestrator.settings import Settings
from orchestrator.store import database, shards
from orchestrator.store.deadlines import Deadlines
from orchestrator.telemetry import get_logger
from orchestrator.terminal_safe import without_password
from orchestrator.tracing.entry import LAST_SPANS, begin_tracing
from orchestrator.transport.client import nudge
from orchestrator.transport.connection import awaited, connect, connect_shared
from orchestrator.transport.keys import Keys
from orchestrator.transport.leader.streams import LeaderStreams

log = get_logger("scheduler")


def run_scheduler(settings: Settings) -> int:
    """Run a scheduler; return its exit code."""
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
    prerequisites = Prerequisites(log, [shards.awaited(engine, settings), awaited(redis)])
    if prerequisites.wait():
        tidying = database.engine_for(
            url, autocommit=True, pool_size=4, name="orchestrator janitor", namespace=namespace
        )
        janitor = Janitor(tidying)
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
        Pruner(tidying, settings, scheduler.leading).start()
        if "/" not in namespace:  # the first shard collects for all
            PayloadCollection(_of_all(settings) or tidying, settings, scheduler.leading).start()
        lines = connect(redis_url)
        LogKeeping(tidying, lines, keys, scheduler.leading, connect_shared(settings, lines)).start()
        notice = StandbyNotice(
            connect(redis_url, timeout=1.0),
            keys,
            scheduler.leading,
            every=settings.heartbeat,
            ttl=settings.worker_ttl,
            offer=partial(scheduler.offer_lease, tidying) if settings.shards > 1 else None,
        )
        notice.start()
        _spare_the_collector()
        log.info("scheduler.ready")
        scheduler.run()
        notice.close()
        if spans is not None:
            spans.close(LAST_SPANS)
    engine.dispose()
    log.info("scheduler.stopped")
    return 0


def _of_all(settings: Settings) -> Engine | None:
    """Return connections that read all shards, if there are several."""
    if settings.shards == 1:
        return None
    namespace = settings.of_shard("all").namespace
    return database.engine_for(
        settings.require_database(), autocommit=True, pool_size=1, name="orchestrator janitor", namespace=namespace
    )


def _leader_spans() -> LeaderSpans | None:
    """Return the tracer of the leader, if spans are exported."""
    spans = begin_tracing("scheduler")
    return None if spans is None else LeaderSpans(spans)


def _spare_the_collector() -> None:
    """Look for cycles seldom: a tick makes thousands of tuples and no cycle, and modules live as long as this does."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _stop_on_signal(scheduler: Scheduler, settings: Settings, keys: Keys) -> None:
    waker = connect(settings.require_redis(), timeout=1.0)

    def stop() -> None:
        scheduler.stop()
        nudge(waker, keys)  # it may be waiting for an event
        threading.Event().wait(settings.lease)
        log.warning("scheduler.stopped_hard: something did not answer; the lease expires by itself")
        os._exit(0)

    def on_signal(*_: object) -> None:
        # A handler interrupts the main thread anywhere, also while it holds the very lock that stopping needs.
        threading.Thread(target=stop, name="stop", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, on_signal)
