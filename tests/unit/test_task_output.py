"""Output printed by tasks becomes log lines with the task's name, whether or not the log is read."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from orchestrator.domain.tasks.task import Dispatch
from orchestrator.log_format import JsonFormatter, TextFormatter
from orchestrator.nonblocking_log import NonblockingHandler
from orchestrator.sdk.tasks.context import enter_task
from orchestrator.telemetry import LOGGER_NAME
from orchestrator.terminal_safe import terminal_safe
from orchestrator.workers.reporting import task_output
from orchestrator.workers.reporting.task_output import TaskFields, TaskOutput, TaskStream, end_lines
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.task_runtime import JobRuntime

ID = "61616161-6161-6161-6161-616161616161"
Printed = tuple[io.TextIOWrapper, Callable[[], list[str]]]


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job(Dispatch(b"a" * 16, 2, "bake", b"", "ovens"), Bundle("", "", "", 1), 0, 0.0)
    enter_task(JobRuntime(job, None))  # type: ignore[arg-type]
    yield job
    enter_task(None)


@pytest.fixture
def printed() -> Iterator[Printed]:
    reader, writer = os.pipe()
    handler = NonblockingHandler(writer)
    handler.setFormatter(TextFormatter())
    logger = logging.getLogger(LOGGER_NAME)
    before, logger.handlers[:], logger.propagate = logger.handlers[:], [handler], False
    task_output._exempt_log_handlers()
    os.set_blocking(reader, False)

    def lines() -> list[str]:
        try:
            return os.read(reader, 1 << 20).decode().splitlines()
        except BlockingIOError:
            return []

    yield TaskStream(TaskOutput("stdout", handler)), lines
    logger.handlers[:], logger.propagate = before, True
    handler.close()
    os.close(reader)
    os.close(writer)


def test_a_line_is_logged_at_its_end_with_its_task(printed: Printed, job: Job) -> None:
    stream, lines = printed
    print("half a", end="", file=stream, flush=True)
    assert lines() == []
    print(" line\n\nand", "another", file=stream)
    print("\r10 %\r90 %\r100 %", file=stream)
    assert [line.partition("INFO    ")[2] for line in lines()] == [
        f"bake[{ID}] half a line",
        f"bake[{ID}] and another",
        f"bake[{ID}] 100 %",
    ]
    print("left", end="", file=stream)
    end_lines(job)
    end_lines(job)
    assert [line.endswith("] left") for line in lines()] == [True]


def test_lines_of_different_threads_are_not_mixed(printed: Printed) -> None:
    stream, lines = printed
    print("mine", end="", file=stream)
    thread = threading.Thread(target=lambda: print("theirs", file=stream))
    thread.start()
    thread.join()
    print(" too", file=stream)
    assert lines() == ["theirs", "mine too"]
    print("no newline", end="", file=stream, flush=True)
    assert lines() == ["no newline"]


def test_terminal_commands_are_removed_from_output(printed: Printed, job: Job) -> None:
    stream, lines = printed
    for _ in range(2):
        print("\x1b[2Joh\x9b", file=stream)
        enter_task(None)
    text = "\n".join(lines())
    assert terminal_safe(text) == text


def test_a_custom_log_handler_keeps_its_format(printed: Printed, job: Job) -> None:
    stream, lines = printed
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(task_name)s %(attempt)s %(queue)s %(user)s: %(message)s"))
    handler.addFilter(TaskFields())
    logger = logging.Logger("own")
    logger.addHandler(handler)
    logger.warning("hot", extra={"user": "ann"})
    assert lines() == ["bake 2 ovens ann: hot"]
    logger.warning("mine", extra={"user": "ann", "queue": "what a task calls so"})
    assert lines() == ["bake 2 what a task calls so ann: mine"]
    enter_task(None)
    logger.warning("cold", extra={"user": "bob"})
    assert lines() == ["   bob: cold"]


def test_bytes_and_long_texts_are_printed(printed: Printed, job: Job) -> None:
    stream, lines = printed
    stream.buffer.write(b"raw \xff\n")
    stream.write("x" * 20_000)
    first, second = lines()
    assert first.endswith("] raw \\xff")
    assert second.endswith("x" * 20_000)


def _wrap(stream: io.TextIOWrapper) -> None:
    print("wrapped", file=io.TextIOWrapper(stream.buffer, encoding="utf-8"))  # the wrapper is collected, and so closed


def _leave(stream: io.TextIOWrapper) -> None:
    with stream:
        print("left", file=stream)


@pytest.mark.parametrize(
    "end",
    [
        lambda stream: stream.close(),
        lambda stream: stream.buffer.close(),
        lambda stream: stream.detach().close(),
        pytest.param(
            lambda stream: io.BufferedWriter(stream.buffer).close(),
            # For its second close, when it is collected: the file below is still open. Python reports this from 3.13
            # on.
            marks=pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning"),
        ),
        lambda stream: stream.reconfigure(encoding="ascii", errors="strict"),
        _wrap,
        _leave,
    ],
    ids=["close", "buffer", "detach", "buffered", "reconfigure", "wrap", "leave"],
)
def test_no_task_can_close_the_shared_output(
    printed: Printed, job: Job, end: Callable[[io.TextIOWrapper], object]
) -> None:
    stream, lines = printed
    end(stream)
    print("still here: ö", file=stream)
    stream.buffer.write(b"and here\n")
    assert not stream.closed
    assert [line.rpartition("] ")[2] for line in lines()][-2:] == ["still here: ö", "and here"]


def test_a_closed_standard_output_is_replaced(printed: Printed, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, _ = printed
    monkeypatch.setattr(task_output, "_streams", {"stdout": stream})
    monkeypatch.setattr(sys, "stdout", other := io.StringIO())
    end_lines(job)
    assert sys.stdout is other, "an open one may be what the application has chosen"
    other.close()
    end_lines(job)
    assert sys.stdout is stream
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    sys.stdout.detach()
    end_lines(job)
    assert sys.stdout is stream
    monkeypatch.delattr(sys, "stdout")
    end_lines(job)
    assert sys.stdout is stream
    monkeypatch.setattr(sys, "stdout", None)
    end_lines(job)
    assert sys.stdout is stream


def test_colors_are_added_around_sanitized_messages() -> None:
    record = logging.LogRecord("orchestrator.worker", logging.ERROR, "", 0, "no\x1b[2J \x1b[1mbold\nforged", None, None)
    record.task_name, record.task_id = "ba\nke", ID
    text = TextFormatter(brief=True, colours=True).format(record)
    assert text[:4] == "\x1b[2m"
    assert "\x1b[31mERROR\x1b[0m \x1b[36mba ke\x1b[0m\x1b[2m[61616161-6161-6161]\x1b[0m " in text
    assert text.endswith("no�[2J \x1b[1mbold\x1b[0m\n    forged")
    assert "\x1b" not in TextFormatter().format(record)


def test_a_json_line_has_no_control_characters() -> None:
    try:
        raise ValueError("a\nb\x1b[2J")
    except ValueError as error:
        failure = (type(error), error, error.__traceback__)
    record = logging.LogRecord("shop", logging.INFO, "", 0, "%s\u202e\n", ("x",), failure)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert terminal_safe(line) == line
    found = json.loads(line)
    assert (found["message"], found["level"], found["logger"]) == ("x\u202e\n", "INFO", "shop")
    assert found["exc"].endswith("ValueError: a\nb\x1b[2J")
    assert set(found) == {"time", "level", "logger", "pid", "message", "exc"}


def test_json_lines_contain_extra_fields() -> None:
    logger = logging.Logger("shop")
    record = logger.makeRecord("shop", 20, "", 0, "paid", (), None, extra={"amount": 5, "level": "mine", "by": {1}})
    found = json.loads(JsonFormatter().format(record))
    assert (found["amount"], found["level"], found["by"]) == (5, "INFO", "{1}")
