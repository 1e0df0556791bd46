"""Read the `schedule:` of a workflow."""

from __future__ import annotations

import re
import zoneinfo
from datetime import datetime
from typing import Any

from orchestrator.domain.plain import unstorable
from orchestrator.domain.problems import Path
from orchestrator.domain.schedules.cron import cron_problem
from orchestrator.domain.schedules.schedule import MAX_CAUGHT_UP, Schedule, catch_up_parts, from_data, parse_moment
from orchestrator.errors import InvalidWorkflow, did_you_mean
from orchestrator.sdk.dag import fields
from orchestrator.sdk.dag.document import Node, from_plain
from orchestrator.sdk.dag.fields import BAD, Bad, Field, Fields

_NAME = re.compile(r"[\w.-]{1,64}")
_CENTURY = 100 * 365 * 86_400
_KINDS = ("cron", "every", "at")
_OFFSET = re.compile(r"(UTC|GMT)?[+-][0-9:]+")
_ABBREVIATIONS = {
    **dict.fromkeys(("PST", "PDT", "PT"), "America/Los_Angeles"),
    **dict.fromkeys(("MDT", "MT"), "America/Denver"),
    **dict.fromkeys(("CST", "CDT", "CT"), "America/Chicago"),
    **dict.fromkeys(("EDT", "ET"), "America/New_York"),
    **dict.fromkeys(("CEST", "MEZ", "MESZ"), "Europe/Berlin"),
    **dict.fromkeys(("AEST", "AEDT"), "Australia/Sydney"),
    "BST": "Europe/London",
    "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo",
}
"""IANA names for abbreviations that the IANA database lacks."""


def schedule(reader: Fields, node: Node, path: Path) -> dict[str, Any] | Bad:
    """Read a schedule as plain data, with `every` and `jitter` in seconds."""
    before = len(reader.problems)
    values = reader.read(node, path, "a mapping such as {cron: 0 3 * * *, timezone: Europe/Berlin}", _SCHEDULE)
    kinds = [key for key in _KINDS if isinstance(node.value, dict) and key in node.value]
    if len(kinds) != 1 and isinstance(node.value, dict):
        found = " and ".join(kinds) or "none of them"
        reader.problem(path, f"expected exactly one of cron, every and at, found {found}.")
    if not isinstance(values, Bad) and len(reader.problems) == before:
        _check_bounds(reader, values, path)
    return values if len(reader.problems) == before else BAD


def _check_bounds(reader: Fields, values: dict[str, Any], path: Path) -> None:
    bounds = [key for key in ("start", "end") if key in values]
    if bounds and "at" in values:
        reader.problem(
            (*path, bounds[0]), "expected only with cron or every, found with at, which is a single moment: omit it."
        )
    elif len(bounds) == 2:
        zone = zoneinfo.ZoneInfo(values.get("timezone", "UTC"))
        if parse_moment(values["start"], zone) >= parse_moment(values["end"], zone):
            reader.problem((*path, "end"), f"expected a moment after start, {values['start']}, found {values['end']}.")


def checked_schedule(data: dict[str, Any]) -> dict[str, Any]:
    """Read a separate schedule. Raise InvalidWorkflow with all its problems."""
    reader = Fields()
    values = schedule(reader, from_plain(data), ("schedule",))
    if isinstance(values, Bad):
        lines = (f"{'.'.join(map(str, problem.path))}: {problem.message}" for problem in reader.problems)
        raise InvalidWorkflow("\n".join(lines))
    return values


def schedule_of_code(data: dict[str, Any]) -> Schedule:
    """Return the schedule of a code workflow, or raise InvalidWorkflow."""
    if problem := unstorable(data):
        raise InvalidWorkflow(f"schedule: {problem}.")
    return from_data(checked_schedule(data))


def _cron(reader: Fields, node: Node, path: Path) -> str | Bad:
    if not isinstance(node.value, str):
        return reader.mismatch(node, path, "a cron expression such as 0 3 * * *")
    problem = cron_problem(node.value)
    return reader.problem(path, problem) if problem else node.value


def _every(reader: Fields, node: Node, path: Path) -> float | Bad:
    seconds = fields.duration(reader, node, path)
    if not isinstance(seconds, Bad) and seconds < 1:
        return reader.problem(path, f"expected at least 1 second, found {seconds:g}.")
    return _bounded(reader, seconds, path)


def _jitter(reader: Fields, node: Node, path: Path) -> float | Bad:
    seconds = fields.duration(reader, node, path)
    if not isinstance(seconds, Bad) and seconds < 0:
        return reader.problem(path, f"expected 0 seconds or more, found {seconds:g}.")
    return _bounded(reader, seconds, path)


def _bounded(reader: Fields, seconds: float | Bad, path: Path) -> float | Bad:
    if isinstance(seconds, Bad) or seconds <= _CENTURY:
        return seconds
    return reader.problem(path, f"expected a hundred years at most, found {seconds:g} seconds.")


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
        return reader.problem(path, f"unknown time zone {node.value!r:.100}{_zone_advice(node.value)}")
    return node.value


def _zone_advice(text: str) -> str:
    """Explain why a time zone is unknown, and suggest one."""
    zones = zoneinfo.available_timezones()
    if not zones:
        return ". There is no time zone data here: pip install tzdata"
    if (zone := _ABBREVIATIONS.get(text.upper())) is not None:
        return f": the IANA database has no such zone, and names them after places. Did you mean {zone!r}?"
    if _OFFSET.fullmatch(text.upper()):
        return ": the IANA database names zones after places. Expected one such as Europe/Berlin, or UTC."
    return f".{did_you_mean(text, zones) or ' Expected one such as Europe/Berlin.'}"


def _catch_up(reader: Fields, node: Node, path: Path) -> str | Bad:
    parts = catch_up_parts(node.value) if isinstance(node.value, str) else None
    if parts is None:
        return reader.mismatch(node, path, "one of none, latest, all and all(limit)")
    if parts[1] is not None and parts[1] > MAX_CAUGHT_UP:
        return reader.problem(
            path, f"expected a limit up to {MAX_CAUGHT_UP:,}, or all without a limit, found {parts[1]:,}."
        )
    return str(node.value)


def _name(reader: Fields, node: Node, path: Path) -> str | Bad:
    if isinstance(node.value, str) and _NAME.fullmatch(node.value):
        return node.value
    return reader.mismatch(node, path, "a name of 1 to 64 letters, digits, or any of _ . -")


_TEXT = {"type": "string"}
_SECONDS = fields.KINDS["duration"].schema
_SCHEDULE = fields.table_of(
    Schedule,
    {
        **fields.KINDS,
        "catch_up": Field(
            _catch_up, {"type": "string", "pattern": r"^(none|latest|all(\(([1-9][0-9]{0,2}|1000)\))?)$"}
        ),
        "cron": Field(_cron, _TEXT),
        "interval": Field(_every, _SECONDS),
        "jitter": Field(_jitter, _SECONDS),
        "label": Field(_name, _TEXT),
        "moment": Field(_at, _TEXT),
        "timezone": Field(_timezone, _TEXT),
    },
)
FIELD = Field(schedule, fields.mapping_schema(_SCHEDULE, one_of=_KINDS))
