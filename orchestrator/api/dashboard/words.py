"""Filters and functions for templates: states with signs, ages, numbers, values as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from markupsafe import Markup, escape

from orchestrator.domain.dag.composed import is_composed
from orchestrator.domain.fleet.announced import count_known
from orchestrator.domain.states import TaskState
from orchestrator.monitoring.times import ago, counted, duration, present, size
from orchestrator.monitoring.trouble import STOPPING
from orchestrator.sdk.values.display import as_display_json
from orchestrator.store.insights import Overview, QueueCounts, RunView, TaskView
from orchestrator.terminal_safe import terminal_safe, without_styles
from orchestrator.workers.parent.processes import format_memory

__all__ = ["FILTERS", "STOPPING", "is_composed", "present"]

_SIGNS = {
    "success": "✓",
    "failed": "✗",
    "running": "●",
    "open": "●",
    "live": "●",
    "dispatched": "◐",
    "draining": "◐",
    "pending": "○",
    "waiting": "○",
    "cancelled": "⊘",
    "terminated": "⊘",
    "skipped": "↷",
    "lost": "✗",
    "missed": "!",
    "dead": "✗",
    "still": "‖",
    "paused": "‖",
    "stuck": "!",
    "postponed": "○",
    "returned": "○",
}
_BACKFILL = re.compile(r"(.+)#([0-9]+)")
_EPOCH = datetime.fromtimestamp(0, UTC)
_CHANGE = 3
"""The difference in failures that counts as a trend."""
LONG = 300
"""Characters of a message beyond which a page shows it in full only once, in the traceback."""
_MAX_VALUE_LENGTH = 20_000
"""Characters of a value that a page shows, at most."""


def sign(state: str) -> str:
    """Return the sign of a state, so that it can be recognized without color."""
    return _SIGNS.get(state, "·")


def age(moment: datetime | None, now: datetime | None = None) -> str:
    return ago(moment, now or present())


def exact(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def instant(moment: datetime) -> int:
    """Return a moment in microseconds since 1970, for comparison."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def day(moment: datetime) -> str:
    """Return the date of a moment in its time zone, with the time unless that is midnight."""
    return f"{moment:%Y-%m-%d}" if (moment.hour, moment.minute) == (0, 0) else f"{moment:%Y-%m-%d %H:%M}"


def fire_time(moment: datetime) -> str:
    """Return a fire time, with seconds unless they are zero."""
    return f"{moment:%Y-%m-%d %H:%M:%S}" if moment.second else f"{moment:%Y-%m-%d %H:%M}"


def between(start: datetime | None, end: datetime | None) -> float | None:
    """Return the seconds between two moments; None if one of them is unknown."""
    return None if start is None or end is None else (end - start).total_seconds()


def earlier(moment: datetime, seconds: float) -> datetime:
    return moment - timedelta(seconds=seconds)


def short(id: object) -> str:
    """Return the last characters of an id, which distinguish ids in a list."""
    return str(id)[-8:]


def waking(task: TaskView) -> str:
    """Return what happens to a pending task at its `wake_at`: `fails` or `due`; empty if that is of no interest."""
    if task.status != TaskState.PENDING or task.wake_at is None or (task.hold or "").startswith("crowded"):
        return ""
    return "fails" if task.hold else "due"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def standing(queue: QueueCounts, *states: str) -> str:
    """Return the number of a queue's tasks in some states, with a plus if not all were counted."""
    return _at_least(sum(getattr(queue, kind) for kind in states), states, queue.least)


def open_tasks(overview: Overview, *states: str) -> str:
    """Return the number of open tasks in some states, over all queues."""
    return _at_least(sum(overview.open[kind] for kind in states), states, overview.open_least)


def _at_least(count: int, states: Sequence[str], least: Sequence[str]) -> str:
    return f"{count:,}+" if count and not {*states}.isdisjoint(least) else f"{count:,}"


def trend(counts: Sequence[int]) -> str:
    """Return the trend of counts over equal intervals: the last quarter compared with the quarter before.

    Empty if all counts are in the last quarter, because there is nothing to compare with.
    """
    quarter = len(counts) // 4
    recent, previous = sum(counts[-quarter:]), sum(counts[-2 * quarter : -quarter])
    if recent == sum(counts):
        return ""
    if not recent:
        return "stopped"
    if abs(recent - previous) < _CHANGE:
        return "steady"
    return "rising" if recent > 1.5 * previous else "falling" if 1.5 * recent < previous else "steady"


