"""The interface of executors.

The driver (`driving.py`) does what all executors share. It chooses the execution's name and stores it before `submit`,
stores the external id from `submit` before the attempt counts as started, hands executions back when its worker stops,
cancels them on timeout or cancellation, and reports. An executor only talks to the remote side. All its methods are
coroutines on an event loop with thousands of others, so they must never block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from orchestrator.domain.executors.options import Broken, Execution, ExecutorOptions, Finished, Outcome
from orchestrator.domain.plain import unstorable
from orchestrator.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The configuration that a worker process passes to each executor, when the executor's first task arrives."""

    settings: Settings = field(default_factory=Settings)
    worker: str = ""
    """The name of the worker process."""
    commands: tuple[str, ...] = ()
    """The programs that the operator allows with `--allow-command`."""


class Unreachable(Exception):
    """The remote side cannot be reached now. The driver retries with increasing pauses."""


class Unequipped(Exception):
    """This worker lacks configuration for the work, such as an account. The task is handed back for another worker."""


class Gone(Exception):
    """The work does not exist any more: it was lost or deleted."""


class Watcher(Protocol):
    """Receives output and progress of an execution."""

    def log(self, line: str, *, level: str = "info") -> None:
        """Store output of the work: one line, or several with newlines between them. Any thread may call this.

        Pass many lines as one text: lines that the setting `log_limit` drops then cost nothing. With the level
        `BY_LINE` (`reporting/lines.py`), a line that contains "error" becomes a warning, and others info.
        """

    def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """Publish the progress of the work."""

    def ended(self) -> None:
        """Stop the timeout: the work has ended, and only its remaining output is still to be read."""


class Executor(Protocol):
    """Runs the work of tasks elsewhere. One instance, made with a `Setup`, serves a whole worker process."""

    options: ClassVar[type[ExecutorOptions]]

    async def submit(self, execution: Execution) -> str:
        """Start the work, unless it was started under this name, and return its external id.

        Raise Unequipped if this worker lacks the configuration, as any method may.

        After a crash, `submit` is called again with the same name, and must find the started work instead of starting
        it twice. An executor whose remote side cannot do that documents that the work may be done twice.
        """

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Wait for the work to end, and return its outcome. A worker that did not start the work may call this, too.

        The call may be cancelled (asyncio) at any time, which ends the watching and not the work. Raise Unreachable
        while the remote side is down, and Gone if the work does not exist any more.
        """

    async def cancel(self, execution: Execution, external_id: str) -> None:
        """Cancel the work, and return when it has ended. Work that has ended or is gone is no error.

        An empty external id means that `submit` may have started the work: then find the work by its name.
        """

    async def release(self, execution: Execution, external_id: str) -> None:
        """Delete the leftovers of the work. It ended in Postgres or was cancelled, and no further calls follow."""

    async def close(self) -> None:
        """Close connections. Executions go on."""


@runtime_checkable
class BuffersOutput(Protocol):
    """An executor that stores output of the work until it is read."""

    async def drain_output(self, execution: Execution, external_id: str, watcher: Watcher) -> None:
        """Pass the remaining output to the watcher, after the work was cancelled or timed out, and has ended."""


@runtime_checkable
class Expiring(Protocol):
    """An executor whose remote side can delete leftovers after a time."""

    async def expire(self, execution: Execution, external_id: str) -> None:
        """Schedule the deletion of leftovers in a minute. The end is in Postgres, or another worker watches the work.

        `release` follows after some seconds, unless this worker is killed before.
        """


# -- answers of the remote side, as outcomes


def finished(output: Any) -> Outcome:
    """Return the outcome of finished work. A result that is no plain data is a failure that no retry can heal."""
    reason = unstorable(output)
    if reason is not None:
        return Broken("UnreadableOutput", f"The work is done, but its result is not plain data: {reason}.", False)
    return Finished(msgspec.to_builtins(output, str_keys=True))


def function_outcome(end: Mapping[str, Any], output: Any) -> Outcome:
    """Return the outcome of a function that our own program has called remotely. `output` is its result, if any."""
    if "unreadable" in end:
        reason = f"The work is done, but its result is not plain data: {end['unreadable']}."
        return Broken("UnreadableOutput", reason, False)
    if "kind" in end:
        return Broken(str(end["kind"]), str(end.get("message", "")), detail=str(end.get("detail", "")))
    return finished(output)


def raised(traceback: str, default: str) -> tuple[str, str]:
    """Return the exception type and text at the end of a printed traceback, or the given type if there is none."""
    lines = traceback.strip().splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith("  File ")]
    if not frames:
        return default, traceback.strip()
    start = next((index for index in range(frames[-1] + 1, len(lines)) if not lines[index].startswith(" ")), None)
    if start is None:
        return default, traceback.strip()
    kind, _, message = lines[start].partition(": ")
    return kind.rpartition(".")[2], "\n".join([message, *lines[start + 1 :]]).strip()


# -- shared polling of a remote side that does not notify

Seen = TypeVar("Seen")


class Poller(Generic[Seen]):
    """Polls all watched executions in one call, and stops while there are none."""

    def __init__(self, poll: Callable[[Collection[str]], Awaitable[Mapping[str, Seen]]], interval: float) -> None:
        self._poll = poll
        self._interval = interval
        self._pending: dict[str, asyncio.Future[Seen | Exception | None]] = {}
        self._polling: asyncio.Task[None] | None = None

    async def next(self, name: str) -> Seen | None:
        """Return the state of an execution at the next poll, or None if there is none."""
        future = self._pending.get(name)
        if future is None:
            future = self._pending[name] = asyncio.get_running_loop().create_future()
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll_all())
        result = await asyncio.shield(future)  # a watcher that stops must not end the poll for others
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        """Stop polling, and cancel remaining watchers."""
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])

    async def _poll_all(self) -> None:
        while self._pending:
            pending, self._pending = self._pending, {}
            try:
                seen: Mapping[str, Seen] | Exception = await self._poll(pending.keys())
            except Exception as error:  # noqa: BLE001  # the waiting watchers raise it
                seen = error
            except asyncio.CancelledError:
                for future in pending.values():
                    future.cancel()
                raise
            for name, future in pending.items():
                if not future.done():
                    future.set_result(seen if isinstance(seen, Exception) else seen.get(name))
            await asyncio.sleep(self._interval)
