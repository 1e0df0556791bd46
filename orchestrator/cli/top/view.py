"""The state of the screen, and how each key changes it. Pure: no terminal, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from orchestrator.cli.top.sampling import QueueNow, Snapshot


class Panel(Enum):
    """The lists of the screen. The lower ones have number keys."""

    QUEUES = "Queues"
    RUNNING = "Running"
    WORKERS = "Workers"
    FAILURES = "Failures"
    RUNS = "Runs"


_MANY_ROWS = 1_000_000
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10, "home": -_MANY_ROWS, "end": _MANY_ROWS}
"""Rows that each key moves."""
LOWER = (Panel.RUNNING, Panel.WORKERS, Panel.FAILURES, Panel.RUNS)

SORTS: dict[str, Callable[[QueueNow], object]] = {
    "ready": lambda queue: (-queue.ready, -(queue.oldest or 0), queue.queue),
    "age": lambda queue: (-(queue.oldest or 0), queue.queue),
    "rate": lambda queue: (-queue.rate, queue.queue),
    "failing": lambda queue: (-queue.failing, -queue.rate, queue.queue),
    "name": lambda queue: queue.queue,
}


class Action(NamedTuple):
    """Something to do outside the screen's state."""

    verb: str
    """`quit`, `pause`, `resume`, `cancel`, `cancel run`, `open` a task, `open run`."""
    target: str = ""


@dataclass
class Question:
    """A yes/no question; `y` performs the action."""

    text: str
    action: Action


@dataclass
class Sheet:
    """A text that is shown in place of the lists."""

    title: str
    lines: Sequence[str]
    top: int = 0


@dataclass
class View:
    """The state of the screen."""

    sort: str = "ready"
    matching: str = ""
    panel: Panel = Panel.RUNNING
    focus: Panel = Panel.QUEUES
    selected: dict[Panel, str] = field(default_factory=dict)
    """The name of the selected row of each list."""
    typing: str | None = None
    """The filter text while it is being typed."""
    question: Question | None = None
    sheet: Sheet | None = None
    frozen: bool = False
    message: str = ""
    """The result of the last action."""


def rows(view: View, panel: Panel, data: Snapshot) -> list[str]:
    """Return the names of a list's visible rows, in order."""
    if panel is Panel.QUEUES:
        return [queue.queue for queue in queues(view, data)]
    if panel is Panel.RUNNING:
        return [task.id for task in data.running if matches(view, task.name, task.queue, task.worker or "")]
    if panel is Panel.WORKERS:
        return [worker.id for worker in data.workers if matches(view, worker.id, *worker.queues)]
    if panel is Panel.FAILURES:
        return [group.key for group in data.failures if matches(view, group.name, group.kind, group.message)]
    return [str(run.id) for run in data.runs if matches(view, run.name, run.workflow or "")]


def queues(view: View, data: Snapshot) -> list[QueueNow]:
    """Return the queues that match the filter, sorted."""
    return sorted((queue for queue in data.queues if matches(view, queue.queue)), key=SORTS[view.sort])  # type: ignore[arg-type]


def matches(view: View, *names: str) -> bool:
    filter_text = view.matching.lower()
    return not filter_text or any(filter_text in word.lower() for word in names)


def press(view: View, key: str, data: Snapshot) -> Action | None:
    """Handle a key; return an action to perform outside the screen, if any."""
    if view.typing is not None:
        _edit_filter(view, key)
        return None
    if view.question is not None:
        question, view.question = view.question, None
        view.message = "" if key == "y" else "nothing changed"
        return question.action if key == "y" else None
    view.message = ""
    if view.sheet is not None:
        _scroll(view, view.sheet, key)
        return None
    if key in ("q", "escape"):
        if key == "escape" and view.matching:
            view.matching = ""
            return None
        return Action("quit")
    if key in _STEPS:
        _move(view, key, data)
    elif key in ("tab", "backtab"):
        view.focus = view.panel if view.focus is Panel.QUEUES else Panel.QUEUES
    elif key in ("left", "right", "<", ">"):
        index = LOWER.index(view.panel) + (1 if key in ("right", ">") else -1)
        _show_panel(view, LOWER[index % len(LOWER)])
    elif key in ("1", "2", "3", "4"):
        _show_panel(view, LOWER[int(key) - 1])
    elif key == "s":
        names = list(SORTS)
        view.sort = names[(names.index(view.sort) + 1) % len(names)]
    elif key == "/":
        view.typing = view.matching
    elif key == "space":
        view.frozen = not view.frozen
    elif key in ("?", "h"):
        view.sheet = Sheet("Keys", HELP)
    elif key == "p":
        _ask_to_pause(view, data)
    elif key == "c":
        _ask_to_cancel(view, data)
    elif key == "enter":
        return _open_selected(view, data)
    return None


