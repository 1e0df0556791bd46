"""Times, calls and values as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.terminal.output import as_json, call_text, data_text
from orchestrator.monitoring.times import ago, between, duration
from orchestrator.sdk.values.payload import encode_call
from orchestrator.workers.parent.changes import Changes

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (-1, "0.0ms"),
        (0.0004, "0.4ms"),
        (0.012, "12ms"),
        (0.9994, "999ms"),
        (0.9996, "1.0s"),
        (1.234, "1.2s"),
        (59.94, "59.9s"),
        (59.96, "1m"),
        (200, "3m 20s"),
        (3600, "1h"),
        (18180, "5h 3m"),
        (187200, "2d 4h"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s ago"),
        (59, "59s ago"),
        (200, "3m ago"),
        (7300, "2h ago"),
        (200_000, "2d ago"),
        (-20, "in 20s"),
        (-47 * 3600, "in 2d"),
    ],
)
def test_an_age_has_one_unit(seconds: float, text: str) -> None:
    assert ago(NOW - timedelta(seconds=seconds), NOW) == text


def test_unknown_times_are_empty() -> None:
    assert ago(None, NOW) == between(None, NOW) == between(NOW, None) == ""


def test_a_call_is_printed_as_python_code() -> None:
    payload = encode_call("resize", ["a.png", {"x": [1, None]}], {"width": 200, "data": b"\x00"}, 1000)
    assert call_text("resize", payload) == """resize("a.png", {"x": [1, null]}, width=200, data=b'\\x00')"""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("ä, b: c", '"ä, b: c"'),
        ([1, {"a": True}], '[1, {"a": true}]'),
        ({1: 2}, '{"1": 2}'),
        ("\x1b[2J", '"\\u001b[2J"'),
    ],
)
def test_values_are_printed_as_json_without_terminal_codes(value: Any, text: str) -> None:
    assert data_text(value) == text


def test_values_that_json_lacks_are_printed_as_python() -> None:
    strange = {(1, 2): 3}
    assert data_text(strange) == as_json(strange) == "{(1, 2): 3}"


def test_changes_of_project_files_are_detected_and_other_files_ignored(tmp_path: Path) -> None:
    for name in ("kept.py", "gone.py", ".hidden/a.py", "venv/pyvenv.cfg", "venv/lib/b.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1", encoding="utf-8")
    changes = Changes(tmp_path)
    assert changes.poll() == []
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "new.py").write_text("1", encoding="utf-8")
    (tmp_path / "gone.py").unlink()
    for name in (".hidden/a.py", "venv/lib/b.py", "notes.txt"):
        (tmp_path / name).write_text("22", encoding="utf-8")
    assert changes.poll() == ["gone.py", "package/new.py"]
    assert changes.poll() == []
