"""The CPU usage of an idle scheduler and worker."""

from __future__ import annotations

import contextlib
import time

import psutil

from tests.benchmarks.bench.programs import cpu_seconds, running
from tests.benchmarks.bench.remote import RemoteClient
from tests.benchmarks.bench.services import Services
from tests.benchmarks.peers.contestants import OURS


def idle_cpu(services: Services, seconds: float) -> dict[str, float]:
    """Return each process's CPU usage while idle, in percent of a core; `together` is the sum of our processes."""
    with running(*services.fresh()) as programs:
        client = RemoteClient(programs, OURS)
        client.ask("prepare")
        fixed = [programs.start("scheduler", [OURS.python, *OURS.scheduler])]
        fixed += [programs.start("worker", command) for command in OURS.commands()]
        client.ask("wait_until_ready")
        client.ask("idle_latencies", 10)
        time.sleep(5.0)  # finish the work left by the start and the first tasks
        ours = {name: process for program in fixed for name, process in program.processes().items()}
        before = {**cpu_seconds(ours), **_servers(services)}
        began = time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        after = {**cpu_seconds(ours), **_servers(services)}
    used = {name: 100.0 * (after[name] - before[name]) / elapsed for name in after}
    return {**used, "together": sum(used[name] for name in ours)}


def _servers(services: Services) -> dict[str, float]:
    """Return the CPU seconds of both servers, including ended Postgres processes."""
    postgres = psutil.Process(services.embedded.postgres.pid)
    seconds = sum(postgres.cpu_times()[:4])
    for child in postgres.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += sum(child.cpu_times()[:2])
    return {"postgres": seconds, **cpu_seconds({"redis": psutil.Process(services.embedded.redis.pid)})}
