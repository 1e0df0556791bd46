"""What people see: the one read API of the command line, the HTTP API, the dashboard and the metrics.

Every function takes a connection and returns frozen values; nothing here changes anything. Each statement is one
snapshot, so a task that is on its way from `tasks` to `ended_tasks` is seen in exactly one of them.
"""

from orchestrator.store.insights.approvals import ApprovalPage, ApprovalView, find_node, page_of_approvals
from orchestrator.store.insights.code import CodeView, OpenView, ResetView, show_code
from orchestrator.store.insights.code_workflows import (
    CodeStart,
    CodeWorkflowView,
    OpenRun,
    count_open_others,
    find_code_start,
    list_code_workflows,
    open_runs,
)
from orchestrator.store.insights.failure_times import GroupKey, spread_of_failures
from orchestrator.store.insights.fleet import QueueCounts, WorkerView, empty_queue, list_queues, list_workers
from orchestrator.store.insights.last_runs import LastRun, last_runs
from orchestrator.store.insights.lineage import Lineage, Relative, find_relative, lineage
from orchestrator.store.insights.obstacles import find_obstacles
from orchestrator.store.insights.owners import find_run_owners, find_task_owners
from orchestrator.store.insights.pressure import (
    Connections,
    LongTransaction,
    connections,
    dead_rows,
    long_transactions,
)
from orchestrator.store.insights.redact import family_of, patterns_of_workflow
from orchestrator.store.insights.runs import (
    RunDetail,
    RunFilter,
    RunPage,
    RunView,
    find_runs,
    list_runs,
    page_of_runs,
    show_run,
    told_params,
)
from orchestrator.store.insights.search import Found, search
from orchestrator.store.insights.steps import StepView, find_step_task, list_steps
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
    TaskPage,
    TaskView,
    find_tasks,
    list_tasks,
    page_of_tasks,
    show_task,
)

__all__ = [
    "ApprovalPage",
    "ApprovalView",
    "AttemptView",
    "CodeView",
    "CodeStart",
    "CodeWorkflowView",
    "Connections",
    "ErrorView",
    "Events",
    "FailingSchedule",
    "Found",
    "GroupKey",
    "LastRun",
    "Leader",
    "Lineage",
    "LongTransaction",
    "OpenRun",
    "OpenView",
    "Overview",
    "QueueCounts",
    "Relative",
    "ResetView",
    "RunDetail",
    "RunFilter",
    "RunPage",
    "RunView",
    "StepView",
    "Storage",
    "TaskDetail",
    "TaskFilter",
    "TaskPage",
    "TaskView",
    "UnknownTasks",
    "WorkerView",
    "connections",
    "count_open_others",
    "dead_rows",
    "empty_queue",
    "family_of",
    "find_code_start",
    "find_node",
    "find_obstacles",
    "find_relative",
    "find_run_owners",
    "find_runs",
    "find_step_task",
    "find_task_owners",
    "find_tasks",
    "last_runs",
    "lineage",
    "list_code_workflows",
    "list_queues",
    "list_runs",
    "list_steps",
    "list_tasks",
    "list_workers",
    "long_transactions",
    "open_runs",
    "overview",
    "page_of_approvals",
    "page_of_runs",
    "page_of_tasks",
    "patterns_of_workflow",
    "search",
    "show_code",
    "show_run",
    "show_task",
    "spread_of_failures",
    "told_params",
]