def selected_row(view: View, panel: Panel, data: Snapshot) -> str | None:
    """Return the name of a list's selected row, or of the first row if that one is gone."""
    names = rows(view, panel, data)
    selected = view.selected.get(panel)
    return selected if selected in names else (names[0] if names else None)


def _show_panel(view: View, panel: Panel) -> None:
    if view.focus is not Panel.QUEUES:
        view.focus = panel
    view.panel = panel


def _move(view: View, key: str, data: Snapshot) -> None:
    names = rows(view, view.focus, data)
    if not names:
        return
    index = names.index(selected_row(view, view.focus, data) or names[0])
    steps = {
        "up": -1,
        "k": -1,
        "down": 1,
        "j": 1,
        "pageup": -10,
        "pagedown": 10,
        "home": -len(names),
        "end": len(names),
    }
    view.selected[view.focus] = names[max(0, min(len(names) - 1, index + steps[key]))]


def _edit_filter(view: View, key: str) -> None:
    typed = view.typing or ""
    if key == "enter":
        view.typing = None
    elif key == "escape":
        view.typing, view.matching = None, ""
    elif key == "backspace":
        view.typing = view.matching = typed[:-1]
    elif key == "space" or len(key) == 1:
        view.typing = view.matching = (typed + (" " if key == "space" else key))[:40]


def _scroll(view: View, sheet: Sheet, key: str) -> None:
    if key in _STEPS:
        sheet.top = max(0, sheet.top + _STEPS[key])  # the end is known only when the sheet is drawn
    elif key in ("q", "escape", "enter", "?", "h"):
        view.sheet = None


def _ask_to_pause(view: View, data: Snapshot) -> None:
    name = selected_row(view, Panel.QUEUES, data)
    queue = next((queue for queue in data.queues if queue.queue == name), None)
    if queue is None:
        view.message = "there is no queue to pause"
    elif queue.paused:
        view.question = Question(f"Resume queue {queue.queue}?", Action("resume", queue.queue))
    else:
        view.question = Question(f"Pause queue {queue.queue}? Running tasks continue.", Action("pause", queue.queue))


def _ask_to_cancel(view: View, data: Snapshot) -> None:
    panel = view.panel if view.focus is Panel.QUEUES else view.focus
    name = selected_row(view, panel, data)
    if panel is Panel.RUNNING and name is not None:
        task = next(task for task in data.running if task.id == name)
        view.question = Question(f"Cancel task {task.name} {task.id}?", Action("cancel", task.id))
    elif panel is Panel.RUNS and name is not None:
        run = next(run for run in data.runs if str(run.id) == name)
        view.question = Question(f"Cancel run {run.name} {run.id} and all its tasks?", Action("cancel run", name))
    else:
        view.message = "select a running task (1) or a run (4) to cancel"


def _open_selected(view: View, data: Snapshot) -> Action | None:
    panel = view.panel if view.focus is Panel.QUEUES else view.focus
    name = selected_row(view, panel, data)
    if name is None:
        return None
    if panel is Panel.RUNNING:
        return Action("open", name)
    if panel is Panel.RUNS:
        return Action("open run", name)
    if panel is Panel.FAILURES:
        return Action("open", next(group.latest for group in data.failures if group.key == name))
    worker = next(worker for worker in data.workers if worker.id == name)
    runs = [f"{task.name} {task.id}  {task.seconds:.1f}s" for task in data.running if task.worker == worker.id]
    view.sheet = Sheet(f"Worker {worker.id}", [f"queues  {', '.join(worker.queues)}", "", *(runs or ["runs nothing"])])
    return None


HELP = (
    "up down, j k       move; page up and down, home and end too",
    "tab                between the queues and the list below",
    "1 2 3 4, < >       running tasks, workers, failures, runs",
    "enter              open the task, the run, the latest failure, the worker",
    "s                  sort the queues: ready, age, rate, failing, name",
    "/                  show only names that contain this; escape ends that",
    "p                  pause or resume the queue, after confirmation",
    "c                  cancel the task or the run, after confirmation",
    "space              freeze the screen",
    "q, Ctrl-C          quit",
)
