"""How much may be sent to a run of a flow, which keeps all of it."""

from __future__ import annotations

from sqlalchemy import Connection

from orchestrator.domain import timezones
from orchestrator.domain.flow.paths import parse
from orchestrator.domain.flow.state import FlowState
from orchestrator.domain.ids import to_text
from orchestrator.errors import StateTooLarge
from orchestrator.store.flow import runs

_STATES = 3
"""Signals may fill a run's state up to so many payloads; the rest of the four that it may have is for its nodes."""


def check_room(connection: Connection, run: bytes, state: FlowState, key: str, size: int, max_payload: int) -> None:
    """Refuse a signal that a run has no room for, whether or not somebody waits for it."""
    most = _STATES * max_payload
    keeps = runs.keeps(connection, run) + 2 * size
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
