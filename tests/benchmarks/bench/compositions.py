"""Chains, groups and chords of tasks that do nothing, beside the peers that have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from tests.benchmarks.bench.contestants import PGQUEUER, Contestant
from tests.benchmarks.bench.programs import running
from tests.benchmarks.bench.remote import RemoteClient
from tests.benchmarks.bench.services import Services

SIZES = {"chain": 100, "group": 1_000, "chord": 1_000}
TITLES = {"chain": "chain of 100, ms a step", "group": "group of 1,000, s", "chord": "chord of 1,000, s"}
TIMES = 5
"""How often each is measured, after a first time that warms everything up."""


def composing(
    contestants: Sequence[Contestant], services: Services, say: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Return the median of each measure, by contestant."""
    return {one.name: _compose(one, services, say) for one in contestants if one.name != PGQUEUER.name}


def _compose(contestant: Contestant, services: Services, say: Callable[[str], None]) -> dict[str, float]:
    say(f"{contestant.name}: compositions")
    found: dict[str, float] = {}
    with running(*services.fresh()) as programs:
        client = RemoteClient(programs, contestant)
        client.ask("prepare")
        if contestant.scheduler:
            programs.start("scheduler", [contestant.python, *contestant.scheduler])
        client.ask("wait_until_ready")
        for number, command in enumerate(contestant.commands(), 1):
            programs.start(f"worker {number}", command)
        for kind, count in SIZES.items():
            seconds = [float(client.ask("compose", kind, count)) for _ in range(TIMES + 1)]
            found[TITLES[kind]] = median(seconds[1:]) * (1_000 / count if kind == "chain" else 1)
    return found
