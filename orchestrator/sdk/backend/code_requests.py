"""Requests to the leader about runs of code, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.ids import is_derived, to_text
from orchestrator.domain.sealed import reveal_error
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.obstacles import is_without_leader
from orchestrator.errors import Duplicate, NotFound, ResultTimeout, Unavailable, WrongState
from orchestrator.sdk.backend.code_reading import CodeReading
from orchestrator.sdk.backend.part import obstacles
from orchestrator.sdk.code.messages import next_try, raised, request_id
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.waiting.steps import Steps, time_limit
from orchestrator.sealing import reveal
from orchestrator.store import audit, inbox
from orchestrator.store.code import expectations, histories, runs
from orchestrator.store.code.histories import UpdateEvents
from orchestrator.store.inbox import RequestKind
from orchestrator.transport.codec import Ended

_RESEND_AFTER = 5.0
"""Seconds after which a query is sent again. It may have been lost with a worker or a leader."""

SETTLED_WITHIN = 20.0
"""Seconds to wait until the leader settles a promise; less if there is no leader."""
_LEADER_CHECK_INTERVAL = 2.0
"""Seconds between two checks whether there is a leader, while a promise is being settled."""
_FIRST_LEADER_CHECKS = (1.0, 1.0)
"""Seconds before the first and the second check for a leader that can pass on a query. A standby may take over."""
_STUCK_CHECK_AFTER = 1.0
"""Seconds before the check whether the run of an update is stuck."""
_QUEUED = " The update stays queued: the run applies it when it resumes."

_SETTLES = frozenset({RequestKind.RESOLVE, RequestKind.REJECT})
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class CodeRequests(CodeReading):
    """Sends requests and waits for answers."""

    def _send(
        self, run: bytes, request_kind: RequestKind, verb: str, audited: Mapping[str, Any] = _NOTHING, **body: Any
    ) -> bytes:
        """Put a request for an open run into the inbox. Return the run, which may be a successor."""
        is_write = request_kind != RequestKind.QUERY
        try:
            run = self._open(run, verb) if is_write else self._last(run)[0]
        except WrongState as error:
            if request_kind not in _SETTLES or (decision := self._decision(run, body["name"])) is None:
                raise
            raise WrongState(f"{error} Promise {body['name']!r} was {decision}.") from None
        written = f"the request to {verb} run {to_text(run)} was stored"
        with self._connections.writing(written, transaction=request_kind in _SETTLES) as connection:
            if request_kind in _SETTLES:
                _refuse_second(connection, run, body["name"])
            if is_write:
                detail = ({"name": body["name"]} if "name" in body else {}) | dict(audited)
                text = msgspec.json.encode(body).decode()
                is_stored = self._connections.ask(connection, request_kind, run, text, **detail)
            else:
                is_stored = bool(add_request(connection, request_kind, run, **body))
        if not is_stored:  # the run has ended meanwhile: raise, or send the request to its successor
            return self._send(run, request_kind, verb, audited, **body)
        self._connections.nudge()
        return run

    def _request(
        self,
        run: bytes,
        request_kind: RequestKind,
        verb: str,
        timeout: float,
        audited: Mapping[str, Any] = _NOTHING,
        **body: Any,
    ) -> Steps[bytes]:
        """Send a request, wait for the answer, and return it. `audited` goes into the audit log."""
        request = new_id()
        with time_limit(timeout, writes=True):
            run = self._send(run, request_kind, verb, audited, request=request, **body)
        resend = partial(self._send, run, request_kind, verb, request=request, **body)
        return (yield from self._answer(run, request_kind, verb, request, timeout, body["name"], resend))

    def _answer(
        self,
        run: bytes,
        request_kind: RequestKind,
        verb: str,
        request: bytes,
        timeout: float,
        name: str,
        resend: Callable[[], object] | None = None,
    ) -> Steps[bytes]:
        """Wait for the answer to a request, and return it. `resend` sends a query again.

        Raise WrongState if the run of an update ends without an answer.
        """
        limit = time_limit(timeout, writes=True)
        find = partial(self._find_answer, request) if resend else partial(self._find_update, run, request)
        is_settled = request_kind in _SETTLES
        target = run if request_kind is RequestKind.UPDATE else None
        pauses = [*_FIRST_LEADER_CHECKS] if request_kind is RequestKind.QUERY else []
        if request_kind is RequestKind.UPDATE and name:
            pauses = [_STUCK_CHECK_AFTER]
        pause = _LEADER_CHECK_INTERVAL if is_settled else _RESEND_AFTER
        was_led = True
        while True:
            is_early = bool(pauses)
            part = limit.for_at_most(pauses.pop() if is_early else pause)
            answer = yield from self._waiting.wait(request, find, part, target)
            if answer is not None:
                break
            with limit:
                is_led = not (is_settled or is_early) or not self._is_without_leader(run)
                if is_settled and (limit.is_up or not is_led):
                    why = f"no scheduler has handled it within {timeout:g} s" if is_led else "no scheduler leads"
                    raise ResultTimeout(
                        f"The answer to promise {name!r} of run {to_text(run)} is stored, but has not reached "
                        f"the run yet: {why}. The next leader delivers it: do not send it again."
                    )
                if limit.is_up and not name:
                    self._refuse_unsent(run, request)
                is_held = target is not None and (is_early or limit.is_up) and self._stuck(run) is not None
                if limit.is_up or is_held or not (is_led or was_led):
                    within = f"within {timeout:g} s" if limit.is_up else "yet"
                    why = f"{self.overdue(run, name)}.{_QUEUED if is_held else ''}"
                    raise ResultTimeout(f"No answer to {verb} run {to_text(run)} {within}. {why}")
                was_led = is_led
                if is_early:
                    continue
                if request_kind is RequestKind.QUERY and resend is not None:
                    resend()
                elif find() is None:
                    target = self._open(run, verb)
        if answer.error is not None:
            name = name or self._update_name(run, request)
            raise raised(f"The {verb.split()[0]} {name!r}", answer.error)
        return answer.result or b"\xc0"

    def _decision(self, run: bytes, name: str) -> str | None:
        """Describe who settled a promise of the newest run of a chain, and how; None if unknown."""
        last, _ = self._last(run)
        with self._reading() as connection:
            return audit.decision(connection, to_text(last), name)

    def _is_without_leader(self, run: bytes) -> bool:
        try:
            return is_without_leader(obstacles(self._connections, run))
        except Unavailable:
            return False

    def _find_answer(self, request: bytes) -> Ended | None:
        with self._reading() as connection:
            stored = expectations.find_answer(connection, request)
        if stored is None:
            return None
        state = RunState.FAILED if stored.error is not None else RunState.SUCCESS
        return Ended(request, state, reveal(stored.result or b"\xc0"), stored.error and reveal_error(stored.error))

    def _find_update(self, run: bytes, request: bytes) -> Ended | None:
        """Return the answer to an update, however old."""
        if (found := self._find_answer(request)) is not None:
            return found
        with self._reading() as connection:
            answer = histories.update_events(connection, chain_of(connection, run), request).answer
        if answer is None:
            return None
        state = RunState.FAILED if answer.error is not None else RunState.SUCCESS
        return Ended(request, state, reveal(answer.result or b"\xc0"), answer.error and reveal_error(answer.error))

    def _last_try(self, run: bytes, request: bytes) -> tuple[bytes, UpdateEvents]:
        with self._reading() as connection:
            return last_try(connection, chain_of(connection, run), request)

    def _update_name(self, run: bytes, request: bytes) -> str:
        """Return the name of an update; empty if it is in no history."""
        with self._reading() as connection:
            found = histories.update_events(connection, chain_of(connection, run), request).request
        return "" if found is None else found.name

    def _refuse_unsent(self, run: bytes, request: bytes) -> None:
        """Raise NotFound for an update that is neither in a history nor in the inbox."""
        with self._reading() as connection:  # first the inbox, from which the update moves to the history
            is_queued = inbox.has_request(connection, RequestKind.UPDATE, request)
        if not is_queued and not self._update_name(run, request):
            raise NotFound(f"No update was sent to run {to_text(run)} under this id.")

    def _outgoing(self, kind: bytes, data: bytes, run: bytes) -> bytes:
        """Return an encoded value as it is stored: sealed, or a reference to the payload store if it is large."""
        payloads = self._connections.payloads
        return self._sealed(kind, data if payloads is None else payloads.arguments(data, run, None))

    def _sealed(self, kind: bytes, data: bytes) -> bytes:
        return data if self._vault is None else self._vault.seal(kind, data)


def chain_of(connection: Connection, run: bytes) -> list[bytes]:
    """Return the runs of the chain of a run, in order. Their histories may contain an update to the run."""
    return [member for past in reversed(runs.message_chains(connection, run)) for member in past.runs]


def request_of(connection: Connection, run: bytes, what: Literal["signal", "update"], id: str) -> bytes:
    """Return the request id of a message whose sender chose an id.

    The id is unique among all runs of a chain. If a run repeats an ended run, the messages it takes over keep their
    request ids.
    """
    own, *repeated = runs.message_chains(connection, run)
    for past in repeated:
        request = request_id(past.first, what, id)
        if what == "signal":
            is_used = expectations.find_answer(connection, request) is not None
        else:
            is_used = last_try(connection, chain_of(connection, run), request)[1].request is not None
        if is_used:
            return request
    return request_id(own.first, what, id)


def last_try(connection: Connection, chain: Sequence[bytes], request: bytes) -> tuple[bytes, UpdateEvents]:
    """Return the last request with which an update was sent, and its events in the histories of a `chain`.

    A refused update was not applied. If it is sent again with its id, it becomes another request. A run that was reset
    may have only the later request.
    """
    events = histories.update_events(connection, chain, request)
    while events.was_refused or (events.request is None and any(map(is_derived, chain))):
        retry = next_try(request)
        is_queued = inbox.has_request(connection, RequestKind.UPDATE, retry)
        later = histories.update_events(connection, chain, retry)
        if later.request is None and not is_queued:
            break
        request, events = retry, later
    return request, events


def add_request(connection: Connection, request_kind: RequestKind, run: bytes, **body: Any) -> int:
    """Put a request into the inbox and return its number."""
    return inbox.add(connection, request_kind, run, msgspec.json.encode(body).decode())


def refuse_other_name(what: str, name: str, first: object) -> None:
    """Refuse a message with the id of an applied message that had another name."""
    if first and first != name:
        raise Duplicate(
            f"The {what} {name!r} was not sent: {what} {first!r} was sent to this run under the same id. An "
            f"id can be reused only for the same {what}; a different one needs its own id."
        )


def _refuse_second(connection: Connection, run: bytes, name: str) -> None:
    """Refuse to settle a promise again, so that the audit log records only decisions that took effect."""
    if expectations.lock_promises(connection, run, name):
        decision = audit.decision(connection, to_text(run), name) or "resolved, rejected or given up before"
        raise WrongState(f"No promise {name!r} is open in run {to_text(run)}: it was {decision}.")
