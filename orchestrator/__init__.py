"""A durable task queue and workflow engine: Postgres holds the truth, Redis Streams carry the work."""

from orchestrator.domain.callbacks import TaskFailure
from orchestrator.domain.limits import Rate
from orchestrator.errors import (
    ConfigurationError,
    Duplicate,
    ExpressionError,
    GiveUp,
    InvalidTask,
    InvalidWorkflow,
    NotFound,
    OrchestratorError,
    PayloadError,
    ResultTimeout,
    RetryLater,
    RunFailed,
    SchemaError,
    TaskAborted,
    TaskCancelled,
    TaskEnded,
    TaskFailed,
    TaskSkipped,
    TaskTimeout,
    UnknownOption,
    UnknownTask,
    WrongState,
)
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.builder import Workflow
from orchestrator.sdk.context import TaskContext, current_task
from orchestrator.sdk.handle import Handle, Progress, RunHandle, as_completed, gather
from orchestrator.sdk.queue import Queue
from orchestrator.sdk.retry import Retry
from orchestrator.sdk.task import Task
from orchestrator.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "Duplicate",
    "ExpressionError",
    "GiveUp",
    "Handle",
    "InvalidTask",
    "InvalidWorkflow",
    "NotFound",
    "Orchestrator",
    "OrchestratorError",
    "PayloadError",
    "Progress",
    "Queue",
    "Rate",
    "ResultTimeout",
    "Retry",
    "RetryLater",
    "RunFailed",
    "RunHandle",
    "SchemaError",
    "Settings",
    "Task",
    "TaskAborted",
    "TaskCancelled",
    "TaskContext",
    "TaskEnded",
    "TaskFailed",
    "TaskFailure",
    "TaskSkipped",
    "TaskTimeout",
    "UnknownOption",
    "UnknownTask",
    "Workflow",
    "WrongState",
    "as_completed",
    "current_task",
    "gather",
]
