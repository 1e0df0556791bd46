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

Say = Callable[[str], None]
"""Called before each pass with its name."""

PASSES = (
    *("wait for quiet", "start", "backlog", "running", "idle latency", "load latency", "memory"),
    *("compositions", "enqueue"),
)
COMPOSITIONS = {"chain": 100, "chord": 1_000, "steps": 100, "fibonacci": 40}
"""How many tasks each has; a contestant runs those that it knows."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything."""

    tasks: int = 20_000
    singles: int = 2_000
    probes: int = 300
    rate: float = 300.0
    seconds: float = 4.0
    budget: float = 2.5
    """Seconds for the idle latency, and for each composition: slow contestants do less of it."""
    patience: float = 60.0
    """How long to wait for a quiet machine before a contestant's turn."""


def run_round(contestant: Contestant, services: Services, sizes: Sizes, say: Say) -> dict[str, Any]:
    """Take one contestant through all its passes, on empty services; return what was measured."""
    began = time.monotonic()
    say("wait for quiet")
    busy = wait_for_quiet(sizes.patience)
    say("start")
    with running(*services.fresh()) as programs:
        client = RemoteClient(programs, contestant)
        found: dict[str, Any] = {"busy": busy, "versions": client.ask("prepare")}
        fixed = (
            [programs.start("scheduler", [contestant.python, *contestant.scheduler])] if contestant.scheduler else []
        )
        client.ask("wait_until_ready")

        tasks = int(sizes.tasks * contestant.share)
        rates, workers = throughput(contestant, programs, client, tasks, say)
        found |= rates

        say("idle latency")
        time.sleep(1.0)
        idle = client.ask("idle_latencies", sizes.probes, sizes.budget)
        found |= _percentiles("idle", idle)
        say("load latency")
        loaded = client.ask("load_latencies", sizes.rate, sizes.seconds)
        found |= _percentiles("load", loaded[len(loaded) // 10 :])  # the first ones open connections
        client.ask("check", 2 * tasks + 5 + len(idle) + len(loaded))

        say("memory")
        found["memory"] = memory(*fixed, *workers)

        say("compositions")
        for kind, count in COMPOSITIONS.items():
            if (seconds := client.ask("compose", kind, count, 5, sizes.budget)) is not None:
                found[kind] = seconds

        for worker in workers:
            programs.stop(worker)

        say("enqueue")
        singles = int(sizes.singles * max(contestant.share, 0.25))
        found["single_rate"] = singles / client.ask("enqueue_singly", singles)
        return {**found, "took": time.monotonic() - began}


def throughput(
    contestant: Contestant, programs: Programs, client: RemoteClient, tasks: int, say: Say
) -> tuple[dict[str, float], list[Program]]:
    """Measure a backlog and running workers, with so many tasks each; return the rates and the workers."""
    say("backlog")
    found = {"bulk_rate": tasks / client.ask("enqueue_bulk", tasks)}
    client.send("drain", tasks)
    commands = contestant.commands()
    names = ["worker"] if len(commands) == 1 else [f"worker {number}" for number in range(1, len(commands) + 1)]
    workers = [programs.start(name, command) for name, command in zip(names, commands, strict=True)]
    counted, seconds = client.receive()
    found["backlog_rate"] = counted / seconds
    say("running")
    found["running_rate"] = tasks / client.ask("run_through", tasks, 2 * tasks)
    return found, workers


def _percentiles(name: str, latencies: list[float]) -> dict[str, float]:
    cuts = quantiles(latencies, n=100, method="inclusive")
    return {f"{name}_p50": cuts[49] * 1e3, f"{name}_p99": cuts[98] * 1e3}
