"""The history of a run of code, told in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from orchestrator.monitoring.times import duration


@dataclass(frozen=True)
class Sentence:
    """One event."""

    number: int
    at: datetime
    kind: str
    """What it is called in the history."""
    tone: str
    """A state whose colour and sign it has, or nothing."""
    text: str
    value: Any = None
    """What came with it; None if nothing did."""
    error: str = ""
    link: str = ""


_TONES = {
    "completed": "success",
    "resolved": "success",
    "failed": "failed",
    "rejected": "failed",
    "cancelled": "cancelled",
}
_QUIET = ("activation_applied",)
"""Marks that say nothing to people."""


def story(events: Sequence[Mapping[str, Any]]) -> list[Sentence]:
    """Return what happened, in order; an end says of what it is the end."""
    names = {event["id"]: event.get("name") or event.get("workflow") or "" for event in events if event.get("id")}
    for event in events:
        if event.get("id") and (event.get("name") or event.get("workflow")):
            names[event["id"]] = event.get("name") or event.get("workflow")
    return [_sentence(event, names) for event in events if event["type"] not in _QUIET]


def _sentence(event: Mapping[str, Any], names: Mapping[str, str]) -> Sentence:
    kind = event["type"]
    error = event.get("error")
    held = event.get("result") or event.get("value") or event.get("payload")
    return Sentence(
        number=event["number"],
        at=datetime.fromisoformat(event["at"]),
        kind=kind.replace("_", " "),
        tone=_TONES.get(kind.rpartition("_")[2], ""),
        text=_text(kind, event, names.get(event.get("id") or "", "")),
        value=held["value"] if isinstance(held, dict) and "value" in held else None,
        error=f"{error['kind']}: {error['message']}" if error else "",
        link=_link(kind, event),
    )


def _text(kind: str, event: Mapping[str, Any], name: str) -> str:
    quoted = f"“{name}”" if name else ""
    match kind:
        case "run_started":
            return f"The run began with version {event['version']} of {event['workflow']}."
        case "task_scheduled":
            return f"It asked for the task {quoted}."
        case "timer_started":
            return f"It went to sleep for {duration(event['seconds'])}{f': {quoted}' if quoted else ''}."
        case "timer_fired":
            return f"It woke up{f': {quoted}' if quoted else ''}."
        case "promise_created":
            return f"It waits for somebody to resolve {quoted}."
        case "promise_resolved":
            return f"Somebody resolved {quoted}."
        case "promise_rejected":
            return f"Somebody rejected {quoted}."
        case "child_started":
            return f"It started the workflow {quoted}."
        case "signal_received":
            return f"The signal “{event['name']}” came."
        case "signal_sent":
            return f"It sent the signal “{event['name']}”."
        case "update_requested":
            return f"It was asked for the update “{event['name']}”."
        case "update_answered":
            return "It answered the update."
        case "state_set":
            return f"It set “{event['key']}”."
        case "state_cleared":
            return f"It cleared “{event['key']}”."
        case "operation_recorded":
            return f"It did “{event['name']}” and noted what came of it."
        case "patch_recorded":
            return f"It took the new branch of “{event['name']}”."
        case "run_reset":
            reason = f": {event['reason']}" if event.get("reason") else "."
            return f"It repeats another run up to event {event['to']}{reason}"
        case "run_completed":
            return "The run returned."
        case "run_failed":
            return "The run failed."
        case "run_cancelled":
            return "The run was cancelled."
        case "run_continued":
            return "It goes on in a new run."
        case "run_cancel_requested":
            return "Somebody asked it to cancel itself."
        case "reopened":
            return f"What was open is asked for again: {event['what']}."
    subject, _, verb = kind.rpartition("_")
    words = {"completed": "returned", "failed": "failed", "cancelled": "was cancelled", "requested": "is asked to stop"}
    return f"The {subject.removesuffix('_cancel').replace('_', ' ')} {quoted} {words.get(verb, verb)}.".replace(
        "  ", " "
    )


def _link(kind: str, event: Mapping[str, Any]) -> str:
    if kind.startswith("task_"):
        return f"/ui/tasks/{event['id']}"
    if kind.startswith("child_"):
        return f"/ui/runs/{event['id']}"
    return f"/ui/runs/{event['run']}" if kind == "run_reset" else ""
