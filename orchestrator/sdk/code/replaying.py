"""Checking code against a history, without running anything; and events with their stored values read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.history import EndRecord, Event
from orchestrator.domain.sealed import changed
from orchestrator.errors import InvalidWorkflow
from orchestrator.payloads.keeping import read_encoded
from orchestrator.references import whole_reference
from orchestrator.sdk.code.live_run import LiveRun
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.code.workflow_class import workflow_of

_NEVER_SHOWN = get_args(EndRecord)
"""How a run ended: code never sees it, and only an exact comparison reads it."""


def replay(
    workflow: CodeWorkflow[..., Any] | type[Any],
    history: Recording | str | Path,
    *,
    strict: bool = False,
    exactly: bool = False,
    in_order: bool = False,
) -> list[Command]:
    """Run a workflow's code against the history of a run; return all its commands.

    `history` is a recording, its JSON, or a file with that; what it names in the payload store is read there. Raise
    DeterminismViolation where the code no longer fits; with `strict`, also where it lacks a command of the history;
    with `exactly`, also where its result, its state, the length of a timer or what it continues with is another;
    with `in_order`, also where commands of different kinds have changed places, such as a task and a timer. A live run
    goes on with such code.
    """
    workflow = _registered(workflow)
    recording = history if isinstance(history, Recording) else Recording.from_json(history)
    settings = workflow._client.settings
    flow = LiveRun(workflow, recording.run_id, settings.max_payload, settings.largest_value)
    ledger = flow.commander.ledger
    trace = ledger.trace = []
    ledger.exactly = exactly
    ledger.in_order = in_order
    try:
        flow.advance([read_event(event, everything=exactly) for event in recording.events], whole=True)
        if ledger.end is not None and not flow.commander.ended:
            ledger.violate(
                len(recording.events),
                "RunEndMismatch",
                f"Run end mismatch: history has {type(ledger.end).__name__} and the code still waits for "
                f"{flow.commander.waiting_for() or 'a signal'}.",
            )
        if strict or exactly:
            ledger.check_met()
    finally:
        flow.close()
    return trace


def _registered(given: object) -> CodeWorkflow[..., Any]:
    workflow = workflow_of(given)
    if not isinstance(workflow, CodeWorkflow):
        raise InvalidWorkflow(f"replay: expected a workflow or a class below @app.workflow, found {given!r:.100}.")
    return workflow


def read_event(event: Event, *, everything: bool = False) -> Event:
    """Return an event whose stored values have been read: code must not meet an outage in the middle of a turn."""
    if isinstance(event.what, _NEVER_SHOWN) and not everything:
        return event
    what = changed(event.what, _content, lambda error: error)
    return event if what is event.what else Event(event.number, event.at, what)


def _content(_: bytes, data: bytes) -> bytes:
    stored = whole_reference(data)
    return data if stored is None else read_encoded(stored)
