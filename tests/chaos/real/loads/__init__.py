"""The work that clients submit during the faults: one function per kind of load, chosen by weight.

kinds.py       the registry of loads
tasks.py       tasks of every kind, one by one and in bulk
limits.py      tasks that share a limit, a rate or a key
runs.py        runs of many tasks, DAGs, flows and code workflows, and their cancellation
releases.py    tasks and runs of one release of the application, while others are deployed

To add a kind of work, write a function here, and a task in `project` that records its executions.
"""

from tests.chaos.real.loads import limits, releases, runs, tasks  # noqa: F401  # noqa: F401  # each module registers its loads
from tests.chaos.real.loads.kinds import LOADS

__all__ = ["LOADS"]