def rate(value: float) -> str:
    """Return a rate per second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.05 or not value else f"{value:.2f}"


def data(value: Any) -> str:
    """Return a value as indented JSON; very long text is cut."""
    written = msgspec.json.encode(value)
    if b"null" in written:  # NaN is encoded as null
        written = msgspec.json.encode(as_display_json(value))
    text = msgspec.json.format(written, indent=2).decode()
    if len(text) <= _MAX_VALUE_LENGTH:
        return terminal_safe(text)
    return terminal_safe(text[:_MAX_VALUE_LENGTH]) + f"\n… {len(text) - _MAX_VALUE_LENGTH:,} more characters"


def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return arguments in one line, as in a call."""
    parts = [_inline(value) for value in args] + [f"{name}={_inline(value)}" for name, value in kwargs.items()]
    return ", ".join(parts)


def _inline(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:80]}…"


def address(*parts: object) -> str:
    """Return the path of a page from its segments."""
    return "/".join(("/ui", *(quote(str(part), safe="") for part in parts)))


def run_name(run: RunView) -> str:
    """Return the display name of a run: its workflow's name, or its own name for a composition."""
    return run.name if is_composed(run.workflow) else run.workflow or run.name


def series(text: str) -> tuple[str, str]:
    """Return the schedule of a run, and the number of the backfill that started it, if any."""
    found = _BACKFILL.fullmatch(text)
    return (found[1], found[2]) if found else (text, "")


def with_query(path: str, values: Mapping[str, Any]) -> str:
    """Return a URL with the non-empty query parameters."""
    params = [
        (name, item)
        for name, value in values.items()
        for item in (value if isinstance(value, (list, tuple)) else [value])
        if item not in (None, "", False)
    ]
    return f"{path}?{urlencode(params)}" if params else path


def plain(text: str | None) -> str:
    """Return text without characters that a page cannot show, and without terminal colors."""
    return without_styles(text or "")


def headline(message: str) -> str:
    """Return an error message without the remote traceback that it may contain."""
    return message.partition("\n\nRemote traceback:")[0]


_TASK = re.compile(r"\btask ([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b")


def linked(text: str) -> Markup:
    """Return text in which ids of tasks are shortened and linked."""
    link = r'task <a class="mono" href="/ui/tasks/\1">%s</a>'
    return Markup(_TASK.sub(lambda found: found.expand(link % short(found[1])), str(escape(plain(text)))))


_MOMENT = re.compile(r"\b(\d{4}-\d\d-\d\d) (\d\d:\d\d(?::\d\d)?) UTC\b")


def timed(text: str) -> Markup:
    """Return text in which times are shown in the reader's time zone."""
    moment = r'<time datetime="\1T\2Z" data-moment>\g<0></time>'
    return Markup(_MOMENT.sub(moment, str(escape(plain(text)))))


_FRAME = re.compile(
    r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?\n(?:    .*\n?)*', re.MULTILINE
)
_POINTERS = re.compile(r"^[ ~]*\^[ ~^]*$", re.MULTILINE)
_FOREIGN = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3[.\d]*|orchestrator)[/\\]|^<")
"""Matches paths of files that are not the user's: libraries, Python itself, and this package."""


def _last_own_frame(text: str) -> re.Match[str] | None:
    """Return the last frame of a traceback in the user's own code."""
    return next((frame for frame in reversed([*_FRAME.finditer(text)]) if not _FOREIGN.search(frame["file"])), None)


def own_frame(text: str) -> str:
    """Return the location of the last frame in the user's own code; empty if there is none."""
    found = _last_own_frame(text)
    if found is None:
        return ""
    file = found["file"].replace("\\", "/").rpartition("/")[2]
    return f"{file}:{found['line']} in {found['name']}" if found["name"] else f"{file}:{found['line']}"


def traceback(text: str) -> Markup:
    """Return a traceback with the last frame of the user's own code marked."""
    found = _last_own_frame(text)
    if found is None:
        return _frames(text)
    own = found[0].rstrip("\n")  # the mark is a block, after which a new line begins
    before, after = text[: found.start()], text[found.start() + len(own) :].removeprefix("\n")
    return Markup("{}<mark>{}</mark>{}").format(*map(_frames, (before, own, after)))


def _frames(text: str) -> Markup:
    """Return a part of a traceback. Lines with only markers are kept from wrapping."""
    return Markup(_POINTERS.sub(r'<span class="pointers">\g<0></span>', str(escape(without_styles(text)))))


FILTERS = {
    "sign": sign,
    "age": age,
    "exact": exact,
    "day": day,
    "short": short,
    "number": number,
    "rate": rate,
    "size": size,
    "memory": format_memory,
    "data": data,
    "duration": duration,
    "counted": counted,
    "known": count_known,
    "plain": plain,
    "linked": linked,
    "timed": timed,
    "headline": headline,
}
