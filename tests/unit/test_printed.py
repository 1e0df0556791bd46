"""Printing costs a task little, and large output is bounded."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.domain.tasks.task import Dispatch
from orchestrator.log_format import JsonFormatter, TextFormatter
from orchestrator.nonblocking_log import NonblockingHandler
from orchestrator.sdk.tasks.context import enter_task
from orchestrator.transport.codec import LogLine, decode
from orchestrator.workers.reporting import printed, task_output
from orchestrator.workers.reporting.lines import Lines
from orchestrator.workers.reporting.task_output import KeptRecords, TaskFields, TaskOutput, TaskStream, end_lines
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.task_runtime import JobRuntime
from tests.calls import calls_of
from tests.waiting import eventually

LIMIT = 1_000_000


class KeptLines:
    """Keeps printed lines like a worker."""

    def __init__(self) -> None:
        self.lines = Lines(LIMIT)

    def log(self, job: Job, line: LogLine) -> None:
        self.lines.add(job, line)

    def log_lines(self, job: Job, lines: LogLine) -> None:
        self.lines.add_many(job, lines)

    def texts(self) -> list[str]:
        return [line.text for chunk in self.lines.take().chunks for line in decode(list[LogLine], chunk.lines)]


class _Ignoring(logging.Handler):
    """Formats the message of a record, and nothing else."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()


class Printing:
    """A task that prints."""

    def __init__(self, path: Path) -> None:
        self.job = Job(Dispatch(b"a" * 16, 2, "bake", b"", "ovens"), Bundle("", "", "", 1), 0, 0.0)
        self.job.begin(0.0)
        self.kept = KeptLines()
        self.path = path
        self._file = path.open("wb")
        self.handler = NonblockingHandler(self._file.fileno())
        self.stream, self.errors = (TaskStream(self._output(name)) for name in ("stdout", "stderr"))

    def _output(self, name: str) -> TaskOutput:
        output = TaskOutput(name, self.handler)
        output._log = logging.Logger(name)  # a logger without other handlers
        output._log.addHandler(self.handler)
        return output

    def logged(self) -> list[str]:
        return self.path.read_text().splitlines()

    def close(self) -> None:
        self.handler.close()
        self._file.close()


@pytest.fixture(params=[TextFormatter, JsonFormatter], ids=["text", "json"])
def printing(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Printing]:
    printing = Printing(tmp_path / "log")
    printing.handler.setFormatter(request.param())
    monkeypatch.setattr(task_output, "_line_stores", [printing.kept])
    enter_task(JobRuntime(printing.job, None))  # type: ignore[arg-type]
    yield printing
    end_lines(printing.job)
    enter_task(None)
    printing.close()


@pytest.mark.slow
def test_printing_a_line_costs_little_more_than_two_appends(printing: Printing) -> None:
    def print_lines() -> None:
        for _ in range(10_000):
            print("x" * 60, file=printing.stream)

    for limit in ("within", "past", "past"):
        calls = calls_of(print_lines)
        assert calls["call"] < 8 * 10_000, f"{limit} the limit: 2 a line, and a line that comes alone is passed on"
        assert calls["c_call"] < 20 * 10_000, f"{limit} the limit"


@pytest.mark.slow
def test_logging_a_line_costs_little_more_than_calling_the_handlers(printing: Printing) -> None:
    """Names, ids and times are formatted once, and not for each line."""
    print("x", file=printing.stream)
    printing.handler.addFilter(TaskFields())

    def calls_with(*handlers: logging.Handler) -> Counter[str]:
        log = logging.Logger("app")
        for handler in handlers:
            log.addHandler(handler)

        def log_lines() -> None:
            for number in range(1_000):
                log.info("line %d", number)

        log_lines()
        return calls_of(log_lines)

    # Without the cost of `logging` for any two handlers, which changes with each release of Python.
    calls = calls_with(printing.handler, KeptRecords()) - calls_with(_Ignoring(), _Ignoring())
    assert calls["call"] < 50 * 1_000
    assert calls["c_call"] < 55 * 1_000


@pytest.mark.slow
@pytest.mark.long_for("json")
def test_excess_lines_are_dropped_and_counted(printing: Printing) -> None:
    for number in range(60_000):
        print(f"{number:099}", file=printing.stream if number % 100 else printing.errors)
    end_lines(printing.job)
    printing.kept.lines.end(printing.job)
    for texts, why in ((printing.logged(), "left out here"), (printing.kept.texts(), "dropped here")):
        notes = re.findall(rf"([\d,]+) lines (?:\([\d,]+ bytes\) )?were {why}", "\n".join(texts))
        kept = len(texts) - len(notes)
        assert 9_000 <= kept <= 30_000
        assert sum(int(note.replace(",", "")) for note in notes) + kept == 60_000  # several if printing is slow


def test_a_line_that_is_too_long_remains_one_line(printing: Printing) -> None:
    """The arguments of `print` after the first, and its end, used to be lines of their own."""
    print("A" * 25_000, 0, "b" * 11_000, file=printing.stream)
    print("after", file=printing.stream)
    end_lines(printing.job)
    printing.kept.lines.end(printing.job)
    first, second = printing.kept.texts()
    assert (first[:9_000], second) == ("A" * 9_000, "after")


def test_lines_printed_fast_appear_soon_and_in_order(printing: Printing) -> None:
    for number in range(700):
        print(f"out {number}", file=printing.stream)
        print(f"err {number}", file=printing.errors)
    wanted = [f"{name} {number}" for number in range(700) for name in ("out", "err")]
    eventually(lambda: len(printing.logged()) == len(wanted), "all lines, though nothing is printed any more")
    assert [found[0] for line in printing.logged() if (found := re.search(r"(out|err) \d+", line))] == wanted
    assert printing.kept.texts() == wanted
    print("ö\udcff", file=printing.stream)
    assert eventually(printing.kept.texts) == ["ö\\udcff"]
    with pytest.raises(TypeError):
        printing.stream.write(b"x")  # type: ignore[arg-type]


def test_a_fork_prints_only_its_own_lines(printing: Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        print(number, file=printing.stream)
    if (child := os.fork()) == 0:
        monkeypatch.setattr(printed, "is_fork", lambda: True)
        task_output._forked()
        print("from the fork", file=printing.stream)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    end_lines(printing.job)
    assert len(printing.logged()) == 301
