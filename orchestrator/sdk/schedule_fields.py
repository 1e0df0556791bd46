"""The `schedule:` of a workflow: when it starts by itself."""

from __future__ import annotations

import re
import zoneinfo
from datetime import UTC, datetime
from typing import Any

from croniter import CroniterBadDateError, CroniterError, croniter

from orchestrator.domain.checks import Path
from orchestrator.errors import did_you_mean
from orchestrator.sdk import fields
from orchestrator.sdk.document import Node
from orchestrator.sdk.fields import BAD, Bad, Convert, Fields

_NUMBERS = r"[0-9*,/-]+"
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DAYS = "sun|mon|tue|wed|thu|fri|sat"
_FIELDS = (
    ("second", "0 to 59", re.compile(_NUMBERS)),
    ("minute", "0 to 59", re.compile(_NUMBERS)),
    ("hour", "0 to 23", re.compile(_NUMBERS)),
    ("day of month", "1 to 31, or L for the last", re.compile(r"(?:[0-9*,/?LW-])+", re.IGNORECASE)),
    ("month", "1 to 12, or JAN to DEC", re.compile(rf"(?:[0-9*,/-]|{_MONTHS})+", re.IGNORECASE)),
    (
        "day of week",
        "0 to 7, where both are Sunday, or SUN to SAT; FRI#2 for the second, L5 for the last Friday",
        re.compile(rf"(?:[0-9*,/?#L-]|{_DAYS})+", re.IGNORECASE),
    ),
)
_NICKNAMES = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_SOME_DAY = datetime(2024, 1, 1, tzinfo=UTC)


def cron_problem(expression: str) -> str | None:
    """Return what is wrong with a cron expression of 5 fields, or 6 with seconds first; None if nothing is."""
    if expression.startswith("@"):
        return None if expression in _NICKNAMES else f"expected one of {', '.join(_NICKNAMES)}, found {expression!r}."
    parts = expression.split()
    if len(parts) not in (5, 6):
        return (
            f"expected 5 fields (minute, hour, day of month, month, day of week), or 6 with seconds first, "
            f"found {len(parts)} in {expression!r}."
        )
    for place, (part, (name, expected, letters)) in enumerate(zip(parts, _FIELDS[-len(parts) :], strict=True)):
        alone = [part if other == place else "*" for other in range(len(parts))]
        if not letters.fullmatch(part) or not _is_understood(" ".join(alone)):
            return f"{name} {part!r} of {expression!r}: expected {expected}; also *, lists, ranges and steps."
    try:
        croniter(expression, _SOME_DAY, second_at_beginning=True).get_next()
    except CroniterBadDateError:
        return f"{expression!r} never comes: there is no such date."
    except (CroniterError, ValueError, KeyError, IndexError) as error:
        return f"{expression!r}: {error}."
    return None


def _is_understood(expression: str) -> bool:
    try:
        croniter(expression, _SOME_DAY, second_at_beginning=True)
    except (CroniterError, ValueError, KeyError, IndexError):
        return False
    return True


def schedule(reader: Fields, node: Node, path: Path) -> dict[str, Any] | Bad:
    """Read a schedule; it stays plain data, with `every` and `jitter` in seconds."""
    before = len(reader.problems)
    values = reader.read(node, path, "a mapping such as {cron: 0 3 * * *, timezone: Europe/Berlin}", _SCHEDULE)
    given = [key for key in ("cron", "every", "at") if isinstance(node.value, dict) and key in node.value]
    if len(given) != 1 and isinstance(node.value, dict):
        found = " and ".join(given) or "none of them"
        reader.problem(path, f"expected exactly one of cron, every and at, found {found}.")
    return values if len(reader.problems) == before else BAD


def _cron(reader: Fields, node: Node, path: Path) -> str | Bad:
    if not isinstance(node.value, str):
        return reader.mismatch(node, path, "a cron expression such as 0 3 * * *")
    problem = cron_problem(node.value)
    return reader.problem(path, problem) if problem else node.value


def _every(reader: Fields, node: Node, path: Path) -> float | Bad:
    seconds = fields.duration(reader, node, path)
    if not isinstance(seconds, Bad) and seconds <= 0:
        return reader.problem(path, f"expected more than 0 seconds, found {seconds:g}.")
    return seconds


def _jitter(reader: Fields, node: Node, path: Path) -> float | Bad:
    seconds = fields.duration(reader, node, path)
    if not isinstance(seconds, Bad) and seconds < 0:
        return reader.problem(path, f"expected 0 seconds or more, found {seconds:g}.")
    return seconds


def _at(reader: Fields, node: Node, path: Path) -> str | Bad:
    try:
        datetime.fromisoformat(str(node.value))
    except ValueError:
        return reader.mismatch(node, path, "a time such as 2024-01-31T09:30:00")
    return str(node.value)


def _timezone(reader: Fields, node: Node, path: Path) -> str | Bad:
    if not isinstance(node.value, str):
        return reader.mismatch(node, path, "a time zone such as Europe/Berlin")
    try:
        zoneinfo.ZoneInfo(node.value)
    except (ValueError, OSError, LookupError):
        near = did_you_mean(node.value, zoneinfo.available_timezones()) or " Expected one such as Europe/Berlin."
        return reader.problem(path, f"unknown time zone {node.value!r:.100}.{near}")
    return node.value


def _catch_up(reader: Fields, node: Node, path: Path) -> str | Bad:
    if isinstance(node.value, str) and re.fullmatch(r"none|latest|all(?:\([1-9][0-9]{0,8}\))?", node.value):
        return node.value
    return reader.mismatch(node, path, "one of none, latest, all and all(limit)")


_SCHEDULE: dict[str, Convert] = {
    "cron": _cron,
    "every": _every,
    "at": _at,
    "timezone": _timezone,
    "overlap": fields.one_of(("skip", "queue", "allow", "cancel_previous")),
    "catch_up": _catch_up,
    "jitter": _jitter,
    "name": fields.text,
    "params": fields.plain_object,
    "paused": fields.boolean,
}
