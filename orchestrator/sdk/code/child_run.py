"""The future of a child run, inside the workflow that started it."""

from __future__ import annotations

from typing import Generic, TypeVar

from orchestrator.sdk.code.futures import DurableFuture
from orchestrator.sdk.code.handle import W_co, WorkflowHandle

R = TypeVar("R")


class ChildRun(DurableFuture[R], Generic[R, W_co]):
    """The awaitable result of a child run. Cancelling it applies the option `on_cancel` to the child."""

    handle: WorkflowHandle[R, W_co]
    """The child's handle, available immediately: `child.handle.id`, `await child.handle.acancel()`."""
