"""The history of a workflow as code, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from orchestrator.monitoring.times import duration


@dataclass(frozen=True)
class Sentence:
    """The sentence of one event."""

    number: int
    at: datetime
    kind: str
    tone: str
    """The state whose color and sign are shown, or empty."""
    text: str
    value: Any = None
    """The data of the event; None if there is none."""
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
"""Event types that are not shown."""


def story(events: Sequence[Mapping[str, Any]]) -> list[Sentence]:
    """Return the sentences of a history in order. The end of a task, timer or child names it."""
    names = {event["id"]: event.get("name") or event.get("workflow") or "" for event in events if event.get("id")}
    for event in events:
        if event.get("id") and (event.get("name") or event.get("workflow")):
            names[event["id"]] = event.get("name") or event.get("workflow")
    return [_sentence(event, names) for event in events if event["type"] not in _QUIET]


def _sentence(event: Mapping[str, Any], names: Mapping[str, str]) -> Sentence:
    kind = event["type"]
    error = event.get("error")
    data = event.get("result") or event.get("value") or event.get("payload")
    return Sentence(
        number=event["number"],
        at=datetime.fromisoformat(event["at"]),
        kind=kind.replace("_", " "),
        tone=_TONES.get(kind.rpartition("_")[2], ""),
        text=_text(kind, event, names.get(event.get("id") or "", "")),
        value=data["value"] if isinstance(data, dict) and "value" in data else None,
        error=f"{error['kind']}: {error['message']}" if error else "",
        link=_link(kind, event),
    )


_TEXTS = {
    "run_started": "The run started with version {version} of {workflow}.",
    "task_scheduled": "It scheduled the task {quoted}.",
    "timer_started": "It started a timer of {seconds}{named}.",
    "timer_fired": "The timer fired{named}.",
    "promise_created": "It created the promise {quoted}.",
    "promise_resolved": "The promise {quoted} was resolved.",
    "promise_rejected": "The promise {quoted} was rejected.",
    "child_started": "It started the workflow {quoted}.",
    "signal_received": "It received the signal “{name}”.",
    "signal_sent": "It sent the signal “{name}”.",
    "update_requested": "It received the update “{name}”.",
    "update_answered": "It answered the update.",
    "state_set": "It set “{key}”.",
    "state_cleared": "It cleared “{key}”.",
    "operation_recorded": "It ran “{name}” and recorded the result.",
    "patch_recorded": "It took the patched branch of “{name}”.",
    "run_reset": "It repeats another run up to event {to}{because}",
    "run_completed": "The run returned.",
    "run_failed": "The run failed.",
    "run_cancelled": "The run was cancelled.",
    "run_continued": "It continued as a new run.",
    "run_cancel_requested": "Its cancellation was requested.",
    "reopened": "Open items were requested again: {what}.",
}
_VERBS = {"completed": "returned", "failed": "failed", "cancelled": "was cancelled", "requested": "was asked to stop"}


def _text(kind: str, event: Mapping[str, Any], name: str) -> str:
    quoted = f"“{name}”" if name else ""
    if kind in _TEXTS:
        more = {
            "quoted": quoted,
            "named": f": {quoted}" if quoted else "",
            "seconds": duration(event.get("seconds")),
            "because": f": {event['reason']}" if event.get("reason") else ".",
        }
        return _TEXTS[kind].format_map({**event, **more})
    subject, _, verb = kind.rpartition("_")
    what = subject.removesuffix("_cancel").replace("_", " ")
    return f"The {what} {quoted} {_VERBS.get(verb, verb)}.".replace("  ", " ")


def _link(kind: str, event: Mapping[str, Any]) -> str:
    if kind.startswith("task_"):
        return f"/ui/tasks/{event['id']}"
    if kind.startswith("child_"):
        return f"/ui/runs/{event['id']}"
    return f"/ui/runs/{event['run']}" if kind == "run_reset" else ""
