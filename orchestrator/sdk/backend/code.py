"""Runs of workflows as code: started, told, asked and waited for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code import history, resets
from orchestrator.domain.code.activation import NO_HANDLER
from orchestrator.domain.ids import successor_id, to_text
from orchestrator.domain.limits.names import scoped
from orchestrator.domain.runs.verdict import GOES_ON
from orchestrator.domain.sealed import reveal_error, reveal_event
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.domain.tasks.obstacles import NO_LEADER
from orchestrator.domain.tasks.starts import OnConflict
from orchestrator.domain.tasks.task import TaskError, error_text
from orchestrator.errors import (
    Duplicate,
    NotFound,
    OrchestratorError,
    ResultTimeout,
    Unavailable,
    Uncertain,
    WrongState,
)
from orchestrator.sdk.backend.asking import obstacles, overdue
from orchestrator.sdk.backend.connections import LONGEST_TOLD, Connections
from orchestrator.sdk.backend.waiting import EndWaiters, FindEnd
from orchestrator.sdk.calls.waits import MISSING
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.options import check_name
from orchestrator.sdk.values.payload import decode_value
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.sealing import CALL, VALUE, reveal, reveal_text
from orchestrator.store import inbox
from orchestrator.store.code import expectations, histories, resolutions, signals
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code import reads as code_reads
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.reads import CodeRunOutcome
from orchestrator.store.code.signals import Sent
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs import creation, stuck
from orchestrator.store.tasks import results
from orchestrator.trace_context import current_trace
from orchestrator.transport.codec import Ended

_ASK_AGAIN = 5.0
"""Seconds after which a query is asked again: it may have been lost with a worker or a leader."""

_SETTLING = 2.0
"""Seconds after which it is asked whether anybody leads who could settle a promise."""

_RESETTING = 20.0
"""Seconds to wait for the run that a reset starts."""

_SETTLES = frozenset({RequestKind.RESOLVE, RequestKind.REJECT})
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class CodeBackend:
    """What a client can do with runs of code."""

    def __init__(self, connections: Connections, waiting: EndWaiters) -> None:
        self._connections = connections
        self._vault = connections.keys.vault
        self._waiting = waiting

    # -- starting

    def start(
        self,
        run_id: bytes,
        started: history.RunStarted,
        *,
        timeout: float | None,
        tags: str,
        key: str | None,
        on_conflict: OnConflict,
        signal: history.SignalReceived | None,
        pinned: bool,
        repeated: bool = False,
    ) -> tuple[bytes, Sent | None]:
        """Create a run; return its id, or that of the run which has the chosen id, as `on_conflict` says.

        With a signal, a run that is open under that id is signalled instead, and one that has ended is followed by a
        new one. Should it end before the signal reaches it, the leader starts the new one: what was sent, and to whom,
        is returned as well. If this is `repeated`, the run may have been created before.
        """
        if repeated and self._is_there(run_id):
            return run_id, None
        if repeated and signal is not None:
            raise Uncertain(f"It is not known whether signal {signal.name!r} was sent to the run under the id {key!r}.")
        started = msgspec.structs.replace(started, payload=self._outgoing(CALL, started.payload, run_id))
        if signal is not None:
            signal = msgspec.structs.replace(signal, value=self._outgoing(VALUE, signal.value, run_id))
        sent: Sent | None = None
        facts: list[history.RunStarted | history.SignalReceived] = [started]
        if signal is not None:
            facts.append(signal)
        run = code_runs.new_run(run_id, facts, pinned=pinned)._replace(
            timeout=timeout, tags=tags, trace=current_trace()
        )
        with self._connections.writing(f"run {to_text(run_id)} was stored", transaction=True) as connection:
            full_key = scoped(started.workflow, key or "")
            anew = signal is not None or on_conflict == "anew"
            held = None if key is None else run_keys.take(connection, full_key, run.id, anew=anew)
            if held is None:
                creation.create(connection, [run])
            elif signal is not None:
                start = {"key": full_key, "id": run_id, "timeout": timeout, "tags": tags, "pinned": pinned}
                start |= {name: getattr(started, name) for name in ("workflow", "version", "payload", "queue")}
                start |= {} if run.trace is None else {"trace": run.trace}
                request = self._add_request(
                    connection, RequestKind.SIGNAL, held[0], name=signal.name, value=signal.value, start=start
                )
                sent = Sent(held[0], run_id, request)
                self._connections.record(connection, "signal", "run", to_text(held[0]), name=signal.name)
            elif on_conflict != "return":
                raise Duplicate(
                    f"Workflow {started.workflow!r} has run {to_text(held[0])} ({held[1]}) under the id {key!r}. "
                    f"Start with on_conflict='return' to have that one, or 'anew' to start another once it has ended.",
                    to_text(held[0]),
                )
        self._connections.nudge()
        return run.id if held is None else held[0], sent

    def rerun(self, connection: Connection, run: bytes, new: bytes, from_step: str | None = None) -> bool:
        """Start a run over, in this transaction; False if this is no run of code at all."""
        again = code_reads.repeated(connection, run, new)
        if again is None:
            return False
        if from_step is not None:
            raise WrongState(
                f"Run {to_text(run)} is of a workflow as code, which has no steps to begin at. To keep what was done "
                f"up to an event of its history: orchestrator runs reset {to_text(run)} --to EVENT"
            )
        creation.create(connection, [again._replace(trace=current_trace())])
        return True

    # -- telling

    def signal(self, run: bytes, name: str, value: bytes) -> None:
        """Send a signal to the run, or to the one in which it goes on."""
        value = self._outgoing(VALUE, value, run)
        self._send(run, RequestKind.SIGNAL, "signal", name=check_name("signal", name), value=value)

    def resolve(
        self, run: bytes, promise: str, value: bytes, why: str = "", timeout: float | None = None
    ) -> Steps[bytes]:
        """Resolve the oldest open promise of a name; the audit log has the value, and why.

        Return None or, where that is kept for one to come, the names of the first promises that are open, encoded.
        With a timeout, ResultTimeout says that it is stored and was not done by then, or sooner if nobody leads.
        """
        told = {"value": self._connections.told(promise, value)} | ({"why": why[:LONGEST_TOLD]} if why else {})
        value = self._sealed(VALUE, value)
        return self._request(run, RequestKind.RESOLVE, "resolve a promise of", timeout, told, name=promise, value=value)

    def reject(
        self, run: bytes, promise: str, reason: str, why: str = "", timeout: float | None = None
    ) -> Steps[bytes]:
        """Reject the oldest open promise of a name; the audit log has the reason, and why. Return the same."""
        told = {} if self._vault is not None or not reason else {"reason": reason[:LONGEST_TOLD]}
        told |= {"why": why[:LONGEST_TOLD]} if why else {}
        reason = reason if self._vault is None else self._vault.seal_text(reason)
        return self._request(run, RequestKind.REJECT, "reject a promise of", timeout, told, name=promise, reason=reason)

    def query(self, run: bytes, name: str, payload: bytes, timeout: float) -> Steps[bytes]:
        """Ask the code something; its arguments and the answer are encoded."""
        return self._request(run, RequestKind.QUERY, "query", timeout, name=name, value=self._sealed(CALL, payload))

    def update(self, run: bytes, name: str, payload: bytes, timeout: float) -> Steps[bytes]:
        """Ask the code to do something; its arguments and the answer are encoded."""
        return self._request(run, RequestKind.UPDATE, "update", timeout, name=name, value=self._sealed(CALL, payload))

    def _outgoing(self, kind: bytes, data: bytes, run: bytes) -> bytes:
        """Return what a run is given as it is stored: what is large elsewhere, and what is here sealed."""
        payloads = self._connections.payloads
        return self._sealed(kind, data if payloads is None else payloads.arguments(data, run, None))

    def _sealed(self, kind: bytes, data: bytes) -> bytes:
        return data if self._vault is None else self._vault.seal(kind, data)

    def cancel(self, run: bytes) -> None:
        """Ask the run, or the one in which it goes on, to cancel itself; one that has been cancelled stays so."""
        run, outcome = self._last(run)
        if outcome.status != RunState.CANCELLED:
            self._send(run, RequestKind.CANCEL_RUN, "cancel")

    def terminate(self, run: bytes) -> None:
        """End a run without asking its code."""
        self._send(run, RequestKind.TERMINATE, "terminate")

    def reset(self, run: bytes, to: int, reason: str) -> Steps[bytes]:
        """Start a run that repeats another one, open or not, up to an event; return the new one when it is there."""
        resets.check(run, self.history(run).events, to)  # so that a mistake is told at once, whether or not one leads
        request = new_id()
        what = f"the request to reset run {to_text(run)} was stored"
        with self._connections.writing(what, transaction=True) as connection:
            self._add_request(connection, RequestKind.RESET, run, request=request, to=to, reason=reason)
            self._connections.record(connection, "reset", "run", to_text(run), to=to, reason=reason)
        self._connections.nudge()
        answer = yield from self._waiting.wait(request, lambda: self._find_answer(request), _RESETTING)
        if answer is None:
            raise ResultTimeout(
                f"Run {to_text(run)} was not reset within {_RESETTING:g} s, and will be as soon as a scheduler comes "
                f"to it: do not ask again, and look for the new run with `orchestrator runs list`. What is in the way, "
                f"`orchestrator status` says."
            )
        if answer.error is not None:
            raise (NotFound if answer.error.kind == "NotFound" else WrongState)(answer.error.message)
        return UUID(decode_value(answer.result or b"\xc0")).bytes

    def retry(self, run: bytes) -> bool:
        """Let a stuck run try again; False if this is no run of code at all."""
        what = f"the request to retry run {to_text(run)} was stored"
        with self._connections.writing(what, transaction=True) as connection:
            outcome = code_reads.outcome(connection, run)
            if outcome is None:
                return False
            if outcome.stuck is None:
                raise WrongState(
                    f"Cannot retry run {to_text(run)}: it is in state {outcome.status!r}, and only a stuck run of a "
                    f"workflow as code can try again. To do all of it again: orchestrator runs rerun {to_text(run)}; "
                    f"to keep what was done up to an event: orchestrator runs reset {to_text(run)} --to EVENT"
                )
            inbox.add(connection, RequestKind.RETRY_RUN, run)
            self._connections.record(connection, "retry", "run", to_text(run))
        self._connections.nudge()
        return True

    def _send(
        self, run: bytes, request_kind: RequestKind, verb: str, told: Mapping[str, Any] = _NOTHING, **body: Any
    ) -> bytes:
        """Put a request for an open run into the inbox; return the run, which may be a successor."""
        run = self._open(run, verb)
        what = f"the request to {verb} run {to_text(run)} was stored"
        is_act = request_kind != RequestKind.QUERY
        with self._connections.writing(what, transaction=is_act) as connection:
            if request_kind in _SETTLES:
                _refuse_second(connection, run, body["name"])
            self._add_request(connection, request_kind, run, **body)
            if is_act:
                detail = ({"name": body["name"]} if "name" in body else {}) | dict(told)
                self._connections.record(connection, request_kind.split(" ")[0], "run", to_text(run), **detail)
        self._connections.nudge()
        return run

    @staticmethod
    def _add_request(connection: Connection, request_kind: RequestKind, run: bytes, **body: Any) -> int:
        return inbox.add(connection, request_kind, run, msgspec.json.encode(body).decode())

    def _request(
        self,
        run: bytes,
        request_kind: RequestKind,
        verb: str,
        timeout: float | None,
        told: Mapping[str, Any] = _NOTHING,
        **body: Any,
    ) -> Steps[bytes]:
        """Ask for something that is answered, and return the answer; `told` is for the audit log."""
        request = new_id()
        run = self._send(run, request_kind, verb, told, request=request, **body)
        deadline = None if timeout is None else time.monotonic() + timeout
        is_settled = request_kind in _SETTLES
        pause = _SETTLING if is_settled and deadline is not None else _ASK_AGAIN
        while True:
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            answer = yield from self._waiting.wait(request, lambda: self._find_answer(request), max(0.0, left))
            if answer is not None:
                break
            if is_settled and deadline is not None and self._is_without_leader(run):
                raise ResultTimeout("no scheduler leads, and the next one that does comes to it")
            if is_settled and deadline is not None and time.monotonic() >= deadline:
                raise ResultTimeout(f"no scheduler has come to it within {timeout:g} s, and one will")
            if deadline is not None and time.monotonic() >= deadline:
                raise ResultTimeout(
                    f"No answer to {verb} run {to_text(run)} within {timeout:g} s. {self.overdue(run, body['name'])}."
                )
            self._open(run, verb)
            if request_kind is RequestKind.QUERY:
                self._send(run, request_kind, verb, request=request, **body)
        if answer.error is not None:
            kind = WrongState if answer.error.kind == "WrongState" else OrchestratorError
            refused = kind(_refused(verb, body["name"], answer.error))
            refused.data = answer.error.attributes
            raise refused
        return answer.result or b"\xc0"

    def _is_without_leader(self, run: bytes) -> bool:
        """Return whether it is known that nobody leads."""
        try:
            return NO_LEADER in obstacles(self._connections, run)
        except Unavailable:
            return False

    def _find_answer(self, request: bytes) -> Ended | None:
        with self._connections.reading() as connection:
            found = expectations.find_answer(connection, request)
        if found is None:
            return None
        state = RunState.FAILED if found.error is not None else RunState.SUCCESS
        return Ended(request, state, reveal(found.result or b"\xc0"), found.error and reveal_error(found.error))

    # -- reading

    def status(self, run: bytes) -> str:
        """Return the state of the run, or of the one in which it goes on."""
        _, outcome = self._last(run)
        return "stuck" if outcome.stuck is not None else outcome.status

    def overdue(self, run: bytes, update: str | None = None) -> str:
        """Say how a run is, or the one in which it goes on, whose end or answer somebody has waited for in vain.

        Of an update, say whether the code has a handler for it.
        """
        try:
            with self._connections.reading() as connection:
                last = code_runs.latest(connection, [run])[run]
                reason, waiting = stuck.reason(connection, last), code_reads.waiting(connection, last)
        except Unavailable:
            return "Postgres cannot be asked how it is"
        if reason is not None:
            return f"It is stuck: {reason['kind']}: {reveal_text(reason['message'])}".removesuffix(".")
        waiting_updates: list[str] = waiting.get("updates", [])
        without = next((text for text in waiting_updates if text.startswith(f"{update}{NO_HANDLER}")), None)
        return overdue(self._connections, last) if without is None else f"It has got update {without}"

    def find(self, workflow: str, key: str) -> bytes | None:
        """Return the newest run that was started under a chosen id."""
        full = scoped(workflow, key)
        with self._connections.reading() as connection:
            return run_keys.holders(connection, [full]).get(full)

    def history(self, run: bytes) -> Recording:
        """Return everything that happened in a run."""
        self._outcome(run)
        with self._connections.reading() as connection:
            return Recording(run, [reveal_event(event) for event in histories.read(connection, run)])

    def wait(self, run: bytes, timeout: float | None, sent: Sent | None = None) -> Steps[Ended | None]:
        """Wait until a run, or the last of those in which it goes on, has ended; None if it has not by then.

        It goes on in the run that got the signal which was `sent` to it, if it had ended by then.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended = yield from self._waiting.wait(run, self._end_finder(run, sent), left)
            following = None if ended is None else self._following(run, ended, sent)
            if following is None:
                return ended
            run, sent = following

    def _following(self, run: bytes, ended: Ended, sent: Sent | None) -> tuple[bytes, Sent | None] | None:
        """Return what is to be waited for after the end of a run; None if that was it."""
        if ended.state == RunState.SUCCESS and ended.error is not None:
            return successor_id(run), sent
        if sent is None:
            return None
        try:
            reached = self.reached(sent)
        except Unavailable:
            reached = None
        if reached is None:
            return run, sent  # nobody knows yet: look again
        return None if reached == sent.run else (reached, None)

    def reached(self, sent: Sent) -> bytes | None:
        """Return the run that a signal has reached, or None while it is on its way."""
        with self._connections.reading() as connection:
            return signals.reached(connection, sent)

    def _end_finder(self, run: bytes, sent: Sent | None) -> FindEnd:
        def find_end() -> Ended | None:
            outcome = self._outcome(run)
            if outcome.status not in ENDED_RUN_STATES or (sent is not None and self.reached(sent) is None):
                return None
            if outcome.reason in GOES_ON:
                return Ended(run, RunState.SUCCESS, None, TaskError("Continued", "It goes on in another run."))
            error = outcome.error and reveal_error(outcome.error)
            return Ended(run, outcome.status, reveal(outcome.result), error)

        return find_end

    def find_ends(self, runs: Sequence[bytes]) -> list[Ended]:
        """Return those that have ended, go on in another, or are no runs of code; the error of the last says so."""
        with self._connections.reading() as connection:
            states = results.run_states(connection, runs)
        ends = []
        for run in runs:
            if run in states and states[run] not in ENDED_RUN_STATES:
                continue
            try:
                ended = self._end_finder(run, None)()
            except NotFound as error:
                ended = Ended(run, MISSING, None, TaskError(type(error).__name__, str(error)))
            if ended is not None:
                ends.append(ended)
        return ends

    def _is_there(self, run: bytes) -> bool:
        with self._connections.reading() as connection:
            return bool(results.run_states(connection, [run]))

    def _outcome(self, run: bytes) -> CodeRunOutcome:
        with self._connections.reading() as connection:
            found = code_reads.outcome(connection, run)
            is_there = found is not None or results.progress(connection, run) is not None
        if not is_there:
            raise NotFound.by_id("run", to_text(run))
        if found is None:
            raise NotFound(
                f"Run {to_text(run)} is no run of a workflow as code: only those have a history, and can be told, "
                f"asked and reset. What became of its steps or tasks: orchestrator runs show {to_text(run)}. To do "
                f"steps again: orchestrator runs rerun {to_text(run)} --from STEP"
            )
        return found

    def _last(self, run: bytes) -> tuple[bytes, CodeRunOutcome]:
        outcome = self._outcome(run)
        while outcome.reason in GOES_ON:
            with self._connections.reading() as connection:
                run = code_runs.latest(connection, [run])[run]
            outcome = self._outcome(run)
        return run, outcome

    def _open(self, run: bytes, verb: str) -> bytes:
        run, outcome = self._last(run)
        if outcome.status in ENDED_RUN_STATES:
            raise WrongState(f"Cannot {verb} run {to_text(run)}: it is in state {outcome.status!r}.")
        return run


def _refuse_second(connection: Connection, run: bytes, name: str) -> None:
    """Refuse to decide a promise that is decided, so that the audit log has only what was done."""
    standing = resolutions.take_turn(connection, run, name)
    if standing.is_decided and standing.is_under_way:
        raise WrongState(f"Promise {name!r} of run {to_text(run)} is decided already, a moment ago.")
    if standing.is_decided:
        raise WrongState(
            f"No promise {name!r} is open in run {to_text(run)}: it was resolved, rejected or given up before."
        )


def _refused(verb: str, name: str, error: TaskError) -> str:
    if error.kind == "WrongState":
        return error.message
    return f"The {verb.split()[0]} {name!r} failed: {error_text(error.kind, error.message)}"
