"""The faults, one context manager each: entering injects the fault, leaving heals it.

kinds.py      the registry of faults
signals.py    processes that are killed, stopped and terminated
servers.py    Postgres and Redis that crash, fail over, lose data, or are full
wires.py      connections that are cut, blocked and delayed
deploys.py    workers that change to another release
clocks.py     wall clocks that are set

Each fault yields a description for the log. A fault that can make a worker unheard records that: only then may the
worker's tasks run on another worker at the same time. Other faults, even an outage of Redis for all, allow no overlap.

`pick` chooses the target and the variant; the same seed makes the same choices in every run of a plan.
"""

from tests.chaos.real.faults import clocks, deploys, servers, signals, wires  # noqa: F401  # noqa: F401  # each module registers its faults
from tests.chaos.real.faults.kinds import FAULTS, left_out

__all__ = ["FAULTS", "left_out"]
