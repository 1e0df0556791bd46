"""The application under chaos: tasks that record their executions outside the system.

base.py         the application, and the functions that record executions
tasks.py        tasks of every kind, and the steps of a DAG
limits.py       tasks with limits of concurrency and rate
callbacks.py    tasks with callbacks
flows.py        a flow with a node of every kind, and its task
journeys.py     code workflows and their children
clockwork.py    tasks with schedules
pulls.py        a task that is pulled over HTTP
releases.py     tasks and workflows that only one release of the application knows
"""

from tests.chaos.real.project import (  # noqa: F401  # each module registers its tasks
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
