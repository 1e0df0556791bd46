"""Log lines of attempts, on their way out of a worker process."""

from __future__ import annotations

import os

import pytest

from orchestrator.domain.tasks.task import Dispatch
from orchestrator.transport.codec import LogChunk, LogLine, decode
from orchestrator.workers.reporting import lines as reporting
from orchestrator.workers.reporting.lines import Lines
from orchestrator.workers.running.job import Bundle, Job
from tests.calls import calls_of


def new_job() -> Job:
    dispatch = Dispatch(os.urandom(16), 2, "job", b"\x92\x90\x80", "default", None)
    return Job(dispatch, Bundle("g", "default", "1-0", 1), 0, 0.0)


def line(text: str) -> LogLine:
    return LogLine(1.0, 2, "info", text)


def why(limit: int) -> str:
    return f"of an attempt, {limit:,} bytes and {limit // 10:,} lines are kept (setting log_limit)"


def texts(chunks: list[LogChunk]) -> list[str]:
    return [said.text for chunk in chunks for said in decode(list[LogLine], chunk.lines)]


def test_each_attempt_has_its_own_chunks_in_order() -> None:
    lines, one, other = Lines(1_000_000), new_job(), new_job()
    other.set_step({"step": "load", "index": 3, "count": 4})
    for number in range(3):
        lines.add(one, line(f"one {number}"))
        lines.add(other, line(f"other {number}"))
    first = lines.take().chunks
    lines.add(one, line("later"))
    second = lines.take().chunks
    assert [(chunk.task, chunk.attempt, chunk.part, chunk.step) for chunk in [*first, *second]] == [
        (one.dispatch.id, 2, 0, "job"),
        (other.dispatch.id, 2, 0, "load[3]"),
        (one.dispatch.id, 2, 1, "job"),
    ]
    assert texts(first) == [*(f"one {number}" for number in range(3)), *(f"other {number}" for number in range(3))]
    assert texts(second) == ["later"]


def test_the_first_and_last_of_too_many_lines_are_kept() -> None:
    lines, job = Lines(10_000), new_job()
    for number in range(1_000):
        lines.add(job, line(f"{number:099}"))
    assert lines.end(job)
    said = texts(lines.take().chunks)
    assert said[:80] == [f"{number:099}" for number in range(80)]
    assert said[80] == f"900 lines (90,000 bytes) were dropped here: {why(10_000)}"
    assert said[81:] == [f"{number:099}" for number in range(980, 1_000)]
    assert (lines._attempts, lines._ready) == ({}, {})


def test_lines_of_one_text_are_kept_like_single_lines() -> None:
    said = [f"{'ö' * (number % 7)} {number}" for number in range(3_000)]
    alone, together, job = Lines(10_000), Lines(10_000), new_job()
    for text in said:
        alone.add(job, line(text))
    for first in range(0, len(said), 700):
        together.add_many(job, line("\n".join(said[first : first + 700])))
    for lines in (alone, together):
        lines.end(job)
    kept = texts(together.take().chunks)
    assert kept == texts(alone.take().chunks)
    (at,) = (number for number, text in enumerate(kept) if "dropped here" in text)
    lost = said[at : at + 1 - len(kept)]
    missing = f"{len(lost):,} lines ({sum(len(text.encode()) + 1 for text in lost):,} bytes) were dropped here"
    assert kept[at].startswith(missing)
    assert kept[:at] == said[:at]
    assert kept[at + 1 :] == said[at + 1 - len(kept) :]
    size = sum(len(text.encode()) + 1 for text in kept[:at] + kept[at + 1 :])
    assert 9_900 < size <= 10_000, "as many bytes as the setting says"


