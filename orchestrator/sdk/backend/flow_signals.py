"""Signals and decisions for runs of flows. Each approval is decided once, whichever call or key decides it.

A decision holds the lock of the run from reading its state to the commit, so one of several concurrent decisions
succeeds. The others are refused, and the audit log has one entry.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection

from orchestrator.domain import timezones
from orchestrator.domain.flow.decisions import APPROVED, REJECTED, check_decision
from orchestrator.domain.flow.definition import Flow
from orchestrator.domain.flow.graph import approvals
from orchestrator.domain.flow.paths import Path, parse, write
from orchestrator.domain.flow.state import FlowState, Wait
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import stored_json, unstorable
from orchestrator.domain.states import ENDED_RUN_STATES
from orchestrator.errors import ExpressionError, NotFound, PayloadError, StateTooLarge, WrongState
from orchestrator.sdk import acting
from orchestrator.sdk.backend.part import Part
from orchestrator.sdk.values.payload import encode_value
from orchestrator.store import audit, inbox
from orchestrator.store.flow import reads
from orchestrator.store.flow import runs as flow_runs
from orchestrator.store.flow.runs import Standing
from orchestrator.store.inbox import RequestKind

_SIGNAL_PAYLOADS = 3
"""The share of signals in a run's state, in units of `max_payload`. The state may have four; its nodes get the rest."""


class _Approval(NamedTuple):
    node: str
    """The key of the approval's node, with the keys of the nodes above as prefix."""
    address: str
    """The key of the decision in the shared state."""

    @property
    def local(self) -> str:
        """The key of the decision inside its nested flow."""
        return self.address[self.node.rfind("/") + 1 :]


class FlowSignals(Part):
    """Sends values to runs of flows."""

    def signal(self, run: bytes, key: str, value: Any, why: str = "") -> None:
        """Send a value to a run under a key. If the key belongs to an approval, decide the approval."""
        path = parse(key)
        if path.root != "shared" or not path.parts:
            raise ExpressionError(f"Signal {key!r} cannot be sent: expected a key of the shared state, such as `paid`.")
        data = self._encoded(path.key, value, why)
        with self._connections.changing(f"signal {key!r} was stored") as connection:
            flow, approvals = _approvals(connection, run)
            touched = [
                approval
                for approval in approvals
                if path.key in (approval.address, approval.local) or _overlaps(approval, path)
            ]
            current = _lock_run(connection, run, touched)
            approval = _approval_for(current, touched, path.key)
            if approval is not None:
                self._decide(connection, run, flow, current, approval, value, why, data)
            else:
                self._send(connection, run, current, touched, path, value, why, data)

    def decide(self, run: bytes, decision: Any, why: str = "", node: str | None = None) -> str:
        """Decide the approval for which a run waits, and return its key. `node` names an approval in advance."""
        data = self._encoded(node or "approval", decision, why)
        with self._connections.changing(f"decision {decision!r:.60} was stored") as connection:
            flow, approvals = _approvals(connection, run)
            if node is not None and not (approvals := [candidate for candidate in approvals if candidate.node == node]):
                found = flow_runs.flow_of(connection, run)
                raise NotFound(f"Flow {found[0] if found else ''!r} has no approval {node!r}.")
            current = _lock_run(connection, run, approvals)
            approval = approvals[0] if node is not None else _awaited_approval(current.state, approvals)
            if approval is None:
                view = reads.show(connection, run)
                awaited = (view and reads.waiting_for(view)) or "nothing"
                raise WrongState(
                    f"Run {to_text(run)} is not waiting for an approval: it is at "
                    f"{current.state.cursor or 'no node'!r} and waits for "
                    f"{awaited}.{_last_decision(connection, run)} To decide a later approval in advance, name "
                    "its node."
                )
            self._decide(connection, run, flow, current, approval, decision, why, data)
        return approval.address

    def _send(
        self,
        connection: Connection,
        run: bytes,
        current: Standing,
        touched: list[_Approval],
        path: Path,
        value: Any,
        why: str,
        data: bytes,
    ) -> None:
        """Write a value into the shared state of a run."""
        for approval in touched:
            if _overlaps(approval, path):
                raise ExpressionError(
                    f"Signal {path.key!r} would overwrite the decision of approval {approval.node!r}, which is "
                    f"stored at {approval.address!r}. Approve or reject that, or send {approval.address!r}."
                )
        write({**current.state.shared}, path.key, value)  # raises if the value cannot be stored there
        self._add(connection, run, current, f"$shared.{path.key}", data)
        detail = {"key": path.key, "node": current.state.cursor} | ({"why": why} if why else {})
        self._connections.record(connection, "signal", "run", to_text(run), **detail)

    def _decide(
        self,
        connection: Connection,
        run: bytes,
        flow: Flow,
        current: Standing,
        approval: _Approval,
        value: Any,
        why: str,
        data: bytes,
    ) -> None:
        """Decide an approval. Refuse if it is decided, or if a decision is waiting for the leader."""
        decision = check_decision(flow, approval.node, value)
        prefix = f"Approval {approval.address!r} of run {to_text(run)} is decided already"
        by, at, reason = current.state.deciders.get(approval.address, ("", 0.0, ""))
        if at and not by:
            raise WrongState(f"{prefix}, by the data of the run at {_moment(at)}.")
        if at or approval.address in current.pending_keys:
            logged = audit.decision(connection, to_text(run), approval.address)
            fallback = f"decided by {by} at {_moment(at)}{f' ({reason})' if reason else ''}" if at else "a moment ago"
            raise WrongState(f"{prefix}: {logged or fallback}.")
        self._add(connection, run, current, approval.address, data)
        act = decision if decision in (APPROVED, REJECTED) else "decide"
        detail = {"key": approval.address, "node": approval.node, "decision": decision} | ({"why": why} if why else {})
        self._connections.record(connection, act, "run", to_text(run), **detail)

    def _add(self, connection: Connection, run: bytes, current: Standing, key: str, data: bytes) -> None:
        _check_room(connection, run, current.state, key, len(data), self._limit)
        body = stored_json({"key": key, "value": base64.b64encode(data).decode()})
        inbox.add(connection, RequestKind.FLOW_SIGNAL, run, body)

    def _encoded(self, key: str, value: Any, why: str) -> bytes:
        for text in (key, why):
            if problem := unstorable(text):
                raise PayloadError(f"Signal {key!r} cannot be kept: {problem}.")
        return encode_value([value, acting.current(self._settings.audit_as).who, why], f"Signal {key!r}", self._limit)


