"""A child run, as the workflow has it that started it."""

from __future__ import annotations

from typing import TypeVar

from orchestrator.sdk.code.futures import DurableFuture
from orchestrator.sdk.code.handle import WorkflowHandle

R = TypeVar("R")


class ChildRun(DurableFuture[R]):
    """The result of a child run, to be awaited. Cancelling it does with the child what the option `on_cancel` says."""

    handle: WorkflowHandle[R]
    """Its handle, there at once: `child.handle.id`, `child.handle.signal(…)`, `await child.handle.acancel()`."""
