"""The application of the suite, in a worker process that kills itself at a chosen step of an executor's protocol."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from orchestrator.testing.executor_tasks import app
from orchestrator.workers.executors import registry

__all__ = ["app"]

STUMBLE = "STUMBLE"
"""The variable that names a file, which holds the step. Whoever comes to it removes the file, and dies."""


def stumble(step: str) -> None:
    """Die, if this is the step, and nobody has died of it."""
    file = Path(os.environ[STUMBLE])
    if file.exists() and file.read_text(encoding="utf-8") == step:
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class _Stumbling:
    """An executor that is called as always, before and after some deaths."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.options = executor.options

    async def submit(self, execution: Any) -> str:
        stumble("before submit")
        external_id: str = await self._executor.submit(execution)
        stumble("after submit")
        return external_id

    async def watch(self, execution: Any, external_id: str, watcher: Any) -> Any:
        stumble("before watch")
        outcome = await self._executor.watch(execution, external_id, watcher)
        stumble("after watch")
        return outcome

    async def cancel(self, execution: Any, external_id: str) -> None:
        stumble("before cancel")
        await self._executor.cancel(execution, external_id)
        stumble("after cancel")

    async def release(self, execution: Any, external_id: str) -> None:
        stumble("before release")
        await self._executor.release(execution, external_id)

    async def close(self) -> None:
        await self._executor.close()


_create = registry.create


def _stumbling(name: str, setup: Any) -> Any:
    executor = _create(name, setup)
    return None if executor is None else _Stumbling(executor)


registry.create = _stumbling
