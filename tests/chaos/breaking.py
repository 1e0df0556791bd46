"""How servers and processes are broken: the strokes that chaos and the soak share. Who is struck when, each decides."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from redis import Redis

from orchestrator.embedded import EmbeddedServices


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def send_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process and everything that it forked, as what befalls a machine would."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


@contextmanager
def stopped(group: int) -> Iterator[None]:
    """Let a machine stand still while the block lasts."""
    send_group(group, signal.SIGSTOP)
    try:
        yield
    finally:
        send_group(group, signal.SIGCONT)


@contextmanager
def postgres_down(services: EmbeddedServices) -> Iterator[None]:
    """Crash Postgres; it recovers from its log when the block ends."""
    services.postgres.stop("immediate")
    try:
        yield
    finally:
        services.postgres.start()


@contextmanager
def redis_down(services: EmbeddedServices, *, persistence: bool) -> Iterator[None]:
    """Crash Redis; it comes back when the block ends, with its log or with nothing."""
    services.redis.kill()
    try:
        yield
    finally:
        services.redis.start(persistence)


def flush_redis(services: EmbeddedServices) -> None:
    """Let Redis forget everything."""
    with Redis.from_url(services.redis_url, socket_timeout=5) as redis:
        redis.flushall()
