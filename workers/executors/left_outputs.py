"""What containers leave in the payload store: `orchestrator run-task` writes its status and its result there.

Each execution has a folder of its own, beside the objects that rows name, and the container gets its address. Only the
operator says where that is: an address in a task could be anybody's. It is deleted when the end is in Postgres, and
leftovers are collected (`payloads/collector.py`).
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

_LARGEST = 64_000_000
"""Bytes of a result that are read."""
_LONGEST = 4_000


class _Error(msgspec.Struct, frozen=True, kw_only=True):
    kind: str = "Failure"
    message: str = ""
    retryable: bool = True
    detail: str = ""


class _Status(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `status.json`."""

    status: str
    error: _Error | None = None


class LeftOutputs:
    """The folders of a worker's executions."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def address(self, execution: Execution) -> str:
        store = self._settings.payload_store
        if not store:
            raise NoStore(
                f"Task {execution.task} leaves its result in the payload store (output: store), and this worker has "
                f"none: set payload_store."
            )
        root = store if "://" in store else str(Path(store).expanduser())
        return f"{root.rstrip('/')}/{self._settings.root}/{FOLDER}/{execution.name}"

    async def outcome(self, execution: Execution, seen: Outcome) -> Outcome:
        """Return how an execution ended, by what was seen of it and what it has left."""
        left = await self._asked(execution, _read)
        if isinstance(seen, Finished):
            return left or Broken("OutputLost", "The work is done, but it has left no result in the payload store.")
        assert isinstance(seen, Broken)
        return left if isinstance(left, Broken) and seen.retryable else seen

    async def delete(self, execution: Execution) -> None:
        await self._asked(execution, lambda place: place.delete())

    async def _asked(self, execution: Execution, call: Callable[[Folder], T]) -> T:
        address = self.address(execution)

        def asked() -> T:
            return call(folder_of(address))

        try:
            return await in_thread(asked)
        except OrchestratorError:
            raise
        except Exception as error:  # whatever a file system raises
            raise Unreachable(f"The payload store cannot be used: {error or type(error).__name__}") from error


def _read(place: Folder) -> Outcome | None:
    """Return what an execution has left; None if it did not come to say how it ended."""
    try:
        said = msgspec.json.decode(place.read("status.json"), type=_Status)
        if said.error is not None and said.status == "failed":
            error = said.error
            return Broken(error.kind[:100], error.message[:_LONGEST], error.retryable, error.detail[-_LONGEST:])
        if said.status != "success":
            return None
        if (size := place.size("output.json")) > _LARGEST:
            return Broken("OutputTooLarge", f"The result has {size:,} bytes, and {_LARGEST:,} are read.", False)
        return finished(msgspec.json.decode(place.read("output.json")))
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Broken("UnreadableOutput", f"What it has left in the payload store cannot be read: {error}.", False)
