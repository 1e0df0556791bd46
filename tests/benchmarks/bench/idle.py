"""What a scheduler and a worker cost while there is nothing to do."""

from __future__ import annotations

import time

import psutil

from tests.benchmarks.bench.contestants import OURS
from tests.benchmarks.bench.programs import cpu_seconds, running
from tests.benchmarks.bench.remote import RemoteClient
from tests.benchmarks.bench.services import Services


def idle_cpu(services: Services, seconds: float) -> dict[str, float]:
    """Return the CPU of each process over so many idle seconds, in per cent of one core; `together` is ours alone."""
    with running(*services.fresh()) as programs:
        client = RemoteClient(programs, OURS)
        client.ask("prepare")
        fixed = [programs.start("scheduler", [OURS.python, *OURS.scheduler])]
        fixed += [programs.start("worker", command) for command in OURS.commands()]
        client.ask("wait_until_ready")
        client.ask("idle_latencies", 10)
        time.sleep(5.0)  # let go of what the start and the first tasks have left to do
        ours = {name: process for program in fixed for name, process in program.processes().items()}
        servers = _servers(services)
        before = cpu_seconds({**ours, **servers})
        began = time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        after = cpu_seconds({**ours, **servers})
    used = {name: 100.0 * (after[name] - before[name]) / elapsed for name in after}
    shares = {name: used[name] for name in ours}
    return {
        **shares,
        "together": sum(shares.values()),
        **{name: sum(used[part] for part in servers if part.startswith(name)) for name in ("postgres", "redis")},
    }


def _servers(services: Services) -> dict[str, psutil.Process]:
    embedded = services.embedded
    postgres = psutil.Process(embedded.postgres.pid)
    parts = {f"postgres {process.pid}": process for process in (postgres, *postgres.children())}
    return {**parts, "redis": psutil.Process(embedded.redis.pid)}