def test_many_short_lines_are_kept_at_the_cost_of_their_blocks() -> None:
    lines, job = Lines(1_000_000), new_job()
    block = line("\n".join(["y"] * 125_000))
    calls = calls_of(lambda: [lines.add_many(job, block) for _ in range(16)])
    assert calls.total() < 10_000, "the cost goes with the blocks, and not with their two million lines"
    assert lines.end(job)
    said = texts(lines.take().chunks)
    assert len(said) == 100_001
    assert said[80_000] == f"1,900,000 lines (3,800,000 bytes) were dropped here: {why(1_000_000)}"
    assert set(said[:80_000] + said[80_001:]) == {"y"}


def test_blank_lines_are_kept_and_counted() -> None:
    lines, job = Lines(1_000), new_job()
    lines.add_many(job, line("one\n\n \ntwo"))
    assert texts(lines.take().chunks) == ["one", "", " ", "two"]
    lines.add_many(job, line("\n" * 499))
    lines.end(job)
    assert texts(lines.take().chunks) == [
        *[""] * 76,
        f"404 lines (404 bytes) were dropped here: {why(1_000)}",
        *[""] * 20,
    ]


def test_drops_for_different_reasons_are_counted_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_MAX_WAITING", 340)
    lines, job = Lines(1_000), new_job()
    lines.add_many(job, line("\n".join([f"{number:099}" for number in range(5)])))
    lines.add_many(job, line("\n".join([f"{number:099}" for number in range(5, 20)])))
    lines.end(job)
    assert texts(lines.take().chunks) == [
        *(f"{number:099}" for number in range(3)),
        "7 lines (700 bytes) were dropped here: it came faster than it could be sent",
        f"8 lines (800 bytes) were dropped here: {why(1_000)}",
        *(f"{number:099}" for number in range(18, 20)),
    ]


def test_each_line_has_its_own_level_on_request() -> None:
    lines, job = Lines(1_000_000), new_job()
    lines.add_many(job, LogLine(1.0, 2, reporting.BY_LINE, "begins\nERROR: no\nends"))
    (chunk,) = lines.take().chunks
    assert [said.level for said in decode(list[LogLine], chunk.lines)] == ["info", "warning", "info"]


def test_the_last_lines_are_held_back_until_the_end() -> None:
    lines, job = Lines(1_000), new_job()
    for number in range(20):
        lines.add(job, line(f"{number:099}"))
    *first, note = texts(lines.take().chunks)
    assert len(first) == 8
    assert note.startswith("The next lines are kept back, and the last of them follow at the end")
    lines.add(job, line("z"))
    assert texts(lines.take().chunks) == []
    lines.end(job)
    assert texts(lines.take().chunks) == [
        f"11 lines (1,100 bytes) were dropped here: {why(1_000)}",
        f"{19:099}",
        "z",
    ]


def test_lines_beyond_the_buffer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_MAX_WAITING", 1_400)
    lines, job, other = Lines(1_000_000), new_job(), new_job()
    for number in range(15):
        lines.add(job, line(f"{number:099}"))
    lines.add(other, line("none"))
    said = texts(lines.take().chunks)
    reason = "it came faster than it could be sent"
    assert said == [
        *(f"{number:099}" for number in range(10)),
        f"5 lines (500 bytes) were dropped here: {reason}",
        f"1 line (5 bytes) was dropped here: {reason}",
    ]


def test_a_long_line_is_truncated() -> None:
    lines, job = Lines(1_000_000), new_job()
    lines.add(job, line("x" * 100_000))
    lines.add_many(job, line("short\n" + "y" * 10_001 + "\n" + "z" * 10_000 + "\n\nend"))
    expected = ["x" * 9_999 + "…", "short", "y" * 9_999 + "…", "z" * 10_000, "", "end"]
    assert texts(lines.take().chunks) == expected
    assert {len(text) for text in expected} <= {0, 3, 5, 10_000}


def test_an_ended_attempt_leaves_no_state() -> None:
    lines, job = Lines(1_000_000), new_job()
    assert not lines.end(job)
    lines.add(job, line("word"))
    assert len(lines.take().chunks) == 1
    assert not lines.end(job)
    assert lines._attempts == {}
