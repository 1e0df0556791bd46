"""Signals and decisions for runs of flows. Each approval is decided once, whichever call or key the decision comes by.

The run's lock is held from the look at the run to the commit, so of many that decide at once one succeeds. The others
are refused, and the audit log has one line, which names the decision.
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

_STATES = 3
"""Signals may fill a run's state up to so many payloads; the rest of the four that it may have is for its nodes."""


class _Approval(NamedTuple):
    """An approval of a flow."""

    node: str
    """Its key, behind those of the nodes above it."""
    address: str
    """The key of its decision."""

    @property
    def local(self) -> str:
        """Return the key of its decision in the flow that it stands in."""
        return self.address[self.node.rfind("/") + 1 :]


class FlowSignals(Part):
    """Sends values to runs of flows."""

    def signal(self, run: bytes, key: str, value: Any, why: str = "") -> None:
        """Send a value to a run under a key; if that is the key of an approval, decide it."""
        path = parse(key)
        if path.root != "shared" or not path.parts:
            raise ExpressionError(
                f"Signal {key!r} cannot be sent: it is written into the shared state, such as `paid`."
            )
        data = self._encoded(path.key, value, why)
        with self._connections.changing(f"signal {key!r} was stored") as connection:
            flow, known = _approvals(connection, run)
            touched = [one for one in known if path.key in (one.address, one.local) or _overlaps(one, path)]
            standing = _standing(connection, run, touched)
            asked = _meant(standing, touched, path.key)
            if asked is not None:
                self._decide(connection, run, flow, standing, asked, value, why, data)
            else:
                self._send(connection, run, standing, touched, path, value, why, data)

    def decide(self, run: bytes, decision: Any, why: str = "", node: str | None = None) -> str:
        """Decide the approval for which a run waits; return its key. One that has not come yet must be named."""
        data = self._encoded(node or "approval", decision, why)
        with self._connections.changing(f"decision {decision!r:.60} was stored") as connection:
            flow, known = _approvals(connection, run)
            if node is not None and not (known := [one for one in known if one.node == node]):
                found = flow_runs.which(connection, run)
                raise NotFound(f"Flow {found[0] if found else ''!r} has no approval {node!r}.")
            standing = _standing(connection, run, known)
            asked = known[0] if node is not None else _asked(standing.state, known)
            if asked is None:
                view = reads.show(connection, run)
                waits = (view and reads.waiting_for(view)) or "nothing"
                raise WrongState(
                    f"Run {to_text(run)} waits for no approval: it stands at {standing.state.cursor or 'no node'!r} "
                    f"and waits for {waits}.{_last_decision(connection, run)} To decide one that is still to come, "
                    f"name its node."
                )
            self._decide(connection, run, flow, standing, asked, decision, why, data)
        return asked.address

    def _send(
        self,
        connection: Connection,
        run: bytes,
        standing: Standing,
        touched: list[_Approval],
        path: Path,
        value: Any,
        why: str,
        data: bytes,
    ) -> None:
        """Write a value into the shared state of a run."""
        for one in touched:
            if _overlaps(one, path):
                raise ExpressionError(
                    f"Signal {path.key!r} would write over the decision of approval {one.node!r}, which stands at "
                    f"{one.address!r}. Approve or reject that, or send {one.address!r}."
                )
        write({**standing.state.shared}, path.key, value)  # or it says why it cannot stand there
        self._add(connection, run, standing, f"$shared.{path.key}", data)
        detail = {"key": path.key, "node": standing.state.cursor} | ({"why": why} if why else {})
        self._connections.record(connection, "signal", "run", to_text(run), **detail)

    def _decide(
        self,
        connection: Connection,
        run: bytes,
        flow: Flow,
        standing: Standing,
        asked: _Approval,
        value: Any,
        why: str,
        data: bytes,
    ) -> None:
        """Decide an approval, unless it is decided: the leader has taken that over, or will."""
        said = check_decision(flow, asked.node, value)
        known = f"Approval {asked.address!r} of run {to_text(run)} is decided already"
        by, at, reason = standing.state.deciders.get(asked.address, ("", 0.0, ""))
        if at and not by:
            raise WrongState(f"{known}, by the data of the run at {_moment(at)}.")
        if at or asked.address in standing.under_way:
            logged = audit.decision(connection, to_text(run), asked.address)
            fallback = f"decided by {by} at {_moment(at)}{f' ({reason})' if reason else ''}" if at else "a moment ago"
            raise WrongState(f"{known}: {logged or fallback}.")
        self._add(connection, run, standing, asked.address, data)
        act = said if said in (APPROVED, REJECTED) else "decide"
        detail = {"key": asked.address, "node": asked.node, "decision": said} | ({"why": why} if why else {})
        self._connections.record(connection, act, "run", to_text(run), **detail)

    def _add(self, connection: Connection, run: bytes, standing: Standing, key: str, data: bytes) -> None:
        _check_room(connection, run, standing.state, key, len(data), self._limit)
        body = stored_json({"key": key, "value": base64.b64encode(data).decode()})
        inbox.add(connection, RequestKind.FLOW_SIGNAL, run, body)

    def _encoded(self, key: str, value: Any, why: str) -> bytes:
        for text in (key, why):
            if problem := unstorable(text):
                raise PayloadError(f"Signal {key!r} cannot be kept: {problem}.")
        return encode_value([value, acting.current(self._settings.audit_as).who, why], f"Signal {key!r}", self._limit)


