"""The names in `from orchestrator import …`, loaded when the first is accessed."""

from orchestrator.domain.limits.buckets import Rate
from orchestrator.domain.tasks.callbacks import TaskFailure
from orchestrator.errors import (
    AttemptOver,
    ConfigurationError,
    DeterminismViolation,
    Duplicate,
    ExpressionError,
    Forbidden,
    GiveUp,
    HandlerError,
    HandlerFailed,
    InvalidArguments,
    InvalidTask,
    InvalidWorkflow,
    NotDeterministic,
    NotFound,
    OperationFailed,
    OrchestratorError,
    PayloadError,
    PromiseRejected,
    ResultTimeout,
    RetryLater,
    RunFailed,
    SchemaError,
    SoftTimeout,
    StateTooLarge,
    TaskAborted,
    TaskCancelled,
    TaskEnded,
    TaskFailed,
    TaskSkipped,
    TaskTimeout,
    Unavailable,
    Uncertain,
    UnknownHandler,
    UnknownOption,
    UnknownTask,
    UpdateRefused,
    WorkflowFailed,
    WrongState,
)
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.cell import Cell
from orchestrator.sdk.code import workflow_class as workflow
from orchestrator.sdk.code.context import RunInfo, WorkflowContext
from orchestrator.sdk.code.guards import unguarded
from orchestrator.sdk.code.handle import UpdateHandle, WorkflowHandle
from orchestrator.sdk.code.signals import Signals
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.dag.builder import Workflow
from orchestrator.sdk.flow.builder import FlowGraph
from orchestrator.sdk.flow.flows import FlowHandle
from orchestrator.sdk.middleware import AttemptEnd, EnqueueCall, Middleware, TurnContext
from orchestrator.sdk.queue import Queue
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.tasks.compositions import Composition, chain, chord, group
from orchestrator.sdk.tasks.context import TaskContext, current_task
from orchestrator.sdk.tasks.gathering import agather, as_completed, gather
from orchestrator.sdk.tasks.handle import Handle, Progress, RunHandle
from orchestrator.sdk.tasks.logs import LogEntry, TaskProgress
from orchestrator.sdk.tasks.resources import Depends
from orchestrator.sdk.tasks.retry import Retry
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import Payload
from orchestrator.settings import Settings

__all__ = [
    "AttemptEnd",
    "AttemptOver",
    "Cell",
    "CodeWorkflow",
    "Composition",
    "CompositionHandle",
    "ConfigurationError",
    "Depends",
    "DeterminismViolation",
    "Duplicate",
    "EnqueueCall",
    "ExpressionError",
    "FlowGraph",
    "FlowHandle",
    "Forbidden",
    "GiveUp",
    "Handle",
    "HandlerError",
    "HandlerFailed",
    "InvalidArguments",
    "InvalidTask",
    "InvalidWorkflow",
    "LogEntry",
    "Middleware",
    "NotDeterministic",
    "NotFound",
    "OperationFailed",
    "Orchestrator",
    "OrchestratorError",
    "Payload",
    "PayloadError",
    "Progress",
    "PromiseRejected",
    "Queue",
    "Rate",
    "ResultTimeout",
    "Retry",
    "RetryLater",
    "RunFailed",
    "RunHandle",
    "RunInfo",
    "SchemaError",
    "Settings",
    "Signals",
    "SoftTimeout",
    "StateTooLarge",
    "Task",
    "TaskAborted",
    "TaskCancelled",
    "TaskContext",
    "TaskEnded",
    "TaskFailed",
    "TaskFailure",
    "TaskProgress",
    "TaskSkipped",
    "TaskTimeout",
    "TurnContext",
    "Unavailable",
    "Uncertain",
    "UnknownHandler",
    "UnknownOption",
    "UnknownTask",
    "UpdateHandle",
    "UpdateRefused",
    "Workflow",
    "WorkflowContext",
    "WorkflowFailed",
    "WorkflowHandle",
    "WrongState",
    "agather",
    "as_completed",
    "chain",
    "chord",
    "current_task",
    "gather",
    "group",
    "unguarded",
    "workflow",
]
