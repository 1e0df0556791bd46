"""Checking code against a history, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.domain.code.commands import Command
from orchestrator.sdk.code.live_run import LiveRun
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.code.stored import read_event
from orchestrator.sdk.code.workflow import CodeWorkflow


def replay(
    workflow: CodeWorkflow[..., Any], history: Recording | str | Path, *, exactly: bool = False
) -> list[Command]:
    """Run a workflow's code against the history of a run; return all its commands.

    `history` is a recording, its JSON, or a file with that; what it names in the payload store is read there. Raise
    DeterminismViolation where the code no longer fits or, with `exactly`, where its result, its state, the length of a
    timer or what it continues with is another.
    """
    recording = history if isinstance(history, Recording) else Recording.from_json(history)
    settings = workflow._client.settings
    flow = LiveRun(workflow, recording.run_id, settings.max_payload, settings.largest_value)
    ledger = flow.commander.ledger
    trace = ledger.trace = []
    ledger.exactly = exactly
    try:
        flow.advance([read_event(event, everything=exactly) for event in recording.events], whole=True)
        if ledger.end is not None and not flow.commander.ended:
            ledger.violate(
                len(recording.events),
                "RunEndMismatch",
                f"Run end mismatch: history has {type(ledger.end).__name__} and the code still waits for "
                f"{flow.commander.waiting_for() or 'a signal'}.",
            )
    finally:
        flow.close()
    return trace