def _check_room(connection: Connection, run: bytes, state: FlowState, key: str, size: int, max_payload: int) -> None:
    """Refuse a signal that exceeds the limit of the run's state, which keeps all signals."""
    limit = _SIGNAL_PAYLOADS * max_payload
    total = flow_runs.stored_size(connection, run) + 2 * size
    name = parse(key).key
    if total > limit:
        previous = state.signals.get(name)
        total -= 2 * len(timezones.encode(previous)) if previous is not None else 0
    if total > limit:
        raise StateTooLarge(
            f"Signal {name!r} cannot be kept: run {to_text(run)} would keep {total:,} bytes in its shared "
            f"state, and signals may fill it up to {limit:,}. Send less, or send null under keys that no node "
            f"waits for; or raise the setting max_payload, of which the limit is {_SIGNAL_PAYLOADS} times as "
            "much."
        )


def _last_decision(connection: Connection, run: bytes) -> str:
    """Return a sentence about the last decision of a run, for a message; empty if there is none."""
    decision = audit.decision(connection, to_text(run))
    return "" if decision is None else f" Approval {decision}."


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _approvals(connection: Connection, run: bytes) -> tuple[Flow, list[_Approval]]:
    version = flow_runs.flow_of(connection, run)
    stored = None if version is None else flow_runs.read(connection, *version)
    if stored is None:
        raise NotFound(f"No run of a flow has the id {to_text(run)}.")
    return stored.flow, [_Approval(*approval) for approval in approvals(stored.flow)]


def _lock_run(connection: Connection, run: bytes, known_approvals: list[_Approval]) -> Standing:
    """Lock a run and return its status. Refuse a run that accepts no more signals."""
    current = flow_runs.lock_and_read(connection, run, [approval.address for approval in known_approvals])
    reason = ""
    if current.status in ENDED_RUN_STATES:
        reason = f"it is in state {current.status!r}"
    elif current.is_cancelling:
        reason = "it is being cancelled"
    elif current.state.is_over:
        reason = "it has ended"
    if reason:
        raise WrongState(f"Run {to_text(run)} accepts no more signals: {reason}.{_last_decision(connection, run)}")
    return current


def _awaited_approval(state: FlowState, approvals: list[_Approval]) -> _Approval | None:
    if not isinstance(state.work, Wait) or state.work.what != "signal":
        return None
    return next((approval for approval in approvals if approval.node == state.cursor), None)


def _approval_for(current: Standing, approvals: list[_Approval], key: str) -> _Approval | None:
    """Return the approval that a signal decides: the awaited one, one with this key, or a decided one; else None."""
    work, state = current.state.work, current.state
    awaited = _awaited_approval(state, approvals)
    if awaited is not None and key in (awaited.address, awaited.local):
        return awaited
    if (named := next((approval for approval in approvals if key == approval.address), None)) is not None:
        return named
    if isinstance(work, Wait) and work.key == key:
        return None
    decided = current.pending_keys | state.deciders.keys()
    return next((approval for approval in approvals if key == approval.local and approval.address in decided), None)


def _overlaps(approval: _Approval, path: Path) -> bool:
    """Return whether a signal would overwrite the decision of an approval, or a part of it, in the shared state."""
    if "/" in approval.node:
        return False
    own = parse(approval.address).parts
    shorter = min(len(own), len(path.parts))
    return own[:shorter] == path.parts[:shorter]
