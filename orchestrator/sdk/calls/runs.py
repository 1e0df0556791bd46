"""Runs of many tasks and of workflows that are data; some calls work for runs of code, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Protocol

from orchestrator.domain.access import Scope
from orchestrator.domain.runs import RunCounters
from orchestrator.domain.tasks.task import Id, NewTask
from orchestrator.sdk.calls.checked import Distinct, RunName
from orchestrator.sdk.calls.declaring import SYSTEM, Body, Kind, Rest, call
from orchestrator.sdk.calls.tasks import Entry, Moment
from orchestrator.sdk.tasks.logs import LogPage
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.store.tasks.results import EndedAt
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended


class RunCalls(Protocol):
    """Calls about runs."""

    @call(Scope.ENQUEUE, about=SYSTEM, repeatable=True, assume_repeated=True, expensive=True, body=Body.VALUES)
    def start(
        self, run_id: Id, name: RunName, tasks: Annotated[Iterable[NewTask], Distinct], *, repeated: bool = False
    ) -> None:
        """Create a run and its tasks, all or none."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, repeatable=True, expensive=True)
    def rerun(self, run: Id, new: Id, from_step: str | None, *, repeated: bool = False) -> None:
        """Start a run over, with the same version and parameters; keep what is not below `from_step`."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, repeatable=True, rest=Rest("POST /runs/{id}/cancel", "cancel", 202))
    def cancel(self, run: Id) -> None:
        """Cancel a run and all that is open in it; one of code is asked to end itself.

        One that has been cancelled stays so.
        """

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, rest=Rest("POST /runs/{id}/retry", "retry", 202))
    def retry(self, run: Id) -> None:
        """Try what failed in a run again, or let a stuck run go on."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, rest=Rest("DELETE /runs/{id}", "delete", 202))
    def delete(self, run: Id) -> None:
        """Delete an ended run with its tasks, child runs, logs and results; the leader does so within some seconds."""

    @call(about={Kind.RUN: "run"})
    def progress(self, run: Id) -> tuple[str, RunCounters]:
        """Return a run's state and counters."""

    @call(about={Kind.RUN: "run"})
    def log(self, run: Id, after: Entry = "", wait: Moment = 0.0) -> LogPage:
        """Return what the tasks of a run said after an entry; wait so many seconds for something new."""

    @call(Scope.ENQUEUE, about={Kind.RUN: "run"}, repeatable=True, expensive=True, for_programs=True)
    def ends_after(self, run: Id, position: int) -> list[EndedAt]:
        """Return how the tasks of a run have ended that come after a position, a page of them."""

    @call(Scope.ENQUEUE, about={Kind.RUN: "run"}, repeatable=True, expensive=True, for_programs=True)
    def encoded_outputs(self, run: Id, steps: Sequence[str] | None = None) -> bytes:
        """Return the outputs of a run's steps by name, or of some of them, as one encoded value."""


class Listener(Protocol):
    """Hears that something may have changed; for one thread."""

    def wait(self, seconds: float) -> None:
        """Wait until something may have changed since this was called last, or about so many seconds; then look."""

    def close(self) -> None:
        """Listen no more."""


class RunWork(RunCalls, Protocol):
    """All that a client can do with runs."""

    def listen(self, run: bytes) -> Listener:
        """Return what hears that a run may have changed."""

    def ends(self, run: bytes) -> Iterator[Ended]:
        """Yield how each task of a run has ended, in order."""

    def outputs(self, run: bytes, steps: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the output of every step, or of some, of a workflow's run that was not skipped; none of other runs."""

    def wait(self, run: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        """Wait until a run ends; None if it has not by then."""


def walk_ends(ends_after: Callable[[bytes, int], Sequence[EndedAt]], run: bytes) -> Iterator[Ended]:
    """Yield how each task of a run has ended, in order, a page at a time."""
    position = -1
    while page := ends_after(run, position):
        yield from (Ended(end.id, end.status, end.result, end.error) for end in page)
        position = page[-1].position
