"""What keys cost: the same backlog with limits on ten keys and on ten thousand, and without any.

The tasks of a key are enqueued together, or the keys take turns. In the second case, ten thousand keys are served in
another order than they came in, and Postgres has to fetch each row from another page.
"""

from __future__ import annotations

from statistics import median

from tests.benchmarks.bench.programs import running
from tests.benchmarks.bench.remote import RemoteClient
from tests.benchmarks.bench.services import Services
from tests.benchmarks.peers.contestants import OURS

CASES = {
    "no key": (0, False),
    "10 keys, each together": (10, True),
    "10,000 keys, each together": (10_000, True),
    "10 keys, by turns": (10, False),
    "10,000 keys, by turns": (10_000, False),
}
TIMES = 5
"""So many times as many tasks as other passes have: what a key costs once is shared by the tasks that it has."""


def keyed_throughput(services: Services, tasks: int, rounds: int) -> dict[str, float]:
    """Return tasks per second by the keys that share them, medians of rounds that take turns."""
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case, (keys, together) in CASES.items():
            found[case].append(_rate(services, TIMES * tasks, keys, together))
    return {case: median(rates) for case, rates in found.items()}


def _rate(services: Services, tasks: int, keys: int, together: bool) -> float:
    with running(*services.fresh()) as programs:
        client = RemoteClient(programs, OURS)
        client.ask("prepare")
        programs.start("scheduler", [OURS.python, *OURS.scheduler])
        client.ask("wait_until_ready")
        client.ask("enqueue_keyed", tasks, keys, together)
        client.send("drain_keyed", tasks)
        for command in OURS.commands():
            programs.start("worker", command)
        return tasks / float(client.receive())
