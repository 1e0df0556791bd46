"""What people see: the one read API of the command line, the HTTP API, the dashboard and the metrics.

Every function takes a connection and returns frozen values; nothing here changes anything. Each statement is one
snapshot, so a task that is on its way from `tasks` to `ended_tasks` is seen in exactly one of them.
"""

from orchestrator.store.insights.fleet import QueueCounts, WorkerView, list_queues, list_workers
from orchestrator.store.insights.pressure import (
    Connections,
    LongTransaction,
    connections,
    dead_rows,
    long_transactions,
)
from orchestrator.store.insights.runs import RunDetail, RunFilter, RunView, list_runs, show_run
from orchestrator.store.insights.steps import StepView, list_steps
from orchestrator.store.insights.system import (
    Events,
    FailingSchedule,
    Leader,
    Overview,
    Storage,
    UnknownTasks,
    overview,
)
from orchestrator.store.insights.tasks import (
    AttemptView,
    ErrorView,
    TaskDetail,
    TaskFilter,
    TaskView,
    list_tasks,
    show_task,
)

__all__ = [
    "AttemptView",
    "Connections",
    "ErrorView",
    "Events",
    "FailingSchedule",
    "Leader",
    "LongTransaction",
    "Overview",
    "QueueCounts",
    "RunDetail",
    "RunFilter",
    "RunView",
    "StepView",
    "Storage",
    "TaskDetail",
    "TaskFilter",
    "TaskView",
    "UnknownTasks",
    "WorkerView",
    "connections",
    "dead_rows",
    "list_queues",
    "list_runs",
    "list_steps",
    "list_tasks",
    "list_workers",
    "long_transactions",
    "overview",
    "show_run",
    "show_task",
]
