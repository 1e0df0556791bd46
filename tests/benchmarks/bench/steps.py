"""Durations of code workflows: sequential steps in short and long runs, and many concurrent runs."""

from __future__ import annotations

from statistics import median

from tests.benchmarks.bench.programs import running
from tests.benchmarks.bench.remote import RemoteClient
from tests.benchmarks.bench.services import Services
from tests.benchmarks.peers.contestants import OURS

LENGTHS = {10: 5, 100: 5, 1_000: 1, 2_000: 1}
"""Steps in sequence, and the number of such runs measured."""
CONCURRENT = (1_000, 10)
"""Number of concurrent runs, and their steps."""


def stepping(services: Services) -> dict[str, float]:
    """Return the durations: 100 sequential steps, milliseconds per step by run length, and the concurrent runs."""
    with running(*services.fresh()) as programs:
        client = RemoteClient(programs, OURS)
        client.ask("prepare")
        programs.start("scheduler", [OURS.python, *OURS.scheduler])
        client.ask("wait_until_ready")
        for command in OURS.commands():
            programs.start("worker", command)
        client.ask("run_steps", 1, 100)  # the first run waits for the workers, and prepares statements and plans
        found = {
            steps: [float(client.ask("run_steps", 1, steps)) for _ in range(times)] for steps, times in LENGTHS.items()
        }
        concurrent = float(client.ask("run_steps", *CONCURRENT))
    report = {
        "100 steps in sequence, s": median(found[100]),
        "the fastest of five, s": min(found[100]),
        "the slowest of five, s": max(found[100]),
    }
    report |= {f"per step, of {steps:,}, ms": 1000 * median(times) / steps for steps, times in found.items()}
    return report | {f"{CONCURRENT[0]:,} runs of {CONCURRENT[1]} steps at once, s": concurrent}