def _check_room(connection: Connection, run: bytes, state: FlowState, key: str, size: int, max_payload: int) -> None:
    """Refuse a signal that a run has no room for: the run keeps all of them."""
    most = _STATES * max_payload
    keeps = flow_runs.keeps(connection, run) + 2 * size
    name = parse(key).key
    if keeps > most:
        before = state.signals.get(name)
        keeps -= 2 * len(timezones.encode(before)) if before is not None else 0
    if keeps > most:
        raise StateTooLarge(
            f"Signal {name!r} cannot be kept: run {to_text(run)} would keep {keeps:,} bytes in its shared state, and "
            f"signals may fill it up to {most:,}. Send less, or null under keys that nobody waits for; or raise the "
            f"setting max_payload, of which that is {_STATES} times as much."
        )


def _last_decision(connection: Connection, run: bytes) -> str:
    """Say in a sentence which approval of a run was decided last, by whom and how."""
    known = audit.decision(connection, to_text(run))
    return "" if known is None else f" Approval {known}."


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _approvals(connection: Connection, run: bytes) -> tuple[Flow, list[_Approval]]:
    """Return the flow of a run, and its approvals."""
    found = flow_runs.which(connection, run)
    stored = None if found is None else flow_runs.read(connection, *found)
    if stored is None:
        raise NotFound(f"No run of a flow has the id {to_text(run)}.")
    return stored.flow, [_Approval(*one) for one in approvals(stored.flow)]


def _standing(connection: Connection, run: bytes, known: list[_Approval]) -> Standing:
    """Return how a run stands, after taking its lock, or refuse one that takes no more signals."""
    standing = flow_runs.take_turn(connection, run, [one.address for one in known])
    why = ""
    if standing.status in ENDED_RUN_STATES:
        why = f"it is in state {standing.status!r}"
    elif standing.is_cancelling:
        why = "it is being cancelled"
    elif standing.state.is_over:
        why = "it has ended"
    if why:
        raise WrongState(f"Run {to_text(run)} hears nothing any more: {why}.{_last_decision(connection, run)}")
    return standing


def _asked(state: FlowState, known: list[_Approval]) -> _Approval | None:
    if not isinstance(state.work, Wait) or state.work.what != "signal":
        return None
    return next((one for one in known if one.node == state.cursor), None)


def _meant(standing: Standing, touched: list[_Approval], key: str) -> _Approval | None:
    """Return the approval that a signal is for: the one that asks now, the one of that key, or one that is decided."""
    work, state = standing.state.work, standing.state
    asked = _asked(state, touched)
    if asked is not None and key in (asked.address, asked.local):
        return asked
    if (named := next((one for one in touched if key == one.address), None)) is not None:
        return named
    if isinstance(work, Wait) and work.key == key:
        return None
    decided = standing.under_way | state.deciders.keys()
    return next((one for one in touched if key == one.local and one.address in decided), None)


def _overlaps(approval: _Approval, path: Path) -> bool:
    """Say whether a signal writes over the decision of an approval in the shared state of the run, or into it."""
    if "/" in approval.node:
        return False
    own = parse(approval.address).parts
    shorter = min(len(own), len(path.parts))
    return own[:shorter] == path.parts[:shorter]
