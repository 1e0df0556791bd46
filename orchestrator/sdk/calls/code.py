"""Calls about runs of workflows as code: start, signal, query, update, cancel and wait. Values are encoded."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.domain.code import history
from orchestrator.domain.tasks.starts import OnConflict
from orchestrator.domain.tasks.task import Id
from orchestrator.sdk.calls.checked import (
    EncodedTags,
    PromiseName,
    Reason,
    Rejection,
    RunKey,
    SignalName,
    Timeout,
    encoded_call,
    encoded_value,
)
from orchestrator.sdk.calls.declaring import Body, Kind, Rest, call
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.store.code.keys import Sent
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

Question = Annotated[bytes, encoded_call("The arguments of {name!r:.100}")]
EventNumber = Annotated[int, Meta(ge=0, lt=2**31)]


class CodeCalls(Protocol):
    """Calls about runs of code."""

    @call(Scope.ENQUEUE, about={Kind.WORKFLOW: "started.workflow", Kind.QUEUE: "started.queue"}, repeatable=True)
    def start(
        self,
        run_id: Id,
        started: history.RunStarted,
        *,
        timeout: float | None,
        tags: EncodedTags,
        key: RunKey,
        on_conflict: OnConflict,
        signal: history.SignalReceived | None,
        pinned: bool,
        update: history.UpdateRequested | None = None,
        update_id: str = "",
        repeated: bool = False,
    ) -> tuple[Id, Sent | None]:
        """Create a run. Return its id or, depending on `on_conflict`, the id of the run that holds the key."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"})
    def signal(
        self,
        run: Id,
        name: SignalName,
        value: Annotated[bytes, encoded_value("Signal {name!r}")],
        request: Id | None = None,
        known: bool = False,
        id: str = "",
    ) -> None:
        """Send a signal to the newest run of a chain. With a request id, repeated calls send it only once.

        Refuse a signal for which the workers announce no handler, unless the sender's own code has one (`known`).
        The request id is made from the run and the sender's `id`, which proves to a server that it belongs to the run.
        """

    @call(Scope.OPERATE, about={Kind.WORKFLOW: "workflow"}, body=Body.VALUES)
    def signal_many(self, workflow: str, name: SignalName, signals: list[tuple[Id, bytes]]) -> list[Id]:
        """Send signals to runs of a workflow, or to the newest runs of their chains. Return the runs not reached."""

    @call(about={Kind.WORKFLOW: "workflow"})
    def known(self, workflow: str, runs: list[Id]) -> list[Id]:
        """Return those of the runs that belong to a workflow."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, for_programs=True)
    def resolve(
        self,
        run: Id,
        promise: PromiseName,
        value: Annotated[bytes, encoded_value("Promise {promise!r:.100}")],
        why: str = "",
    ) -> Steps[bytes]:
        """Resolve the oldest open promise with a name. The audit log records the reason `why`."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, for_programs=True)
    def reject(self, run: Id, promise: PromiseName, reason: Rejection, why: str = "") -> Steps[bytes]:
        """Reject the oldest open promise with a name. The audit log records the reason `why`."""

    @call(about={Kind.RUN: "run"}, body=Body.VALUE, for_programs=True, redacts="run")
    def query(self, run: Id, name: str, payload: Question, timeout: Timeout) -> Steps[bytes]:
        """Send a query to the code of a run, and return the answer."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, for_programs=True)
    def update(
        self,
        run: Id,
        name: str,
        payload: Question,
        timeout: Timeout,
        request: Id | None = None,
        answered: bool = True,
        id: str = "",
    ) -> Steps[bytes]:
        """Send an update to the code of a run. With a request id, only once. With `answered`, wait for the answer."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, for_programs=True, repeatable=True)
    def update_answer(self, run: Id, request: Id, timeout: Timeout, id: str = "") -> Steps[bytes]:
        """Wait for the answer to an update."""

    @call(about={Kind.RUN: "run"})
    def update_stage(self, run: Id, request: Id, id: str = "") -> str:
        """Return the stage of an update: sent, accepted, completed, or how its run ended without an answer."""

    @call(about={Kind.RUN: "run"})
    def request_of(self, run: Id, what: Literal["signal", "update"], id: str) -> Id:
        """Return the request id of a signal or update whose sender chose an id."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, repeatable=True)
    def cancel(self, run: Id) -> None:
        """Ask the newest run of a chain to cancel itself. A cancelled run stays as it is."""

    @call(
        Scope.OPERATE,
        about={Kind.RUN: "run"},
        rest=Rest("POST /runs/{id}/terminate", "terminate", 202, name="terminate", tag="workflows as code"),
    )
    def terminate(self, run: Id) -> None:
        """End a run without running its code again."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, for_programs=True)
    def reset(self, run: Id, to: EventNumber, reason: Reason) -> Steps[Id]:
        """Start a run that repeats another run, open or ended, up to an event. Return the new run once it exists."""

    @call(about={Kind.RUN: "run"})
    def status(self, run: Id) -> str:
        """Return the state of the newest run of a chain."""

    @call(about={Kind.RUN: "run"}, for_programs=True, redacts="run")
    def state(self, run: Id) -> bytes:
        """Return the state that the code has set, as a mapping, in the newest run of a chain."""

    @call(about={Kind.RUN: "run"}, for_programs=True, redacts="run")
    def attributes(self, run: Id) -> bytes:
        """Return the mapping of attributes of the newest run of a chain."""

    @call(about={Kind.RUN: "run"})
    def overdue(self, run: Id, update: str | None = None) -> str:
        """Describe why the newest run of a chain has not ended or answered in time."""

    @call(about={Kind.WORKFLOW: "workflow"})
    def find(self, workflow: str, key: str) -> Id | None:
        """Return the newest run that was started with a key, the id that its starter chose."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, repeatable=True, expensive=True, for_programs=True)
    def history(self, run: Id) -> Recording:
        """Return the history of a run."""

    @call(about={Kind.RUN: "sent.run"})
    def reached(self, sent: Sent) -> Id | None:
        """Return the run that received a signal, or None while that is not decided."""


class CodeWork(CodeCalls, Protocol):
    """All calls about runs of code, including waits."""

    def wait(self, run: bytes, limit: TimeLimit, sent: Sent | None = None) -> Steps[Ended | None]:
        """Wait until the last run of a chain has ended, and return its end; None on timeout."""
