"""Texts of the dashboard: errors, tracebacks, charts and times."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from orchestrator.api import dashboard
from orchestrator.api.dashboard.charts import hour
from orchestrator.api.dashboard.rendering import _environment
from orchestrator.api.dashboard.words import fire_time, headline, own_frame, plain, traceback
from orchestrator.monitoring.exposition import SECONDS
from orchestrator.store.insights import ErrorView
from orchestrator.store.throughput import Throughput

TEXT = """Traceback (most recent call last):
  File "/srv/shop/tasks.py", line 8, in <lambda>
    helper(n)
  File "/srv/shop/tasks.py", line 13, in helper
    json.loads("<" + str(n))
    ^^^^^^^^^^
  File "/usr/lib/python3.12/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
  File "/srv/.venv/lib/python3.12/site-packages/x.py", line 3, in y
ValueError: no
"""


def test_terminal_colors_are_removed() -> None:
    assert plain("\x1b[31mno\x1b[0m pears\x07") == "no pears\N{REPLACEMENT CHARACTER}"
    assert traceback("ValueError: \x1b[1;31mno\x1b[0m") == "ValueError: no"


def test_the_headline_of_an_error_omits_a_remote_traceback() -> None:
    assert (
        headline("Task 'a' failed: no\n\nRemote traceback:\nTraceback (most recent call last)") == "Task 'a' failed: no"
    )


def test_the_line_of_a_chart_is_broken_where_data_is_missing() -> None:
    now = datetime(2026, 11, 18, 8, 30, tzinfo=UTC)
    counts = [0] * (len(SECONDS) + 1)
    counts[3] = 1
    none: Any = {field.name: 0 for field in fields(Throughput)} | {"waits": counts, "runs": counts}
    minutes = [Throughput(**none | {"bucket": now - timedelta(minutes=ago)}) for ago in (40, 39, 2)]
    line = hour(minutes, now).queue_latency.line
    assert line.count("M") == 2, "two stretches"
    assert line.count("L") == 1, "of two minutes, and of one"


def test_percentiles_are_shown_as_bounds_of_the_histogram() -> None:
    now = datetime(2026, 11, 18, 8, 30, tzinfo=UTC)
    waits, runs = [0] * (len(SECONDS) + 1), [0] * (len(SECONDS) + 1)
    runs[SECONDS.index(30)], waits[0], waits[-1] = 8, 90, 10
    none: Any = {field.name: 0 for field in fields(Throughput)} | {"waits": waits, "runs": runs, "bucket": now}
    found = hour([Throughput(**none)], now)
    assert (found.run_time.p50, found.run_time.p95, found.run_time.p99) == ("≤ 30.0s",) * 3
    assert (found.queue_latency.p50, found.queue_latency.p95) == ("≤ 1.0ms", "> 1h")
    assert hour([], now).run_time.p95 == ""


def test_a_fire_time_has_seconds_unless_they_are_zero() -> None:
    moment = datetime(2026, 11, 18, 8, 30, tzinfo=UTC)
    assert fire_time(moment) == "2026-11-18 08:30"
    assert fire_time(moment.replace(second=10)) == "2026-11-18 08:30:10"


def test_the_last_frame_of_user_code_is_marked() -> None:
    assert own_frame(TEXT) == "tasks.py:13 in helper"
    shown = traceback(TEXT)
    marked = shown.partition("<mark>")[2].partition("</mark>")[0]
    assert marked.startswith("  File &#34;/srv/shop/tasks.py&#34;, line 13, in helper\n    json.loads(&#34;&lt;&#34;")
    assert marked.endswith("^^^^^^^^^^</span>")
    assert shown.striptags().split() == TEXT.split()


def test_nothing_is_marked_without_user_code() -> None:
    text = 'Traceback:\n  File "/usr/lib/python3.12/json/__init__.py", line 346, in loads\n<b>'
    assert own_frame(text) == ""
    assert "<mark>" not in traceback(text)
    assert "&lt;b&gt;" in traceback(text)


def test_a_remote_traceback_is_shown_once() -> None:
    env = _environment()
    macro = env.get_template("macros.html").make_module({"visit": None, "now": None}).error  # type: ignore[attr-defined]
    remote = f"the task failed\n\nRemote traceback:\n{TEXT}"
    inner = ErrorView(kind="TaskFailed", message=remote, traceback=f"{TEXT}TaskFailed: {remote}", data={})
    for error in (inner, replace(inner, traceback="")):
        shown = str(macro(error, open=True))
        assert "<p><strong>TaskFailed</strong>: the task failed</p>" in shown
        assert shown.count("<mark>") == 1


def test_pointer_lines_of_a_traceback_are_not_wrapped() -> None:
    text = 'Traceback:\n  File "shop.py", line 3, in sell\n    pay(1 / 0)\n        ~~^~~\nZeroDivisionError: <b>\n'
    shown = traceback(text)
    assert '<span class="pointers">        ~~^~~</span></mark>ZeroDivisionError: &lt;b&gt;' in shown
    assert traceback("2 ^ 3\n") == "2 ^ 3\n"


def test_pages_use_standard_terms() -> None:
    folder = Path(dashboard.__file__).parent / "templates"
    shown = {path.name: re.sub(r"{%.*?%}|<[^>]*>", " ", path.read_text()) for path in folder.glob("*.html")}
    assert len(shown) > 30
    dialect = r"\bhalf\b|\bof 100\b|up since|does now|waits? for others|waited / ran|on (its|their) way|time is up"
    dialect += r"|\bfits\b|goes on|(no|some|every)body\b|say which|do it again|as usual|any ?more|for ever\b"
    assert {name: found[0] for name, text in shown.items() if (found := re.search(dialect, text, re.I))} == {}
