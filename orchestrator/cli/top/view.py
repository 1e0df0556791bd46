"""What the person at the keyboard has chosen, and what a key changes about it. No terminal, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from orchestrator.cli.top.sampling import QueueNow, Snapshot


class Panel(Enum):
    """What is listed; each has a number key."""

    QUEUES = "Queues"
    RUNNING = "Running"
    WORKERS = "Workers"
    FAILURES = "Failures"
    RUNS = "Runs"


_FAR = 1_000_000
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10, "home": -_FAR, "end": _FAR}
"""How far each key moves."""
LOWER = (Panel.RUNNING, Panel.WORKERS, Panel.FAILURES, Panel.RUNS)

SORTS: dict[str, Callable[[QueueNow], object]] = {
    "ready": lambda queue: (-queue.ready, -(queue.oldest or 0), queue.queue),
    "age": lambda queue: (-(queue.oldest or 0), queue.queue),
    "rate": lambda queue: (-queue.rate, queue.queue),
    "failing": lambda queue: (-queue.failing, -queue.rate, queue.queue),
    "name": lambda queue: queue.queue,
}


class Deed(NamedTuple):
    """Something to be done that is not the screen's business."""

    verb: str
    """`quit`, `pause`, `resume`, `cancel`, `cancel run`, `open` a task, `open run`."""
    target: str = ""


@dataclass
class Question:
    """Something that is done only if the answer is y."""

    text: str
    deed: Deed


@dataclass
class Sheet:
    """Something that is read in place of the lists."""

    title: str
    lines: Sequence[str]
    top: int = 0


@dataclass
class View:
    """Where the eyes are."""

    sort: str = "ready"
    matching: str = ""
    panel: Panel = Panel.RUNNING
    focus: Panel = Panel.QUEUES
    selected: dict[Panel, str] = field(default_factory=dict)
    """In each list, which row."""
    typing: str | None = None
    """What has been typed of a filter."""
    question: Question | None = None
    sheet: Sheet | None = None
    frozen: bool = False
    said: str = ""
    """The last thing that was done, or went wrong."""


def rows(view: View, panel: Panel, found: Snapshot) -> list[str]:
    """Return the names of the rows of a list, in their order."""
    if panel is Panel.QUEUES:
        return [queue.queue for queue in queues(view, found)]
    if panel is Panel.RUNNING:
        return [task.id for task in found.running if matches(view, task.name, task.queue, task.worker or "")]
    if panel is Panel.WORKERS:
        return [worker.id for worker in found.workers if matches(view, worker.id, *worker.queues)]
    if panel is Panel.FAILURES:
        return [one.key for one in found.failures if matches(view, one.name, one.kind, one.message)]
    return [str(run.id) for run in found.runs if matches(view, run.name, run.workflow or "")]


def queues(view: View, found: Snapshot) -> list[QueueNow]:
    """Return the queues that are wanted, in the order that is."""
    return sorted((queue for queue in found.queues if matches(view, queue.queue)), key=SORTS[view.sort])  # type: ignore[arg-type]


def matches(view: View, *words: str) -> bool:
    wanted = view.matching.lower()
    return not wanted or any(wanted in word.lower() for word in words)


def press(view: View, key: str, found: Snapshot) -> Deed | None:
    """Do what a key stands for; return what is to be done beyond the screen."""
    if view.typing is not None:
        _type(view, key)
        return None
    if view.question is not None:
        question, view.question = view.question, None
        view.said = "" if key == "y" else "left as it is"
        return question.deed if key == "y" else None
    view.said = ""
    if view.sheet is not None:
        _read(view, view.sheet, key)
        return None
    if key in ("q", "escape"):
        if key == "escape" and view.matching:
            view.matching = ""
            return None
        return Deed("quit")
    if key in _STEPS:
        _move(view, key, found)
    elif key in ("tab", "backtab"):
        view.focus = view.panel if view.focus is Panel.QUEUES else Panel.QUEUES
    elif key in ("left", "right", "<", ">"):
        place = LOWER.index(view.panel) + (1 if key in ("right", ">") else -1)
        _turn_to(view, LOWER[place % len(LOWER)])
    elif key in ("1", "2", "3", "4"):
        _turn_to(view, LOWER[int(key) - 1])
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
        _ask_to_pause(view, found)
    elif key == "c":
        _ask_to_cancel(view, found)
    elif key == "enter":
        return _opened(view, found)
    return None


