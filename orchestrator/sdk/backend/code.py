"""Calls about runs of workflows as code: start, signal, query, update, cancel and reset, by requests to the leader."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code import history, resets
from orchestrator.domain.code.activation import NO_HANDLER
from orchestrator.domain.code.attributes import checked, stored
from orchestrator.domain.code.promises import mismatch
from orchestrator.domain.ids import to_text
from orchestrator.domain.limits.lane_limits import scoped
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.domain.tasks.headers import headers_of_start
from orchestrator.domain.tasks.starts import OnConflict
from orchestrator.errors import (
    Duplicate,
    Forbidden,
    NotFound,
    PayloadError,
    ResultTimeout,
    Uncertain,
    UnknownHandler,
    WrongState,
)
from orchestrator.sdk.acting import may_operate
from orchestrator.sdk.backend.code_reading import named
from orchestrator.sdk.backend.code_requests import (
    SETTLED_WITHIN,
    CodeRequests,
    add_request,
    chain_of,
    last_try,
    refuse_other_name,
    request_of,
)
from orchestrator.sdk.backend.connections import MAX_AUDITED_LENGTH
from orchestrator.sdk.backend.part import reading
from orchestrator.sdk.checks import check_message, check_name, check_reason, check_text
from orchestrator.sdk.code.messages import next_try, request_id
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import decode_value
from orchestrator.sdk.waiting.steps import Steps, time_limit
from orchestrator.sealing import CALL, VALUE
from orchestrator.store import fleet, inbox
from orchestrator.store.code import expectations, histories, reads, runs
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code.keys import Sent
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs import creation
from orchestrator.time_limits import TimeLimit
from orchestrator.trace_context import current_trace

_DECISION_TIMEOUT = 1.0
"""Seconds to wait until the leader decides which run receives a signal to an ended run. Handles can learn it later."""
_RESET_LIMIT = 20.0
"""Seconds to wait for the run that a reset starts."""


class CodeBackend(CodeRequests):
    """Calls about runs of code."""

    request_of = reading(request_of)

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
        update: history.UpdateRequested | None = None,
        update_id: str = "",
        repeated: bool = False,
    ) -> tuple[bytes, Sent | None]:
        """Create a run and return its id, or the id of the run that holds `key`, depending on `on_conflict`.

        With a signal, an open run under the key receives the signal instead, and an ended run is followed by a new one.
        If the open run ends before it receives the signal, the leader starts the new run. In this case the result also
        describes the signal. With `repeated`, the run may have been created by an earlier try.

        An update, which has an id from its sender, works in the same way. It is not applied again if the newest run
        under the key, or a run that this run continues, has received it.
        """
        if repeated and self._exists(run_id):
            return run_id, None
        if repeated and signal is not None:
            raise Uncertain(f"It is not known whether signal {signal.name!r} was sent to the run under the id {key!r}.")
        checked(stored(started.attributes))
        started = msgspec.structs.replace(started, payload=self._outgoing(CALL, started.payload, run_id))
        if signal is not None:
            signal = msgspec.structs.replace(signal, value=self._outgoing(VALUE, signal.value, run_id))
        sent: Sent | None = None
        facts: list[history.Fact] = [started]
        if signal is not None:
            facts.append(signal)
        if update is not None:
            update = msgspec.structs.replace(update, payload=self._sealed(CALL, update.payload))
            facts.append(msgspec.structs.replace(update, id=request_id(run_id, "update", update_id)))
        run = runs.new_run(run_id, facts, pinned=pinned)._replace(
            timeout=timeout, tags=tags, trace=current_trace(), headers=headers_of_start()
        )
        with self._connections.changing(f"run {to_text(run_id)} was stored") as connection:
            full_key = scoped(started.workflow, key or "")
            message = signal or update
            anew, in_order = message is not None or on_conflict == "anew", message is not None and may_operate.get()
            take = partial(run_keys.take, connection, full_key, run.id)
            if key is not None and update is not None and (first := take(anew=False)) is not None:
                applied = _applied(connection, first[0], update.name, update_id)
                if applied is not None:
                    return applied, None
            holder = None if key is None else take(anew=anew, in_order=in_order)
            if holder is None:
                creation.create(connection, [run])
            elif message is not None and not may_operate.get():
                raise Forbidden(
                    f"{'Update' if signal is None else 'Signal'} {message.name!r}: a run is open under the id "
                    f"{key!r}, and sending to an existing run needs the scope operate. The scope enqueue only "
                    "allows starting one."
                )
            elif update is not None:
                body = {"name": update.name, "value": update.payload, "once": True}
                request = request_of(connection, holder[0], "update", update_id)
                request, tried = last_try(connection, chain_of(connection, holder[0]), request)
                request = next_try(request) if tried.was_refused else request
                add_request(connection, RequestKind.UPDATE, holder[0], request=request, **body)
                self._connections.record(connection, "update", "run", to_text(holder[0]), name=update.name)
            elif signal is not None:
                start = {"key": full_key, "id": run_id, "timeout": timeout, "tags": tags, "pinned": pinned}
                start |= {name: getattr(started, name) for name in ("workflow", "version", "payload", "queue")}
                start |= {} if run.trace is None else {"trace": run.trace}
                start |= {} if run.headers is None else {"headers": run.headers}
                start |= {"attributes": started.attributes} if started.attributes else {}
                number = add_request(
                    connection, RequestKind.SIGNAL, holder[0], name=signal.name, value=signal.value, start=start
                )
                sent = Sent(holder[0], run_id, number)
                self._connections.record(connection, "signal", "run", to_text(holder[0]), name=signal.name)
            elif on_conflict != "return":
                raise Duplicate(
                    f"Workflow {started.workflow!r} has run {to_text(holder[0])} ({holder[1]}) under the id "
                    f"{key!r}. Start with on_conflict='return' to get that run, or 'anew' to start a new one "
                    "once it has ended.",
                    to_text(holder[0]),
                )
        if sent is not None and holder is not None and holder[1] in ENDED_RUN_STATES:
            return self._await_decision(sent) or holder[0], sent
        return run.id if holder is None else holder[0], sent

    def _await_decision(self, sent: Sent) -> bytes | None:
        """Wait until the leader has decided which run receives a signal to an ended run, and return that run."""
        give_up_at = time.monotonic() + _DECISION_TIMEOUT
        pause = 0.002
        while (reached := self.reached(sent)) is None and time.monotonic() < give_up_at:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return reached

    def rerun(self, connection: Connection, run: bytes, new: bytes, from_step: str | None = None) -> bool:
        """Start a new run of the same workflow, in this transaction. Return False if this is no run of code."""
        new_run = reads.rerun_of(connection, run, new)
        if new_run is None:
            return False
        if from_step is not None:
            raise WrongState(
                f"Run {to_text(run)} is a workflow as code, which has no steps to start from. To keep the work "
                f"up to an event of its history: orchestrator runs reset {to_text(run)} --to EVENT"
            )
        creation.create(connection, [new_run._replace(trace=current_trace())])
        return True

    # -- signals, cancels and retries

    def signal(
        self,
        run: bytes,
        name: str,
        value: bytes,
        request: bytes | None = None,
        known: bool = False,
        id: str = "",  # noqa: ARG002  # for servers
    ) -> None:
        if request is not None and (applied := self._find_answer(request)) is not None:
            refuse_other_name("signal", name, decode_value(applied.result or b"\xc0"))
            return
        body: dict[str, Any] = {"name": check_name("signal", name), "value": self._outgoing(VALUE, value, run)}
        body |= {} if request is None else {"request": request, "once": True}
        if not known:
            with self._reading() as connection:
                for problem in fleet.unknown_signals(connection, [(run, name)]).values():
                    raise UnknownHandler(problem)
        self._send(run, RequestKind.SIGNAL, "signal", **body)

    def signal_many(self, workflow: str, name: str, signals: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
        check_name("signal", name)
        bodies = [
            (run, msgspec.json.encode({"name": name, "value": self._outgoing(VALUE, value, run)}).decode())
            for run, value in signals
        ]
        with self._connections.changing(f"{len(signals)} signals {name!r} were stored") as connection:
            reached = runs.signal_open(connection, workflow, bodies)
            self._connections.record(connection, "signal", "runs", workflow, name=name, runs=len(reached))
        return [run for run in dict(signals) if run not in reached]

    def cancel(self, run: bytes) -> None:
        run, outcome = self._last(run)
        if outcome.status != RunState.CANCELLED:
            self._send(run, RequestKind.CANCEL_RUN, "cancel")

    def terminate(self, run: bytes) -> None:
        self._send(run, RequestKind.TERMINATE, "terminate")

    def retry(self, run: bytes) -> bool:
        """Retry a stuck run. Return False if this is no run of code."""
        with self._connections.changing(f"the request to retry run {to_text(run)} was stored") as connection:
            outcome = reads.outcome(connection, run)
            if outcome is None:
                return False
            if outcome.stuck is None:
                raise WrongState(
                    f"Cannot retry run {to_text(run)}: it is in state {outcome.status!r}, and only a stuck run "
                    "of a workflow as code can be retried. To run it again from the start: orchestrator runs "
                    f"rerun {to_text(run)}; to keep the work up to an event: orchestrator runs reset "
                    f"{to_text(run)} --to EVENT"
                )
            inbox.add(connection, RequestKind.RETRY_RUN, run)
            self._connections.record(connection, "retry", "run", to_text(run))
        return True

    # -- requests with an answer

    def resolve(
        self, run: bytes, promise: str, value: bytes, why: str = "", timeout: float = SETTLED_WITHIN
    ) -> Steps[bytes]:
        """Resolve the oldest open promise with this name. The audit log records the value and the reason (`why`).

        Return None, encoded. If no such promise is open, keep the value for a later promise, and return the names of
        the first open promises instead. ResultTimeout means that the request is stored, but not applied yet; it is
        raised early if there is no leader.
        """
        _check_decision(promise, why)
        with time_limit(timeout, writes=True):
            self._check_type(run, promise, value)
        audited = {"value": self._connections.audited(promise, value)} | (
            {"why": why[:MAX_AUDITED_LENGTH]} if why else {}
        )
        value = self._sealed(VALUE, value)
        return self._request(
            run, RequestKind.RESOLVE, "resolve a promise of", timeout, audited, name=promise, value=value
        )

    def _check_type(self, run: bytes, promise: str, value: bytes) -> None:
        """Refuse a value that does not match the type of the open promise with this name."""
        with self._reading() as connection:
            last = runs.latest(connection, [run]).get(run, run)
            created = histories.promises(connection, [last]).get(last, [])
            if not any(expected.schema for expected in created if expected.name == promise):
                return
            waiting = {id for _, id, _ in expectations.open_promises(connection, [last])}
        if problem := mismatch(created, waiting, promise, decode_value(value)):
            raise PayloadError(f"Promise {promise!r} of run {to_text(last)}: {problem}. Nothing was sent.")

    def reject(
        self, run: bytes, promise: str, reason: str, why: str = "", timeout: float = SETTLED_WITHIN
    ) -> Steps[bytes]:
        """Reject the oldest open promise with this name. Return the same as `resolve`. The audit log records both."""
        _check_decision(promise, why)
        check_reason(reason)
        audited = {} if self._vault is not None or not reason else {"reason": reason[:MAX_AUDITED_LENGTH]}
        audited |= {"why": why[:MAX_AUDITED_LENGTH]} if why else {}
        reason = reason if self._vault is None else self._vault.seal_text(reason)
        return self._request(
            run, RequestKind.REJECT, "reject a promise of", timeout, audited, name=promise, reason=reason
        )

    def query(self, run: bytes, name: str, payload: bytes, timeout: float) -> Steps[bytes]:
        """Send a query to the code. The arguments and the answer are encoded."""
        check_message("query", name)
        return self._request(run, RequestKind.QUERY, "query", timeout, name=name, value=self._sealed(CALL, payload))

    def update(
        self,
        run: bytes,
        name: str,
        payload: bytes,
        timeout: float,
        request: bytes | None = None,
        answered: bool = True,
        id: str = "",  # noqa: ARG002  # for servers
    ) -> Steps[bytes]:
        """Send an update to the code. The arguments and the answer are encoded."""
        check_message("update", name)
        value = self._sealed(CALL, payload)
        if request is None:
            return (yield from self._request(run, RequestKind.UPDATE, "update", timeout, name=name, value=value))
        with time_limit(timeout, writes=True):
            request, found = self._last_try(run, request)
            if found.was_refused:
                request = next_try(request)
            elif found.request is not None:
                refuse_other_name("update", name, found.request.name)
            if found.was_refused or self._find_update(run, request) is None:
                self._send(run, RequestKind.UPDATE, "update", request=request, once=True, name=name, value=value)
        return (yield from self._answer(run, RequestKind.UPDATE, "update", request, timeout, name)) if answered else b""

    def update_answer(self, run: bytes, request: bytes, timeout: float, id: str = "") -> Steps[bytes]:  # noqa: ARG002
        last, outcome = self._last(run)
        request, _ = self._last_try(run, request)
        if outcome.status in ENDED_RUN_STATES and self._find_update(run, request) is None:
            self._refuse_unsent(run, request)
            self._open(last, "update")
        return self._answer(run, RequestKind.UPDATE, "update", request, timeout, "")

    def update_stage(self, run: bytes, request: bytes, id: str = "") -> str:  # noqa: ARG002
        last, outcome = self._last(run)
        request, found = self._last_try(run, request)
        answer = self._find_update(run, request)
        was_late = found.request is None and answer is not None and answer.error is not None
        if answer is not None and not was_late:
            return "completed"
        with self._reading() as connection:
            waiting = reads.waiting(connection, last)
        if found.request is None and not was_late:
            self._refuse_unsent(run, request)
        if outcome.status in ENDED_RUN_STATES:
            return f"run {named(outcome)}"
        name = "" if found.request is None else found.request.name
        has_handler = not any(text.startswith(f"{name}{NO_HANDLER}") for text in waiting.get("updates", []))
        return "accepted" if found.is_shown and has_handler else "sent"

    def reset(self, run: bytes, to: int, reason: str) -> Steps[bytes]:
        resets.check(run, self.history(run).events, to)  # report mistakes at once, even if no scheduler leads
        request = new_id()
        with self._connections.changing(f"the request to reset run {to_text(run)} was stored") as connection:
            add_request(connection, RequestKind.RESET, run, request=request, to=to, reason=reason)
            self._connections.record(connection, "reset", "run", to_text(run), to=to, reason=reason)
        answer = yield from self._waiting.wait(request, lambda: self._find_answer(request), TimeLimit(_RESET_LIMIT))
        if answer is None:
            raise ResultTimeout(
                f"Run {to_text(run)} was not reset within {_RESET_LIMIT:g} s. The request is stored, and a "
                "scheduler will apply it: do not repeat it; find the new run with `orchestrator runs list`. "
                "`orchestrator status` shows what blocks the scheduler."
            )
        if answer.error is not None:
            raise (NotFound if answer.error.kind == "NotFound" else WrongState)(answer.error.message)
        return UUID(decode_value(answer.result or b"\xc0")).bytes


def _check_decision(promise: str, why: str) -> None:
    check_name("promise", promise)
    check_text("The reason for a decision", why)


def _applied(connection: Connection, run: bytes, name: str, update_id: str) -> bytes | None:
    """Return the first run of a chain if any run of the chain has applied an update; else None.

    An update that was refused, or that arrived after the code had ended, was not applied.
    """
    request = request_of(connection, run, "update", update_id)
    _, found = last_try(connection, chain_of(connection, run), request)
    if found.request is None or found.was_refused or not (found.is_shown or found.answer is not None):
        return None
    refuse_other_name("update", name, found.request.name)
    return runs.origin(connection, run)
