"""What an executor is.

The driver (`driving.py`) keeps the promises that are the same for all: it chooses the execution's name and has it
stored before `submit`, stores the external id that `submit` returns before the attempt counts as started, lets go of
executions when its worker stops, cancels what ran out of time or was cancelled, and reports. An executor only talks to
whatever does the work. All its methods are coroutines on one event loop with thousands of others: they never block.
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
    """What a worker process gives its executors: each is made with it, when the first of its tasks comes."""

    settings: Settings = field(default_factory=Settings)
    worker: str = ""
    """The name of the worker process."""
    commands: tuple[str, ...] = ()
    """The programs that the operator allows, as `--allow-command` gives them."""


class Unreachable(Exception):
    """Whatever does the work cannot be reached now: the driver waits, longer each time, and asks again."""


class Unequipped(Exception):
    """This worker was not given what it needs for it: an address, an account. It is handed back, for one that was."""


class Gone(Exception):
    """There is nothing under this name any more: it was lost or deleted."""


class Watcher(Protocol):
    """Receives output and progress of an execution."""

    def log(self, line: str, *, level: str = "info") -> None:
        """Take what the work has written: a line, or several with newlines between them. Any thread may call it.

        Many lines are best handed over as one text: those that the setting `log_limit` drops then cost nothing. With
        the level `BY_LINE` (`reporting/lines.py`) a line that speaks of an error is a warning, and any other is info.
        """

    def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """Show how far it has come."""

    def ended(self) -> None:
        """The work has ended, and with it the time that it may take: what is left is to hear what it has said."""


class Executor(Protocol):
    """Does the work of tasks elsewhere. One instance, made with a `Setup`, serves a whole worker process."""

    options: ClassVar[type[ExecutorOptions]]

    async def submit(self, execution: Execution) -> str:
        """Start it, unless it has been under this name, and return its external id.

        Raises Unequipped where this worker was not given what it needs, as any of these may.

        Called again after a crash, with the same name; what was started then must be found, not started twice. Where
        the other side cannot do that, the executor says in its documentation that the work may be done twice.
        """

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Return how it ended, once it has; also called by a worker that did not start it.

        It may be cancelled at any time (asyncio), which ends the watching and not the work. Raises Unreachable while
        the other side is away, and Gone if the work is.
        """

    async def cancel(self, execution: Execution, external_id: str) -> None:
        """End it, and return when it has ended; one that has ended, or is gone, is no error.

        The external id is empty if it is unknown whether `submit` has started it: then it is looked for by its name.
        """

    async def release(self, execution: Execution, external_id: str) -> None:
        """Clear away what is left of it. Its end is in Postgres, or it was cancelled, and there are no more requests
        for it."""

    async def close(self) -> None:
        """Close connections; executions go on."""


@runtime_checkable
class Telling(Protocol):
    """An executor that keeps output of the work until it is passed on."""

    async def pass_on_rest(self, execution: Execution, external_id: str, watcher: Watcher) -> None:
        """Pass on the rest of the output: the work was cancelled or timed out, and has ended."""


@runtime_checkable
class Expiring(Protocol):
    """An executor whose other side can clear away by itself."""

    async def expire(self, execution: Execution, external_id: str) -> None:
        """Have what is left of it cleared away in a minute. Its end is in Postgres, or another worker watches it.

        `release` follows after some seconds, unless this worker is killed before.
        """


# -- answers of the remote side, as outcomes


def finished(output: Any) -> Outcome:
    """Return that it has done its work; a result that is no plain data is a failure that no other try heals."""
    reason = unstorable(output)
    if reason is not None:
        return Broken("UnreadableOutput", f"The work is done, but its result is no plain data: {reason}.", False)
    return Finished(msgspec.to_builtins(output, str_keys=True))


def function_outcome(end: Mapping[str, Any], output: Any) -> Outcome:
    """Return how a function ended that a program of ours has called elsewhere; `output` is its result, if any."""
    if "unreadable" in end:
        why = f"The work is done, but its result is no plain data: {end['unreadable']}."
        return Broken("UnreadableOutput", why, False)
    if "kind" in end:
        return Broken(str(end["kind"]), str(end.get("message", "")), detail=str(end.get("detail", "")))
    return finished(output)


def raised(traceback: str, otherwise: str) -> tuple[str, str]:
    """Return the type and the text of the exception that a printed traceback ends with; `otherwise` names the type."""
    lines = traceback.strip().splitlines()
    frames = [place for place, line in enumerate(lines) if line.startswith("  File ")]
    if not frames:
        return otherwise, traceback.strip()
    said = next((place for place in range(frames[-1] + 1, len(lines)) if not lines[place].startswith(" ")), None)
    if said is None:
        return otherwise, traceback.strip()
    kind, _, message = lines[said].partition(": ")
    return kind.rpartition(".")[2], "\n".join([message, *lines[said + 1 :]]).strip()


# -- one poll at intervals for all watchers of a remote side that does not notify

Seen = TypeVar("Seen")


class Looks(Generic[Seen]):
    """Polls all watched executions together, and not at all while there are none."""

    def __init__(self, look: Callable[[Collection[str]], Awaitable[Mapping[str, Seen]]], every: float) -> None:
        self._look = look
        self._every = every
        self._wanted: dict[str, asyncio.Future[Seen | Exception | None]] = {}
        self._going: asyncio.Task[None] | None = None

    async def next(self, name: str) -> Seen | None:
        """Return what the next look finds under a name; None if there is nothing."""
        future = self._wanted.get(name)
        if future is None:
            future = self._wanted[name] = asyncio.get_running_loop().create_future()
        if self._going is None or self._going.done():
            self._going = asyncio.create_task(self._go())
        found = await asyncio.shield(future)  # one watcher that stops does not end it for another
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        """Poll no more; remaining watchers are cancelled."""
        for future in self._wanted.values():
            future.cancel()
        self._wanted.clear()
        if self._going is not None:
            self._going.cancel()
            await asyncio.wait([self._going])

    async def _go(self) -> None:
        while self._wanted:
            wanted, self._wanted = self._wanted, {}
            try:
                seen: Mapping[str, Seen] | Exception = await self._look(wanted.keys())
            except Exception as error:  # noqa: BLE001  # it is for those who wait
                seen = error
            except asyncio.CancelledError:
                for future in wanted.values():
                    future.cancel()
                raise
            for name, future in wanted.items():
                if not future.done():
                    future.set_result(seen if isinstance(seen, Exception) else seen.get(name))
            await asyncio.sleep(self._every)
