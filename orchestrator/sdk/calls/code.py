"""Runs of workflows as code: start, signal, query, update, cancel and wait. Values are encoded."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.domain.code import history
from orchestrator.domain.tasks.starts import OnConflict
from orchestrator.domain.tasks.task import Id
from orchestrator.sdk.calls.checked import EncodedTags, Reason, RunKey, SignalName, Timeout, encoded_call, encoded_value
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
        """Create a run; return its id, or that of the run which has the chosen id, as `on_conflict` says."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"})
    def signal(
        self,
        run: Id,
        name: SignalName,
        value: Annotated[bytes, encoded_value("Signal {name!r}")],
        request: Id | None = None,
        known: bool = False,
    ) -> None:
        """Send a signal to the run, or to the one in which it goes on; with an id of the request, only once.

        A sender whose own code takes it says that it is `known`; else it must be one that workers say the run takes.
        """

    @call(Scope.OPERATE, about={Kind.WORKFLOW: "workflow"}, body=Body.VALUES)
    def signal_many(self, workflow: str, name: SignalName, signals: list[tuple[Id, bytes]]) -> list[Id]:
        """Send signals to runs of a workflow, or to those in which they go on; return the runs that got none."""

    @call(about={Kind.WORKFLOW: "workflow"})
    def known(self, workflow: str, runs: list[Id]) -> list[Id]:
        """Return those of these runs that are of a workflow."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, for_programs=True)
    def resolve(
        self, run: Id, promise: str, value: Annotated[bytes, encoded_value("Promise {promise!r:.100}")], why: str = ""
    ) -> Steps[bytes]:
        """Resolve the oldest open promise of a name; the audit log has why."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, for_programs=True)
    def reject(self, run: Id, promise: str, reason: str, why: str = "") -> Steps[bytes]:
        """Reject the oldest open promise of a name; the audit log has why. Return the same."""

    @call(about={Kind.RUN: "run"}, body=Body.VALUE, for_programs=True, redacts="run")
    def query(self, run: Id, name: str, payload: Question, timeout: Timeout) -> Steps[bytes]:
        """Ask the code something."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, for_programs=True)
    def update(
        self, run: Id, name: str, payload: Question, timeout: Timeout, request: Id | None = None, answered: bool = True
    ) -> Steps[bytes]:
        """Ask the code to do something; with an id of the request, only once. Wait for the answer, if it is wanted."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, for_programs=True, repeatable=True)
    def update_answer(self, run: Id, request: Id, timeout: Timeout) -> Steps[bytes]:
        """Wait for the answer to an update."""

    @call(about={Kind.RUN: "run"})
    def update_stage(self, run: Id, request: Id) -> str:
        """Return how far an update has come: sent, accepted, completed, or how its run ended without an answer."""

    @call(about={Kind.RUN: "run"})
    def request_of(self, run: Id, what: Literal["signal", "update"], id: str) -> Id:
        """Return the id of the request that a signal or update is to which its sender has given an id of its own."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, repeatable=True)
    def cancel(self, run: Id) -> None:
        """Ask the run, or the one in which it goes on, to cancel itself; one that has been cancelled stays so."""

    @call(
        Scope.OPERATE,
        about={Kind.RUN: "run"},
        rest=Rest("POST /runs/{id}/terminate", "terminate", 202, name="terminate", tag="workflows as code"),
    )
    def terminate(self, run: Id) -> None:
        """End a run without asking its code."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, for_programs=True)
    def reset(self, run: Id, to: EventNumber, reason: Reason) -> Steps[Id]:
        """Start a run that repeats another one, open or not, up to an event; return the new one when it is there."""

    @call(about={Kind.RUN: "run"})
    def status(self, run: Id) -> str:
        """Return the state of the run, or of the one in which it goes on."""

    @call(about={Kind.RUN: "run"}, for_programs=True, redacts="run")
    def state(self, run: Id) -> bytes:
        """Return the state that the code of the run has set, or of the one in which it goes on: a mapping."""

    @call(about={Kind.RUN: "run"}, for_programs=True, redacts="run")
    def attributes(self, run: Id) -> bytes:
        """Return the attributes of the run, or of the one in which it goes on: a mapping."""

    @call(about={Kind.RUN: "run"})
    def overdue(self, run: Id, update: str | None = None) -> str:
        """Say why a run, or the one in which it goes on, has not ended or answered in time."""

    @call(about={Kind.WORKFLOW: "workflow"})
    def find(self, workflow: str, key: str) -> Id | None:
        """Return the newest run that was started under a chosen id."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"}, repeatable=True, expensive=True, for_programs=True)
    def history(self, run: Id) -> Recording:
        """Return everything that happened in a run."""

    @call(about={Kind.RUN: "sent.run"})
    def reached(self, sent: Sent) -> Id | None:
        """Return the run that a signal has reached, or None while it is on its way."""


class CodeWork(CodeCalls, Protocol):
    """All that a client can do with runs of code."""

    def wait(self, run: bytes, limit: TimeLimit, sent: Sent | None = None) -> Steps[Ended | None]:
        """Wait until a run, or the last of those in which it goes on, has ended; None if it has not by then."""
