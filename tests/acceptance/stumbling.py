"""The executor suite's application, in a worker that kills itself at a chosen step of the executor protocol."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from orchestrator.testing.executor_tasks import app
from orchestrator.workers.executors import registry

__all__ = ["app"]

KILL_STEP_VARIABLE = "STUMBLE"
"""Variable with the path of a file that holds the step. The worker deletes the file before it kills itself."""


def kill_at(step: str) -> None:
    """Kill this process if the file names this step."""
    file = Path(os.environ[KILL_STEP_VARIABLE])
    if file.exists() and file.read_text(encoding="utf-8") == step:
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class _KillingExecutor:
    """Wraps an executor, and kills the process at the chosen step."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.options = executor.options

    async def submit(self, execution: Any) -> str:
        kill_at("before submit")
        external_id: str = await self._executor.submit(execution)
        kill_at("after submit")
        return external_id

    async def watch(self, execution: Any, external_id: str, watcher: Any) -> Any:
        kill_at("before watch")
        outcome = await self._executor.watch(execution, external_id, watcher)
        kill_at("after watch")
        return outcome

    async def cancel(self, execution: Any, external_id: str) -> None:
        kill_at("before cancel")
        await self._executor.cancel(execution, external_id)
        kill_at("after cancel")

    async def release(self, execution: Any, external_id: str) -> None:
        kill_at("before release")
        await self._executor.release(execution, external_id)

    async def close(self) -> None:
        await self._executor.close()


_create = registry.create


def _create_killing(name: str, setup: Any) -> Any:
    executor = _create(name, setup)
    return None if executor is None else _KillingExecutor(executor)


registry.create = _create_killing
