"""Sagas: what undoes the steps that a workflow has done, should it not come to its end."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from orchestrator.sdk.code.eviction import UNSTOPPABLE


class Compensations:
    """Steps to take back, the last one first."""

    def __init__(self, report: Callable[[str, BaseException | None], None]) -> None:
        self._steps: list[tuple[str, Callable[..., Any]]] = []
        self._report = report

    def add(self, name: str, undo: Callable[[], Any]) -> None:
        """Remember how to undo a step."""
        self._steps.append((name, undo))

    async def run(self) -> None:
        """Undo everything. One that fails is reported, and does not keep the others from being tried."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()  # what follows is a new life: its own timeouts must work
        while self._steps:
            name, undo = self._steps.pop()
            try:
                value = undo()
                if inspect.isawaitable(value):
                    await value
            except UNSTOPPABLE:
                raise
            except BaseException as error:  # noqa: BLE001  # the workflow's own error is the one to be told
                self._report(f"compensation {name!r} failed", error)
