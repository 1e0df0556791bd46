"""What keys cost: the same backlog with limits on ten keys and on ten thousand, and without any."""

from __future__ import annotations

from statistics import median

from tests.benchmarks.bench.contestants import OURS
from tests.benchmarks.bench.programs import running
from tests.benchmarks.bench.remote import RemoteClient
from tests.benchmarks.bench.services import Services

KEYS = (0, 10, 10_000)
TIMES = 5
"""So many times as many tasks as other passes have: what a key costs once is shared by the tasks that it has."""


def keyed_throughput(services: Services, tasks: int, rounds: int) -> dict[str, float]:
    """Return tasks per second by the number of keys that share them, medians of rounds that take turns."""
    found: dict[int, list[float]] = {keys: [] for keys in KEYS}
    for _ in range(rounds):
        for keys in KEYS:
            found[keys].append(_rate(services, TIMES * tasks, keys))
    return {f"{keys:,} keys" if keys else "no key": median(rates) for keys, rates in found.items()}


def _rate(services: Services, tasks: int, keys: int) -> float:
    with running(*services.fresh()) as programs:
        client = RemoteClient(programs, OURS)
        client.ask("prepare")
        programs.start("scheduler", [OURS.python, *OURS.scheduler])
        client.ask("wait_until_ready")
        client.ask("enqueue_keyed", tasks, keys)
        client.send("drain", tasks)
        for command in OURS.commands():
            programs.start("worker", command)
        done, seconds = client.receive()
        return float(done / seconds)
