"""Sagas: what undoes the steps that a workflow has done, should it not come to its end."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from orchestrator.errors import DeterminismViolation, NotDeterministic


class Compensations:
    """Steps to take back, the last one first."""

    def __init__(self, report: Callable[[str, BaseException | None], None]) -> None:
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._report = report
        self.running = False

    def add(self, undo: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Remember how to undo a step."""
        self._steps.append((undo, arguments, keywords))

    async def run(self) -> None:
        """Undo everything. One that fails is reported, and does not keep the others from being tried."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()  # what follows is a new life: its own timeouts must work
        self.running = True
        while self._steps:
            undo, arguments, keywords = self._steps.pop()
            try:
                value = undo(*arguments, **keywords)
                if inspect.isawaitable(value):
                    await value
            except (DeterminismViolation, NotDeterministic):
                raise
            except Exception as error:  # noqa: BLE001  # the workflow's own error is the one to be told
                self._report(f"compensation {getattr(undo, '__name__', undo)!r} failed", error)