def chosen(view: View, panel: Panel, found: Snapshot) -> str | None:
    """Return the row that is selected; the first, where that one is gone."""
    names = rows(view, panel, found)
    wanted = view.selected.get(panel)
    return wanted if wanted in names else (names[0] if names else None)


def _turn_to(view: View, panel: Panel) -> None:
    if view.focus is not Panel.QUEUES:
        view.focus = panel
    view.panel = panel


def _move(view: View, key: str, found: Snapshot) -> None:
    names = rows(view, view.focus, found)
    if not names:
        return
    place = names.index(chosen(view, view.focus, found) or names[0])
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
    view.selected[view.focus] = names[max(0, min(len(names) - 1, place + steps[key]))]


def _type(view: View, key: str) -> None:
    typed = view.typing or ""
    if key == "enter":
        view.typing = None
    elif key == "escape":
        view.typing, view.matching = None, ""
    elif key == "backspace":
        view.typing = view.matching = typed[:-1]
    elif key == "space" or len(key) == 1:
        view.typing = view.matching = (typed + (" " if key == "space" else key))[:40]


def _read(view: View, sheet: Sheet, key: str) -> None:
    if key in _STEPS:
        sheet.top = max(0, sheet.top + _STEPS[key])  # and no further than its end, which is known when it is drawn
    elif key in ("q", "escape", "enter", "?", "h"):
        view.sheet = None


def _ask_to_pause(view: View, found: Snapshot) -> None:
    name = chosen(view, Panel.QUEUES, found)
    queue = next((queue for queue in found.queues if queue.queue == name), None)
    if queue is None:
        view.said = "there is no queue to pause"
    elif queue.paused:
        view.question = Question(f"Resume queue {queue.queue}?", Deed("resume", queue.queue))
    else:
        view.question = Question(f"Pause queue {queue.queue}? What runs goes on.", Deed("pause", queue.queue))


def _ask_to_cancel(view: View, found: Snapshot) -> None:
    panel = view.panel if view.focus is Panel.QUEUES else view.focus
    name = chosen(view, panel, found)
    if panel is Panel.RUNNING and name is not None:
        task = next(task for task in found.running if task.id == name)
        view.question = Question(f"Cancel task {task.name} {task.id}?", Deed("cancel", task.id))
    elif panel is Panel.RUNS and name is not None:
        run = next(run for run in found.runs if str(run.id) == name)
        view.question = Question(f"Cancel run {run.name} {run.id} and all its tasks?", Deed("cancel run", name))
    else:
        view.said = "select a running task (1) or a run (4) to cancel"


def _opened(view: View, found: Snapshot) -> Deed | None:
    panel = view.panel if view.focus is Panel.QUEUES else view.focus
    name = chosen(view, panel, found)
    if name is None:
        return None
    if panel is Panel.RUNNING:
        return Deed("open", name)
    if panel is Panel.RUNS:
        return Deed("open run", name)
    if panel is Panel.FAILURES:
        return Deed("open", next(one.latest for one in found.failures if one.key == name))
    worker = next(worker for worker in found.workers if worker.id == name)
    does = [f"{task.name} {task.id}  {task.seconds:.1f}s" for task in found.running if task.worker == worker.id]
    view.sheet = Sheet(f"Worker {worker.id}", [f"queues  {', '.join(worker.queues)}", "", *(does or ["runs nothing"])])
    return None


HELP = (
    "up down, j k       move; page up and down, home and end too",
    "tab                between the queues and the list below",
    "1 2 3 4, < >       running tasks, workers, failures, runs",
    "enter              open the task, the run, the latest failure, the worker",
    "s                  sort the queues: ready, age, rate, failing, name",
    "/                  show only what has this in its name; escape ends that",
    "p                  pause or resume the queue, after a question",
    "c                  cancel the task or the run, after a question",
    "space              let the screen stand still",
    "q, Ctrl-C          quit",
)
