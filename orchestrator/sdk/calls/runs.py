"""Calls about runs of many tasks and of DAG workflows. Some work for runs of flows and of workflows as code, too."""

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
        """Create a run and its tasks in one transaction."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, repeatable=True, expensive=True)
    def rerun(self, run: Id, new: Id, from_step: str | None, *, repeated: bool = False) -> None:
        """Start a new run with the same version and parameters. Keep results that do not depend on `from_step`."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, repeatable=True, rest=Rest("POST /runs/{id}/cancel", "cancel", 202))
    def cancel(self, run: Id) -> None:
        """Cancel a run and its open tasks, or ask the code of a workflow as code to end.

        A cancelled run stays as it is.
        """

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, repeatable=True)
    def withhold(self, run: Id, step: str | None) -> None:
        """Start no further tasks of a composition, or not the one of `step`. Running tasks continue."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, rest=Rest("POST /runs/{id}/retry", "retry", 202))
    def retry(self, run: Id) -> None:
        """Retry the failed tasks of a run, or a stuck run."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, rest=Rest("DELETE /runs/{id}", "delete", 202))
    def delete(self, run: Id) -> None:
        """Delete an ended run with its tasks, child runs, logs and results. The leader does this within seconds."""

    @call(about={Kind.RUN: "run"})
    def progress(self, run: Id) -> tuple[str, RunCounters]:
        """Return the state and task counters of a run."""

    @call(about={Kind.RUN: "run"})
    def log(self, run: Id, after: Entry = "", wait: Moment = 0.0) -> LogPage:
        """Return a page of the log of a run after a cursor. Wait up to `wait` seconds for new lines."""

    @call(Scope.ENQUEUE, about={Kind.RUN: "run"}, repeatable=True, expensive=True, for_programs=True)
    def ends_after(self, run: Id, position: int) -> list[EndedAt]:
        """Return a page of the ends of tasks of a run, after a position in the run."""

    @call(Scope.ENQUEUE, about={Kind.RUN: "run"}, repeatable=True, expensive=True, for_programs=True)
    def encoded_outputs(self, run: Id, steps: Sequence[str] | None = None) -> bytes:
        """Return the outputs of all or some steps of a run by name, as one encoded value."""


class Listener(Protocol):
    """Listens for changes, for one thread."""

    def wait(self, seconds: float) -> None:
        """Wait until there may be a change since the last call, for about `seconds` at most."""

    def close(self) -> None:
        """Stop listening."""


class RunWork(RunCalls, Protocol):
    """All calls about runs, including waits."""

    def listen(self, run: bytes) -> Listener:
        """Return a listener for changes of a run."""

    def ends(self, run: bytes) -> Iterator[Ended]:
        """Yield the ends of all tasks of a run, in order."""

    def outputs(self, run: bytes, steps: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the outputs of all or some steps of a DAG run that were not skipped; empty for other runs."""

    def wait(self, run: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        """Wait until a run has ended, and return its end; None on timeout."""


def walk_ends(ends_after: Callable[[bytes, int], Sequence[EndedAt]], run: bytes) -> Iterator[Ended]:
    """Yield the ends of all tasks of a run, in order; `ends_after` reads a page."""
    position = -1
    while page := ends_after(run, position):
        yield from (Ended(end.id, end.status, end.result, end.error) for end in page)
        position = page[-1].position
