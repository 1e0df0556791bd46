"""Who takes part: the interpreter, the processes to start, what to install."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

QUEUES = "tests.benchmarks.bench.queues"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One queue, and how its processes are started."""

    name: str
    module: str
    """Where its tasks and its client are."""
    python: Path
    """The interpreter of its environment."""
    requirements: tuple[str, ...] = ()
    """What that environment needs."""
    scheduler: tuple[str, ...] = ()
    """Arguments to its interpreter for what runs before any worker; none if nothing does."""
    workers: tuple[tuple[str, ...], ...]
    """Arguments for the workers: two processes in all, beside their parent if there is one."""

    def commands(self) -> list[list[str | Path]]:
        """Return the workers' command lines."""
        return [[self.python, *arguments] for arguments in self.workers]

    def installed_in(self, python: Path) -> Contestant:
        """Return the same with another interpreter."""
        return replace(self, python=python)


OURS = Contestant(
    name="orchestrator",
    module=f"{QUEUES}.orchestrator",
    python=Path(sys.executable),
    scheduler=("-P", "-m", "orchestrator", "scheduler"),
    workers=(("-P", "-m", "orchestrator", "worker", "--app", f"{QUEUES}.orchestrator:app", "--processes", "2"),),
)

CELERY = Contestant(
    name="celery",
    module=f"{QUEUES}.celery",
    python=Path("python"),
    requirements=("celery[redis]", "hiredis"),
    workers=(
        (
            *("-P", "-m", "celery", "--app", f"{QUEUES}.celery", "worker", "--pool", "prefork", "--concurrency", "2"),
            *("--loglevel", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"),
        ),
    ),
)

DRAMATIQ = Contestant(
    name="dramatiq",
    module=f"{QUEUES}.dramatiq",
    python=Path("python"),
    requirements=("dramatiq[redis]", "hiredis"),
    workers=(("-P", "-m", "dramatiq", f"{QUEUES}.dramatiq", "--processes", "2", "--threads", "8", "--skip-logging"),),
)

PGQUEUER = Contestant(
    name="pgqueuer",
    module=f"{QUEUES}.pgqueuer",
    python=Path("python"),
    requirements=("pgqueuer", "asyncpg", "uvloop"),
    workers=(("-P", "-m", f"{QUEUES}.pgqueuer"),) * 2,
)

LAYER = replace(
    OURS,
    name="celery-layer",
    module=f"{QUEUES}.celery_layer",
    workers=(("-P", "-m", "orchestrator", "worker", "--app", f"{QUEUES}.celery_layer:app", "--processes", "2"),),
)
"""Ours, by Celery's API: what the layer costs."""

PEERS = {peer.name: peer for peer in (CELERY, DRAMATIQ, PGQUEUER)}
