"""Workflow definitions in files: YAML or JSON to a `Definition`, and back.

Everything that is wrong with a file is reported at once, each with its line:

    nightly.yaml:12: tasks.report.depends_on: unknown task 'proces'. Did you mean 'process'?
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args
from zoneinfo import ZoneInfo

import msgspec
import yaml

from orchestrator.domain.checks import Path as Place
from orchestrator.domain.checks import check
from orchestrator.domain.definition import (
    Concurrency,
    Definition,
    EventTrigger,
    Hook,
    Param,
    ParamType,
    Step,
    Trigger,
)
from orchestrator.domain.durations import format_duration
from orchestrator.domain.operators import describe
from orchestrator.errors import InvalidWorkflow, did_you_mean
from orchestrator.sdk import document, fields
from orchestrator.sdk.document import NOT_A_STRING, Node
from orchestrator.sdk.fields import BAD, Bad, Convert, Fields, Found

_MOST_PROBLEMS = 50


def load(path: str | Path) -> Definition:
    """Read a workflow from a file."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidWorkflow(f"{path}: cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise InvalidWorkflow(f"{path}: not a text in UTF-8: {error.reason} at byte {error.start}.") from None
    return loads(text, str(path))


def loads(text: str, source: str = "<text>") -> Definition:
    """Read a workflow from a text; `source` is what messages call it."""
    root, flaws = document.read(text)
    found = [Found(flaw.line, (), flaw.message) for flaw in flaws]
    if root is None:
        raise _refusal(source, found or [Found(1, (), "expected a workflow, found nothing.")])
    return _definition(root, source, found)


def from_data(data: Any, source: str = "workflow") -> Definition:
    """Read a workflow from plain data in the shape of a file."""
    try:
        root = document.from_plain(data)
    except RecursionError:
        raise InvalidWorkflow(f"{source}: nested too deeply.") from None
    return _definition(root, source, [])


# -- reading


def _param(reader: Fields, node: Node, path: Place) -> Param:
    table: dict[str, Convert] = {
        "type": fields.one_of(get_args(ParamType)),
        "default": fields.anything,
        "description": fields.text,
    }
    return Param(**reader.read(node, path, "a mapping such as {type: date, default: today}", table))


def _params(reader: Fields, node: Node, path: Place) -> dict[str, Param]:
    entries = reader.mapping(node, path, "a mapping of parameters by name")
    return {name: _param(reader, entry.node, (*path, name)) for name, entry in entries.items()}


def _concurrency(reader: Fields, node: Node, path: Place) -> Concurrency | Bad:
    if isinstance(node.value, int) and not isinstance(node.value, bool):
        return Concurrency(limit=node.value)
    values = reader.read(node, path, "a whole number, or a mapping with limit and key", _CONCURRENCY)
    if "limit" in values:
        return Concurrency(**values)
    if isinstance(node.value, dict) and "limit" not in node.value:
        reader.problem(node, path, "limit is missing: how many runs may there be at once?")
    return BAD


def _each(kind: type[msgspec.Struct], expected: str, table: dict[str, Convert]) -> Convert:
    """Return how a list of mappings, or one alone, is read."""

    def convert(reader: Fields, node: Node, path: Place) -> tuple[Any, ...]:
        if isinstance(node.value, list):
            places = [((*path, place), item) for place, item in enumerate(node.value)]
        else:
            places = [((*path, 0), node)]
        return tuple(kind(**reader.read(item, place, expected, table)) for place, item in places)

    return convert


def _time_zone(reader: Fields, node: Node, path: Place) -> str | Bad:
    name = fields.text(reader, node, path)
    if isinstance(name, Bad):
        return name
    try:
        ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        import zoneinfo

        near = did_you_mean(name, zoneinfo.available_timezones())
        return reader.problem(node, path, f"unknown time zone {name!r}.{near or ' Expected one such as Europe/Berlin.'}")
    return name


def _cron(reader: Fields, node: Node, path: Place) -> str | Bad:
    expression = fields.text(reader, node, path)
    if isinstance(expression, Bad):
        return expression
    problem = cron_problem(expression)
    return reader.problem(node, path, problem) if problem else expression
