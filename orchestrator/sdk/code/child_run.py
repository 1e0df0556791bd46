"""A child run, as the workflow has it that started it."""

from __future__ import annotations

from typing import Generic, TypeVar

from orchestrator.sdk.code.futures import DurableFuture
from orchestrator.sdk.code.handle import W_co, WorkflowHandle

R = TypeVar("R")


class ChildRun(DurableFuture[R], Generic[R, W_co]):
    """The result of a child run, to be awaited. Cancelling it does with the child what the option `on_cancel` says."""

    handle: WorkflowHandle[R, W_co]
    """Its handle, there at once: `child.handle.id`, `child.handle.signal(…)`, `await child.handle.acancel()`."""
