"""One contestant's passes: backlog, running, idle latency, latency under load, memory, compositions, enqueue rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from tests.benchmarks.bench.programs import Program, Programs, memory, running
from tests.benchmarks.bench.quiet import wait_for_quiet
from tests.benchmarks.bench.remote import RemoteClient
from tests.benchmarks.bench.services import Services
from tests.benchmarks.peers.contestants import Contestant

Announce = Callable[[str], None]
"""Called with the name of each pass before it starts."""

PASSES = (
    *("wait for quiet", "start", "backlog", "running", "idle latency", "load latency", "memory"),
    *("compositions", "enqueue"),
)
COMPOSITIONS = {"chain": 100, "chord": 1_000, "steps": 100, "fibonacci": 40}
"""Number of tasks of each composition; a contestant runs the compositions that it supports."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the passes."""

    tasks: int = 20_000
    singles: int = 2_000
    probes: int = 300
    rate: float = 300.0
    seconds: float = 4.0
    budget: float = 2.5
    """Seconds for the idle latency and for each composition, at most; slow contestants run fewer."""
    patience: float = 60.0
    """Seconds to wait for a quiet machine before a contestant's turn, at most."""


def run_round(contestant: Contestant, services: Services, sizes: Sizes, announce: Announce) -> dict[str, Any]:
    """Run all passes of a contestant on empty services; return the measurements."""
    began = time.monotonic()
    announce("wait for quiet")
    busy = wait_for_quiet(sizes.patience)
    announce("start")
    with running(*services.fresh()) as programs:
        client = RemoteClient(programs, contestant)
        found: dict[str, Any] = {"busy": busy, "versions": client.ask("prepare")}
        fixed = (
            [programs.start("scheduler", [contestant.python, *contestant.scheduler])] if contestant.scheduler else []
        )
        client.ask("wait_until_ready")

        tasks = int(sizes.tasks * contestant.share)
        rates, workers = throughput(contestant, programs, client, tasks, announce)
        found |= rates

        announce("idle latency")
        time.sleep(1.0)
        idle = client.ask("idle_latencies", sizes.probes, sizes.budget)
        found |= _percentiles("idle", idle)
        announce("load latency")
        loaded = client.ask("load_latencies", sizes.rate, sizes.seconds)
        found |= _percentiles("load", loaded[len(loaded) // 10 :])  # the first tasks open connections
        client.ask("check", 2 * tasks + 5 + len(idle) + len(loaded))

        announce("memory")
        found["memory"] = memory(*fixed, *workers)

        announce("compositions")
        for kind, count in COMPOSITIONS.items():
            if (seconds := client.ask("compose", kind, count, 5, sizes.budget)) is not None:
                found[kind] = seconds

        for worker in workers:
            programs.stop(worker)

        announce("enqueue")
        singles = int(sizes.singles * max(contestant.share, 0.25))
        found["single_rate"] = singles / client.ask("enqueue_singly", singles)
        return {**found, "took": time.monotonic() - began}


def throughput(
    contestant: Contestant, programs: Programs, client: RemoteClient, tasks: int, announce: Announce
) -> tuple[dict[str, float], list[Program]]:
    """Measure a backlog and running workers with `tasks` tasks each; return the rates and the workers."""
    announce("backlog")
    found = {"bulk_rate": tasks / client.ask("enqueue_bulk", tasks)}
    client.send("drain", tasks)
    commands = contestant.commands()
    names = ["worker"] if len(commands) == 1 else [f"worker {number}" for number in range(1, len(commands) + 1)]
    workers = [programs.start(name, command) for name, command in zip(names, commands, strict=True)]
    counted, seconds = client.receive()
    found["backlog_rate"] = counted / seconds
    announce("running")
    found["running_rate"] = tasks / client.ask("run_through", tasks, 2 * tasks)
    return found, workers


def _percentiles(name: str, latencies: list[float]) -> dict[str, float]:
    cuts = quantiles(latencies, n=100, method="inclusive")
    return {f"{name}_p50": cuts[49] * 1e3, f"{name}_p99": cuts[98] * 1e3}
