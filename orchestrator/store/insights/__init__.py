"""Read-only queries for the command line, the HTTP API, the dashboard and the metrics.

Every function takes a connection and returns immutable values. Each statement is one snapshot, so a task that moves
from `tasks` to `ended_tasks` is found in exactly one of them.
"""

from orchestrator.store.insights.activity import minutes_of_worker, slowest
from orchestrator.store.insights.approvals import ApprovalPage, ApprovalView, find_node, page_of_approvals
from orchestrator.store.insights.attempts import AttemptView, ErrorView
from orchestrator.store.insights.code import (
    CodeRun,
    CodeStart,
    CodeView,
    CodeWorkflowView,
    OpenView,
    ResetView,
    count_open_others,
    find_code_start,
    list_code_workflows,
    open_runs,
    sample_runs,
    show_code,
)
from orchestrator.store.insights.failures import GroupKey, errors_of_tasks, spread_of_failures
from orchestrator.store.insights.fleet import QueueCounts, WorkerView, empty_queue, list_queues, list_workers
from orchestrator.store.insights.lookup import (
    Found,
    Lineage,
    Relative,
    find_relative,
    find_run_owners,
    find_task_owners,
    lineage,
    search,
)
from orchestrator.store.insights.obstacles import Wait, find_obstacles, longest_waits
from orchestrator.store.insights.redact import family_of, patterns_of_workflow
from orchestrator.store.insights.run_lists import (
    LastRun,
    RunFilter,
    RunningTask,
    RunPage,
    RunSort,
    last_runs,
    list_runs,
    page_of_runs,
    running_tasks,
)
from orchestrator.store.insights.runs import (
    RunDetail,
    RunNote,
    RunView,
    errors_of_runs,
    find_runs,
    notes_of_runs,
    readable_params,
    runs_of_code,
    show_run,
)
from orchestrator.store.insights.server import Connections, LongTransaction, connections, dead_rows, long_transactions
from orchestrator.store.insights.steps import (
    StepStates,
    StepView,
    find_failed_task,
    find_step_task,
    first_attempts,
    limited_until,
    list_steps,
    seconds_of_steps,
    states_of_runs,
)
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
    TaskDetail,
    TaskFilter,
    TaskPage,
    TaskView,
    find_tasks,
    list_tasks,
    page_of_tasks,
    show_task,
)
