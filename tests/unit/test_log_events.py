"""Every log line of the product begins with the name of an event, and docs/logs.md lists all events.

After a change, `python -m tests.unit.test_log_events` rewrites the list.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from orchestrator.log_format import EVENT, JsonFormatter

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/logs.md"
LEVELS = ("debug", "info", "warning", "error")
PASS_LINES_OF_USERS_ON = {"context.py", "task_output.py", "children.py", "redis.py"}
HEAD = "Each event with its levels, its fields and its meaning:\n\n"


@cache
def calls() -> list[tuple[str, ast.Call]]:
    """Return every logging call with its location."""
    found = []
    for folder in ("orchestrator", "workers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if path.name not in PASS_LINES_OF_USERS_ON and re.search(r"log(ger)?(\(.*\))?\s*\.|_log\(", text):
                for call in ast.walk(ast.parse(text)):
                    if isinstance(call, ast.Call) and _logs(call.func):
                        found.append((f"{path.relative_to(ROOT)}:{call.lineno}", call))
    return found


def _logs(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id == "_log"  # the helper of workers/reporting/task_log.py
    if not isinstance(function, ast.Attribute) or function.attr not in (*LEVELS, "exception", "log"):
        return False
    return ast.unparse(function.value).endswith(("log", "logger"))


def _text(call: ast.Call) -> str:
    texts = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return next((text for text in texts if EVENT.match(text)), "")


def _level(call: ast.Call) -> str:
    name = (
        call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.args[1]).partition(".")[2].lower()
    )
    return {"exception": "error", "log": "info"}.get(name, name)


def listed() -> str:
    """Return the list of all events, as docs/logs.md contains it."""
    levels: defaultdict[str, set[str]] = defaultdict(set)
    fields: defaultdict[str, list[str]] = defaultdict(list)
    meanings: defaultdict[str, list[str]] = defaultdict(list)
    for _, call in calls():
        text = _text(call)
        head, _, meaning = text.partition(": ")
        event = EVENT.match(text)
        assert event is not None, ast.unparse(call)
        levels[event[0]].add(_level(call))
        fields[event[0]] += [key for key in re.findall(r"(\w+)=", head) if key not in fields[event[0]]]
        if (said := re.sub(r"%[-.\d]*[a-z]", "…", meaning).strip("…")) and said not in meanings[event[0]]:
            meanings[event[0]].append(said)
    lines = []
    for name in sorted(levels):
        words = [f"- **{name}**", ", ".join(level for level in LEVELS if level in levels[name])]
        words += [f"`{key}`" for key in fields[name]]
        said = "; or: ".join(meaning.strip(" ;:.") for meaning in meanings[name])
        lines.append(" ".join(words) + (f": {said}" if said else "") + "\n")
    return HEAD + "".join(lines)


@pytest.mark.slow
def test_every_logging_call_names_an_event() -> None:
    assert len(calls()) > 100
    assert [place for place, call in calls() if not _text(call)] == []


@pytest.mark.slow
def test_the_documentation_lists_every_event() -> None:
    assert listed() in PAGE.read_text(), "python -m tests.unit.test_log_events"


def test_json_lines_contain_the_event_and_its_fields() -> None:
    text = "worker.lost worker=%s reason=%r attempts=%d after %s s: its attempts run again"
    record = logging.LogRecord("orchestrator.scheduler", 30, "", 0, text, ("w1", "silent", 3, 5), None)
    line = json.loads(JsonFormatter().format(record))
    assert (line["event"], line["worker"], line["reason"], line["attempts"]) == ("worker.lost", "w1", "silent", 3)


def test_a_line_printed_by_a_task_is_not_an_event() -> None:
    record = logging.LogRecord("orchestrator.tasks", 20, "", 0, "shop.sold item=%s", ("bun",), None)
    assert "event" not in json.loads(JsonFormatter().format(record))


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(HEAD)[0] + listed())
