"""The contestants: their interpreters, processes, packages and configurations."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

PEERS_PACKAGE = "tests.benchmarks.peers"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A queue, and the commands that start its processes."""

    name: str
    title: str
    """Display name."""
    configuration: str
    """Differences from the defaults, and important properties of its guarantees."""
    requirements: tuple[str, ...] = ()
    """Packages of its environment, installed in their newest releases."""
    python: Path = Path("python")
    """The interpreter of its environment."""
    scheduler: tuple[str, ...] = ()
    """Interpreter arguments of a process that must run before the workers; empty if there is none."""
    workers: tuple[tuple[str, ...], ...]
    """Interpreter arguments of the workers: two processes in total, not counting a parent."""
    share: float = 1.0
    """Share of the tasks that it gets: slow queues would take minutes for all."""

    @property
    def module(self) -> str:
        """The module with its tasks and its client."""
        return f"{PEERS_PACKAGE}.{self.name.replace('-', '_')}"

    def commands(self) -> list[list[str | Path]]:
        return [[self.python, *arguments] for arguments in self.workers]

    def installed_in(self, python: Path) -> Contestant:
        return replace(self, python=python)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return "-P", "-m", name, *arguments


def _own_program(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands of two workers that the queue's own module starts."""
    return (_module(f"{PEERS_PACKAGE}.{name}"),) * 2


OURS = Contestant(
    name="orchestrator",
    title="Orchestrator",
    configuration="defaults, a scheduler and two worker processes",
    python=Path(sys.executable),
    scheduler=_module("orchestrator", "scheduler"),
    workers=(_module("orchestrator", "worker", "--app", f"{PEERS_PACKAGE}.orchestrator_app:app", "--processes", "2"),),
)

LAYER = replace(
    OURS,
    name="celery-layer",
    title="Orchestrator by Celery's API",
    workers=(_module("orchestrator", "worker", "--app", f"{PEERS_PACKAGE}.celery_layer:app", "--processes", "2"),),
)
"""Measures the cost of the Celery layer."""

_PEERS = (
    Contestant(
        name="pgqueuer",
        title="PGQueuer",
        configuration="batches of 1,000; uvloop; keeps no results; logs ends every 100 ms",
        requirements=("pgqueuer", "asyncpg", "uvloop"),
        workers=_own_program("pgqueuer"),
    ),
    Contestant(
        name="huey",
        title="Huey",
        configuration="Redis, results announced (`notify_result`); a killed worker loses its task",
        requirements=("huey", "redis", "hiredis"),
        workers=(
            _module(
                "huey.bin.huey_consumer",
                *(f"{PEERS_PACKAGE}.huey.huey", "--workers", "2", "--worker-type", "process"),
                *("--quiet", "--no-periodic", "--graceful-signal", "TERM"),
            ),
        ),
        share=0.5,
    ),
    Contestant(
        name="dramatiq",
        title="Dramatiq",
        configuration="Redis, 8 threads a process; the callback of a group gets no results",
        requirements=("dramatiq[redis]", "hiredis"),
        workers=(
            _module("dramatiq", f"{PEERS_PACKAGE}.dramatiq", "--processes", "2", "--threads", "8", "--skip-logging"),
        ),
        share=0.5,
    ),
    Contestant(
        name="taskiq",
        title="taskiq",
        configuration="Redis Streams, 100 tasks at once and 100 prefetched a process, orjson, uvloop; results polled",
        requirements=("taskiq", "taskiq-redis", "taskiq-pipelines", "hiredis", "orjson", "uvloop"),
        workers=(
            _module(
                "taskiq",
                *("worker", f"{PEERS_PACKAGE}.taskiq:broker", "--workers", "2", "--log-level", "WARNING"),
                *("--max-async-tasks", "100", "--max-prefetch", "100", "--no-parse"),
            ),
        ),
        share=0.25,
    ),
    Contestant(
        name="arq",
        title="arq",
        configuration="50 tasks at once a process, uvloop, queue polled every 5 ms and results every ms",
        requirements=("arq", "hiredis", "uvloop"),
        workers=_own_program("arq"),
        share=0.1,
    ),
    Contestant(
        name="celery",
        title="Celery",
        configuration="Redis, prefork, prefetch 128, no events; a killed worker loses tasks (`acks_late` keeps them)",
        requirements=("celery[redis]", "hiredis"),
        workers=(
            _module(
                "celery",
                *("--app", f"{PEERS_PACKAGE}.celery", "worker", "--pool", "prefork", "--concurrency", "2"),
                *("--loglevel", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"),
            ),
        ),
        share=0.2,
    ),
    Contestant(
        name="rq",
        title="RQ",
        configuration="SimpleWorker, which does not fork; a callback of many gets no results",
        requirements=("rq", "hiredis"),
        workers=_own_program("rq"),
        share=0.1,
    ),
    Contestant(
        name="procrastinate",
        title="Procrastinate",
        configuration="5 tasks at once a process, uvloop; keeps no results; status polled every ms",
        requirements=("procrastinate", "psycopg[binary,pool]", "uvloop"),
        workers=_own_program("procrastinate"),
        share=0.1,
    ),
    Contestant(
        name="dbos",
        title="DBOS",
        configuration="a workflow for each task, 20 connections a process, queue polled every 5 ms, results every ms",
        requirements=("dbos", "psycopg[binary]"),
        workers=_own_program("dbos"),
        share=0.05,
    ),
)

PEERS = {peer.name: peer for peer in _PEERS}
ALL = {OURS.name: OURS, LAYER.name: LAYER, **PEERS}
