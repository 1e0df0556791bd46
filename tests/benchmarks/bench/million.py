"""What the scheduler weighs when very many tasks wait."""

from __future__ import annotations

import time

from tests.benchmarks.bench.programs import memory, running
from tests.benchmarks.bench.remote import RemoteClient
from tests.benchmarks.bench.services import Services
from tests.benchmarks.peers.contestants import OURS

SLICE = 50_000


def pending_memory(services: Services, pending: int, seconds: float = 10.0) -> dict[str, float]:
    """Return the scheduler's megabytes while all wait, and after workers have eaten at them for some seconds."""
    with running(*services.fresh()) as programs:
        client = RemoteClient(programs, OURS)
        client.ask("prepare")
        scheduler = programs.start("scheduler", [OURS.python, *OURS.scheduler])
        client.ask("wait_until_ready")
        for _ in range(pending // SLICE):
            client.ask("enqueue_bulk", SLICE)
        time.sleep(3.0)
        waiting = memory(scheduler)["scheduler"]
        for command in OURS.commands():
            programs.start("worker", command)
        time.sleep(seconds)
        return {"all waiting": waiting, "while workers run": memory(scheduler)["scheduler"]}


def delayed_memory(services: Services, tasks: int) -> dict[str, float]:
    """Return the scheduler's megabytes with tasks that are due in months, and the seconds to cancel them all."""
    with running(*services.fresh()) as programs:
        client = RemoteClient(programs, OURS)
        client.ask("prepare")
        scheduler = programs.start("scheduler", [OURS.python, *OURS.scheduler])
        client.ask("wait_until_ready")
        before = memory(scheduler)["scheduler"]
        for _ in range(tasks // SLICE):
            client.ask("enqueue_later", SLICE, 90 * 86_400.0)
        time.sleep(3.0)
        waiting = memory(scheduler)["scheduler"]
        seconds = client.ask("purge")
        return {"none, MB": before, "all waiting, MB": waiting, "to cancel all, s": seconds}
