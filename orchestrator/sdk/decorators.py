"""Types of the decorators that `app.task(…)` and `app.workflow(…)` return."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, overload

from orchestrator.sdk.code.context import WorkflowContext
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.tasks.context import TaskContext
from orchestrator.sdk.tasks.task import Task

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K", bound=type)


class TaskDecorator(Protocol):
    """The type of `@app.task(...)` with options."""

    @overload
    def __call__(self, function: Callable[Concatenate[TaskContext, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[TaskContext, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class WorkflowDecorator(Protocol):
    """The type of `@app.workflow(...)` with options."""

    @overload
    def __call__(self, kind: K, /) -> K: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[WorkflowContext, P], Awaitable[R]], /
    ) -> CodeWorkflow[P, R, None]: ...
