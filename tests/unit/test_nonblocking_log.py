"""A log whose output is not read blocks no process."""

from __future__ import annotations

import logging
import logging.config
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator import nonblocking_log
from orchestrator.nonblocking_log import NonblockingHandler


def pipe() -> tuple[int, int]:
    return os.pipe()


def sockets() -> tuple[int, int]:
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


@pytest.fixture(params=[pipe, sockets], ids=["pipe", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    make: Callable[[], tuple[int, int]] = request.param
    reader, writer = make()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def logger_of(handler: logging.Handler) -> logging.Logger:
    logger = logging.Logger("unread")
    logger.addHandler(handler)
    return logger


def read_all(reader: int) -> list[str]:
    os.set_blocking(reader, False)
    found = b""
    try:
        while data := os.read(reader, 1 << 20):
            found += data
    except BlockingIOError:
        pass
    return found.decode().splitlines()


def test_a_long_line_is_written_at_once_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `/proc`, a pipe cannot be opened again; all but the first 4 kB of a line waited for the next line."""
    reader, writer = os.pipe()
    monkeypatch.setattr(nonblocking_log, "os", SimpleNamespace(**vars(os) | {"open": _refuse}))
    logger_of(NonblockingHandler(writer)).warning("x" * 20_000)
    assert read_all(reader) == ["x" * 20_000]
    for _ in range(9):
        logger_of(NonblockingHandler(writer)).warning("x" * 20_000)  # more than a pipe holds, without blocking
    os.close(reader)
    os.close(writer)


def _refuse(*_: object) -> int:
    raise FileNotFoundError


@pytest.mark.slow
def test_unread_lines_are_kept_then_dropped_and_counted(ends: tuple[int, int]) -> None:
    reader, writer = ends
    handler = NonblockingHandler(writer)
    logger = logger_of(handler)
    for number in range(20_000):
        logger.warning("%d %s", number, "x" * 200)
    assert os.get_blocking(writer), "for everybody else it is what it was"
    lines = []
    while more := read_all(reader):
        lines += more
        handler.retry()
    numbers = [int(line.split()[0]) for line in lines[:-1]]
    assert numbers == list(range(len(numbers))), "whole and in order"
    assert lines[-1] == f"{20_000 - len(numbers)} lines of this log were dropped: its output was not read"
    logger.warning("later")
    assert read_all(reader) == ["later"]
    handler.close()


def test_the_end_of_a_process_waits_only_briefly_for_its_log(ends: tuple[int, int]) -> None:
    _, writer = ends
    handler = NonblockingHandler(writer)
    logger = logger_of(handler)
    for _ in range(2_000):
        logger.warning("x" * 500)
    handler.flush()
    handler.close()


def test_a_closed_reader_raises_no_error() -> None:
    reader, writer = os.pipe()
    handler = NonblockingHandler(writer)
    os.close(reader)
    logger_of(handler).warning("anybody there?")
    handler.flush()
    handler.close()
    os.close(writer)


def test_a_handler_closed_by_logging_config_writes_to_no_other_descriptor(ends: tuple[int, int]) -> None:
    reader, writer = ends
    handler = NonblockingHandler(writer)
    logger = logger_of(handler)
    logger.warning("before")
    logging.config.dictConfig({"version": 1, "incremental": False, "disable_existing_loggers": False})
    stranger, login_limits = os.pipe()  # reuses the freed descriptor numbers
    logger.warning("after")
    os.set_blocking(stranger, False)
    with pytest.raises(BlockingIOError):
        os.read(stranger, 100)
    assert read_all(reader) == ["before", "after"]
    os.close(stranger)
    os.close(login_limits)
    handler.close()


def test_lines_are_written_to_a_file_with_other_writers(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        logger = logger_of(NonblockingHandler(file.fileno()))
        os.write(file.fileno(), b"first\n")
        logger.warning("second \udcff")
        logger.warning("%d", "third")
        os.write(file.fileno(), b"fourth\n")
    first, second, third, fourth = path.read_text().splitlines()
    assert (first, second, fourth) == ("first", "second \\udcff", "fourth")
    assert third.startswith("a line of this log cannot be formatted: '%d': TypeError")


def test_lines_reach_their_file_although_its_descriptor_was_replaced(tmp_path: Path) -> None:
    given = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    handler = NonblockingHandler(given)
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    os.dup2(other, given)  # closes the descriptor, and opens another file as it
    logger_of(handler).warning("a line")
    handler.close()
    os.close(given)
    os.close(other)
    assert (tmp_path / "log").read_text() == "a line\n"
    assert (tmp_path / "other").read_text() == ""
