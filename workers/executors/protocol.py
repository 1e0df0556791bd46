"""What an executor is.

The driver (`driving.py`) keeps the promises that are the same for all: it chooses the execution's name and has it
stored before `submit`, stores the external id that `submit` returns before the attempt counts as started, lets go of
executions when its worker stops, cancels what ran out of time or was cancelled, and reports. An executor only talks to
whatever does the work. All its methods are coroutines on one event loop with thousands of others: they never block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from orchestrator.domain.executors.options import Execution, ExecutorOptions, Outcome
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
