"""Filters and functions of the templates: states with a sign beside their colour, ages, numbers, values as data."""

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
from orchestrator.sdk.values.display import as_shown
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
"""Failures more or fewer that are called a trend."""
LONG = 300
"""Characters of a message that a page shows in full once, in the traceback, and shortened elsewhere."""
_LONGEST_VALUE = 20_000
"""Characters of a value that a page shows."""


def sign(state: str) -> str:
    """Return what a state is known by without its colour."""
    return _SIGNS.get(state, "·")


def age(moment: datetime | None, now: datetime | None = None) -> str:
    """Return how long ago something was."""
    return ago(moment, now or present())


def exact(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def instant(moment: datetime) -> int:
    """Return a moment in microseconds, to be compared."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def day(moment: datetime) -> str:
    """Return a day in the zone of a moment, with the time unless that is its beginning."""
    return f"{moment:%Y-%m-%d}" if (moment.hour, moment.minute) == (0, 0) else f"{moment:%Y-%m-%d %H:%M}"


def fire_time(moment: datetime) -> str:
    """Return when a schedule fired, with seconds unless they are zero."""
    return f"{moment:%Y-%m-%d %H:%M:%S}" if moment.second else f"{moment:%Y-%m-%d %H:%M}"


def between(start: datetime | None, end: datetime | None) -> float | None:
    """Return the seconds between two moments, where both are known."""
    return None if start is None or end is None else (end - start).total_seconds()


def earlier(moment: datetime, seconds: float) -> datetime:
    """Return the moment so many seconds before another."""
    return moment - timedelta(seconds=seconds)


def short(id: object) -> str:
    """Return the end of an id, by which those of one list differ."""
    return str(id)[-8:]


def waking(task: TaskView) -> str:
    """Return what happens to a waiting task at its `wake_at`; nothing where that says nothing to people."""
    if task.status != TaskState.PENDING or task.wake_at is None or (task.hold or "").startswith("crowded"):
        return ""
    return "fails" if task.hold else "due"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def standing(queue: QueueCounts, *kinds: str) -> str:
    """Return how many tasks of some kinds stand in a queue; with a plus where not all were counted."""
    return _at_least(sum(getattr(queue, kind) for kind in kinds), kinds, queue.least)


def open_tasks(overview: Overview, *kinds: str) -> str:
    """Return the same of all queues."""
    return _at_least(sum(overview.open[kind] for kind in kinds), kinds, overview.open_least)


def _at_least(found: int, kinds: Sequence[str], least: Sequence[str]) -> str:
    return f"{found:,}+" if found and not {*kinds}.isdisjoint(least) else f"{found:,}"


def trend(counts: Sequence[int]) -> str:
    """Return in a word how the last quarter of equal parts of a time compares with the quarter before.

    Nothing where all of it is in the last quarter: there is nothing to compare with.
    """
    quarter = len(counts) // 4
    lately, before = sum(counts[-quarter:]), sum(counts[-2 * quarter : -quarter])
    if lately == sum(counts):
        return ""
    if not lately:
        return "stopped"
    if abs(lately - before) < _CHANGE:
        return "steady"
    return "rising" if lately > 1.5 * before else "falling" if 1.5 * lately < before else "steady"


def rate(value: float) -> str:
    """Return how much there is of something in a second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.05 or not value else f"{value:.2f}"


def data(value: Any) -> str:
    """Return a value as JSON over several lines; what is very long is cut."""
    written = msgspec.json.encode(value)
    if b"null" in written:  # so NaN is written
        written = msgspec.json.encode(as_shown(value))
    text = msgspec.json.format(written, indent=2).decode()
    if len(text) <= _LONGEST_VALUE:
        return terminal_safe(text)
    return terminal_safe(text[:_LONGEST_VALUE]) + f"\n… {len(text) - _LONGEST_VALUE:,} more characters"


def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return arguments in one line, as a call has them."""
    parts = [_inline(value) for value in args] + [f"{name}={_inline(value)}" for name, value in kwargs.items()]
    return ", ".join(parts)


def _inline(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:80]}…"


def address(*parts: object) -> str:
    """Return the path of a page; every part is one word of it."""
    return "/".join(("/ui", *(quote(str(part), safe="") for part in parts)))


def run_name(run: RunView) -> str:
    """Return what a run is called: like its workflow; the workflow of a composition has no name for people."""
    return run.name if is_composed(run.workflow) else run.workflow or run.name


def series(text: str) -> tuple[str, str]:
    """Return the schedule that a run bears, and the number of the backfill, if it was started by one."""
    found = _BACKFILL.fullmatch(text)
    return (found[1], found[2]) if found else (text, "")


def with_query(path: str, values: Mapping[str, Any]) -> str:
    """Return an address with those options that say something."""
    given = [
        (name, one)
        for name, value in values.items()
        for one in (value if isinstance(value, (list, tuple)) else [value])
        if one not in (None, "", False)
    ]
    return f"{path}?{urlencode(given)}" if given else path


def plain(text: str | None) -> str:
    """Return a user's text without what a page cannot show, and without the colours of a terminal."""
    return without_styles(text or "")


def headline(message: str) -> str:
    """Return what an error says, without the traceback of another one that it carries."""
    return message.partition("\n\nRemote traceback:")[0]


_TASK = re.compile(r"\btask ([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b")


def linked(text: str) -> Markup:
    """Return a text in which the ids of tasks are links, and short."""
    link = r'task <a class="mono" href="/ui/tasks/\1">%s</a>'
    return Markup(_TASK.sub(lambda found: found.expand(link % short(found[1])), str(escape(plain(text)))))


_MOMENT = re.compile(r"\b(\d{4}-\d\d-\d\d) (\d\d:\d\d(?::\d\d)?) UTC\b")


def timed(text: str) -> Markup:
    """Return a text in which moments are shown in the zone that the reader chooses."""
    moment = r'<time datetime="\1T\2Z" data-moment>\g<0></time>'
    return Markup(_MOMENT.sub(moment, str(escape(plain(text)))))


_FRAME = re.compile(
    r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?\n(?:    .*\n?)*', re.MULTILINE
)
_POINTERS = re.compile(r"^[ ~]*\^[ ~^]*$", re.MULTILINE)
_FOREIGN = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3[.\d]*|orchestrator)[/\\]|^<")
"""In the path of a file of somebody else: a library, Python itself, or this package."""


def _last_own(text: str) -> re.Match[str] | None:
    """Return the last frame of a traceback that is in the user's own code."""
    return next((one for one in reversed([*_FRAME.finditer(text)]) if not _FOREIGN.search(one["file"])), None)


def own_frame(text: str) -> str:
    """Return where a traceback leaves the user's own code; nothing, if it is not in it."""
    found = _last_own(text)
    if found is None:
        return ""
    file = found["file"].replace("\\", "/").rpartition("/")[2]
    return f"{file}:{found['line']} in {found['name']}" if found["name"] else f"{file}:{found['line']}"


def traceback(text: str) -> Markup:
    """Return a traceback in which the last frame of the user's own code is marked."""
    found = _last_own(text)
    if found is None:
        return _frames(text)
    own = found[0].rstrip("\n")  # the mark is a block, behind which a new line begins
    before, after = text[: found.start()], text[found.start() + len(own) :].removeprefix("\n")
    return Markup("{}<mark>{}</mark>{}").format(*map(_frames, (before, own, after)))


def _frames(text: str) -> Markup:
    """Return a part of a traceback. Lines that only point at a part of the line above are not wrapped with it."""
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
