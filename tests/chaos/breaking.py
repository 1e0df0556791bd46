"""Faults shared by the chaos driver and the soak test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from redis import Redis

from orchestrator.embedded import EmbeddedServices


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def send_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process and its descendants, as the loss of a machine does."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


@contextmanager
def stopped(group: int) -> Iterator[None]:
    """Freeze a machine within the block."""
    send_group(group, signal.SIGSTOP)
    try:
        yield
    finally:
        send_group(group, signal.SIGCONT)


@contextmanager
def postgres_down(services: EmbeddedServices) -> Iterator[None]:
    """Crash Postgres within the block; it recovers from its write-ahead log afterwards."""
    services.postgres.stop("immediate")
    try:
        yield
    finally:
        services.postgres.start()


@contextmanager
def redis_down(services: EmbeddedServices, *, persistence: bool) -> Iterator[None]:
    """Crash Redis within the block; it restarts with its append-only file, or empty."""
    services.redis.kill()
    try:
        yield
    finally:
        services.redis.start(persistence)


def flush_redis(services: EmbeddedServices) -> None:
    with Redis.from_url(services.redis_url, socket_timeout=5) as redis:
        redis.flushall()
