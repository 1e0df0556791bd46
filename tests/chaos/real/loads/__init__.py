"""What clients do while everything breaks: one function per kind of load, chosen by weight.

kinds.py       how a kind of load is registered
tasks.py       tasks of every kind, one by one and many at once
limits.py      tasks that share a limit, a rate or a key
runs.py        runs of many, DAGs, flows, workflows as code, and cancelling any of it
releases.py    tasks and runs of one release of the application, while others are deployed

A new kind of work joins by writing one more function, and a task in `project` that writes down what it does.
"""

from tests.chaos.real.loads import limits, releases, runs, tasks  # noqa: F401  # each registers its kinds
from tests.chaos.real.loads.kinds import LOADS

__all__ = ["LOADS"]
