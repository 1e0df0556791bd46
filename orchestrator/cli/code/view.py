"""Views of a run of a workflow as code: its call, its result, and what it waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from rich.console import Group
from rich.text import Text

from orchestrator.cli.runs.progress import watch_drawn
from orchestrator.cli.runs.view import headline
from orchestrator.cli.terminal.output import (
    as_json,
    call_of,
    call_text,
    data_text,
    echo,
    hidden,
    json_text,
    short_text,
    stored_value,
)
from orchestrator.domain.ids import successor_id
from orchestrator.domain.runs import CONTINUATION_REASONS
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.domain.tasks.task import error_text
from orchestrator.monitoring.times import when
from orchestrator.sdk.app import Orchestrator
from orchestrator.store.insights import CodeView, OpenView, ResetView, RunView
from orchestrator.terminal_safe import one_line

_TURN_TEXTS = {
    "ready": "a worker, to process new events",
    "unknown": "a worker that has its workflow: no live worker does",
    "running": "the end of its turn: its code is running",
}


def code_fields(run: RunView, code: CodeView, now: datetime) -> dict[str, str | None]:
    """Return the fields to print for a run of code, by title."""
    return {
        "call": call_text(run.workflow or run.name, code.payload),
        "reset of": None if code.reset is None else f"run {code.reset.run}, {repeated(code.reset)}",
        "result": None if code.result is None else short_text(stored_value(code.result)),
        "state": "\n".join(f"{key} = {short_text(value)}" for key, value in _state(code).items()),
        "waits for": "\n".join(waits(code, now)),
        "unseen messages": str(code.unseen) if code.unseen else None,
        "at": "\n".join(code.places),
    }


def _state(code: CodeView) -> dict[str, Any]:
    """Return the state that the code has published, redacted."""
    state: dict[str, Any] = hidden().redacted({key: stored_value(value) for key, value in code.state.items()})
    return state


def repeated(reset: ResetView) -> str:
    """Return which events a reset run repeats, and why."""
    return f"repeated up to its event {reset.to}{f': {reset.reason}' if reset.reason else ''}"


def code_document(code: CodeView) -> dict[str, Any]:
    """Return the run as JSON data, with the decoded `args` and `kwargs` in place of the payload."""
    document = {field.name: getattr(code, field.name) for field in dataclasses.fields(code)}
    arguments, keywords = call_of(document.pop("payload"))
    return document | {
        "args": as_json(arguments),
        "kwargs": as_json(keywords),
        "result": None if code.result is None else as_json(stored_value(code.result)),
        "state": as_json(_state(code)),
    }


def print_error(run: RunView, code: CodeView) -> None:
    """Print a failed run's error, with the traceback of its code."""
    error = code.error
    if error is None or run.status == RunState.CANCELLED:
        return
    echo(f"\nError: {error_text(error.kind, error.message)}")
    if error.data:
        echo(f"Its data: {json_text(error.data)}")
    if error.traceback:
        echo(f"\nTraceback of its code:\n{error.traceback.rstrip()}")


def waits(code: CodeView, now: datetime) -> list[str]:
    """Return what a run waits for, one line per item; nothing if it has ended."""
    if code.turn is None:
        return []
    return [
        *([_TURN_TEXTS[code.turn]] if code.turn in _TURN_TEXTS else []),
        *(_open_text(view, now) for view in code.waits_for),
        *(["and more of these"] if code.more else []),
        *(f"signal {name}" for name in code.signals),
        *(f"the end of update {name}" for name in code.updates),
    ]


def _open_text(view: OpenView, now: datetime) -> str:
    if view.kind == "timer":
        return f"timer {view.name} due {when(view.due, now)}".replace("  ", " ")
    if view.kind == "promise":
        return f"promise {view.name}"
    return f"{view.kind} {view.name} {view.id} ({view.status})"


# -- while one watches


def draw_code(run: RunView, code: CodeView, now: datetime, _height: int | None = None, _width: int = 0) -> Group:
    """Return the picture of a run for `runs watch`: its headline, what it waits for, and its code's position."""
    lines = [f"  waits for {one_line(line)}" for line in waits(code, now)]
    lines += [f"  at {one_line(position)}" for position in code.places]
    lines += [f"  {one_line(key)} = {data_text(value)}" for key, value in _state(code).items()]
    return Group(headline(run, now), *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))


def watch_code(app: Orchestrator, run: UUID, read: Callable[[UUID], tuple[RunView, CodeView]]) -> RunView:
    """Follow a run and its successors (continued as new) until the end, and print the result or the error."""
    while True:
        ended = watch_drawn(app.run(run), partial(read, run), draw_code, _ChangePrinter())
        if ended.reason not in CONTINUATION_REASONS:
            break
        run = UUID(bytes=successor_id(run.bytes))
        echo(f"It continues as run {run}.")
    _, code = read(run)
    if code.result is not None:
        echo(f"Result: {data_text(stored_value(code.result))}")
    print_error(ended, code)
    return ended


class _ChangePrinter:
    """Prints a line when the run has changed since the last call."""

    def __init__(self) -> None:
        self._printed = ""

    def __call__(self, run: RunView, code: CodeView, _now: datetime) -> None:
        open_ = [
            *(f"{view.kind} {view.name}".rstrip() for view in code.waits_for),
            *(f"signal {n}" for n in code.signals),
        ]
        line = f"{run.name} {run.total - run.open}/{run.total} {'stuck' if run.stuck else run.status}"
        if run.status not in ENDED_RUN_STATES and open_:
            line += f", waits for {', '.join(open_)}" + (f" at {code.places[0]}" if code.places else "")
        if line != self._printed:
            echo(one_line(line))
            self._printed = line
