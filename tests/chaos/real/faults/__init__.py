"""What can go wrong, one context manager each: entering it strikes, leaving it heals.

kinds.py      how a kind of fault is made, and all of them by name
signals.py    processes that are killed, stopped and told to end
servers.py    Postgres and Redis that crash, fail over, forget, or are full
wires.py      connections that are cut, held up and late
deploys.py    workers that change to another release
clocks.py     wall clocks that are set

Each yields what it did, for the record. A fault that could leave a worker unheard writes that down, because only then
may its tasks run elsewhere at the same time; all the others, an outage of Redis for everybody among them, excuse
nothing.

`pick` chooses the victim and the variant; the same number means the same choice in every run of a plan.
"""

from tests.chaos.real.faults import clocks, deploys, servers, signals, wires  # noqa: F401  # each registers its kinds
from tests.chaos.real.faults.kinds import FAULTS, left_out

__all__ = ["FAULTS", "left_out"]
