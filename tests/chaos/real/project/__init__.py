"""The application under chaos: tasks that write down, outside of the system, when they begin and how they end.

base.py         the application, and how things are written down
tasks.py        tasks of every kind, and the steps of a DAG
limits.py       tasks of which only so many may run at once, or start in a second
callbacks.py    tasks that others follow
flows.py        a flow with a node of every kind, and its task
journeys.py     a workflow as code, and its child
clockwork.py    tasks that a schedule starts
pulls.py        a task that is pulled over HTTP
releases.py     what one release of the application knows and the other does not
"""

from tests.chaos.real.project import (  # noqa: F401  # each registers its own
    callbacks,
    clockwork,
    flows,
    journeys,
    limits,
    pulls,
    releases,
    tasks,
)
from tests.chaos.real.project.base import app

__all__ = ["app"]
