"""Reads results that containers leave in the payload store (`orchestrator run-task`).

Each execution has a folder of its own in the payload store, and the container gets its address. Only the operator
configures the store's address: an address in a task could be anybody's. The folder is deleted when the end is in
Postgres; leftovers are collected (`payloads/collector.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from orchestrator.domain.executors.options import Broken, Execution, Finished, Outcome
from orchestrator.errors import OrchestratorError
from orchestrator.payloads.collector import FOLDER
from orchestrator.payloads.keeping import NoStore
from orchestrator.settings import Settings
from orchestrator.workers.container import Folder, folder_of
from orchestrator.workers.executors.protocol import Unreachable, finished
from orchestrator.workers.running.large_results import in_thread

T = TypeVar("T")

_MAX_RESULT = 64_000_000
"""Bytes of a result that are read, at most."""
_MAX_TEXT = 4_000


class _Error(msgspec.Struct, frozen=True, kw_only=True):
    kind: str = "Failure"
    message: str = ""
    retryable: bool = True
    detail: str = ""


class _Status(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `status.json`."""

    status: str
    error: _Error | None = None


class ExecutionFolders:
    """The folders of a worker's executions."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def address(self, execution: Execution) -> str:
        store = self._settings.payload_store
        if not store:
            raise NoStore(
                f"Task {execution.task} leaves its result in the payload store (output: store), but this worker has "
                f"none: set payload_store."
            )
        root = store if "://" in store else str(Path(store).expanduser())
        return f"{root.rstrip('/')}/{self._settings.root}/{FOLDER}/{execution.name}"

    async def outcome(self, execution: Execution, observed: Outcome) -> Outcome:
        """Combine the outcome observed by the executor with the outcome that the container has written."""
        result = await self._call(execution, _read)
        if isinstance(observed, Finished):
            return result or Broken("OutputLost", "The work is done, but the payload store has no result of it.")
        assert isinstance(observed, Broken)
        return result if isinstance(result, Broken) and observed.retryable else observed

    async def delete(self, execution: Execution) -> None:
        await self._call(execution, lambda folder: folder.delete())

    async def _call(self, execution: Execution, call: Callable[[Folder], T]) -> T:
        address = self.address(execution)

        def call_folder() -> T:
            return call(folder_of(address))

        try:
            return await in_thread(call_folder)
        except OrchestratorError:
            raise
        except Exception as error:  # any error of a file system
            raise Unreachable(f"The payload store cannot be used: {error or type(error).__name__}") from error


def _read(folder: Folder) -> Outcome | None:
    """Return the outcome that a container has written, or None if it has not written its end."""
    try:
        status = msgspec.json.decode(folder.read("status.json"), type=_Status)
        if status.error is not None and status.status == "failed":
            error = status.error
            return Broken(error.kind[:100], error.message[:_MAX_TEXT], error.retryable, error.detail[-_MAX_TEXT:])
        if status.status != "success":
            return None
        if (size := folder.size("output.json")) > _MAX_RESULT:
            return Broken("OutputTooLarge", f"The result has {size:,} bytes, and {_MAX_RESULT:,} are read.", False)
        return finished(msgspec.json.decode(folder.read("output.json")))
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Broken("UnreadableOutput", f"Its result in the payload store cannot be read: {error}.", False)
