"""Write a log that nobody need read.

A write to a full pipe, a stopped terminal or a journal that hangs waits until somebody reads. A process whose heartbeat
waits with it counts as dead. So lines that cannot be written at once are kept for a while, in order, and further ones
are dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

_MOST_BYTES = 2_000_000
"""Bytes of lines that are kept until they can be written."""
_LAST_LINES = 1.0
"""Seconds that the last lines of a process get."""


class NonblockingHandler(logging.Handler):
    """Writes to a file descriptor, and never waits for it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self._output: _Output | None = None
        self._waiting: deque[tuple[bytes, int]] = deque()
        """Lines, and how many they are."""
        self._size = 0
        self._dropped = 0
        self._process = os.getpid()
        self._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or keep it for later."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001  # the usual complaint goes to stderr, and would wait there
            line = f"a line of this log cannot be shown: {record.msg!r}: {error!r}"
        self._keep(f"{line}\n")
        self._send()

    def write(self, text: str, lines: int = 1) -> None:
        """Write so many whole lines that are nobody's record, or keep them for later."""
        self.acquire()
        try:
            self._keep(text, lines)
            self._send()
        finally:
            self.release()

    @property
    def is_behind(self) -> bool:
        """Say whether something waits to be written."""
        return bool(self._waiting)

    def retry(self) -> None:
        """Write what could not be written before, as far as that is possible now."""
        if not self._waiting:
            return
        self.acquire()
        try:
            self._send()
        finally:
            self.release()

    def flush(self) -> None:
        """Write what was kept, at the end of the process, and give it a moment."""
        give_up_at = time.monotonic() + _LAST_LINES
        self.retry()
        while self._waiting and time.monotonic() < give_up_at:
            select.select([], [self.descriptor], [], give_up_at - time.monotonic())
            self.retry()

    def close(self) -> None:
        """Let go of what was opened; what was given stays open.

        It is opened again if a line comes: `logging.config` closes all handlers that there are, and what was opened
        may be a connection to somebody by then.
        """
        _opened.discard(self)
        if self._output is not None:
            self._output.close()
            self._output = None
        super().close()

    def _open(self) -> _Output:
        if self._output is None:
            self._output = _open(self.descriptor)
            _opened.add(self)
        return self._output

    def _keep(self, text: str, lines: int = 1) -> None:
        if self._process != os.getpid():  # a fork: what was kept is written by the process that it is a copy of
            self._process = os.getpid()
            self._waiting.clear()
            self._size = 0
        if self._size >= _MOST_BYTES:
            self._dropped += lines
        else:
            self._append(text.encode(errors="backslashreplace"), lines)

    def _append(self, data: bytes, lines: int) -> None:
        self._waiting.append((data, lines))
        self._size += len(data)

    def _send(self) -> None:
        while self._waiting or self._dropped:
            if not self._waiting:
                self._append(f"{self._dropped} lines of this log were dropped: nobody read it\n".encode(), 1)
                self._dropped = 0
            data, lines = self._waiting[0]
            written = self._open().write(data)
            self._size -= written
            if written < len(data):
                self._waiting[0] = data[written:], lines
                return
            self._waiting.popleft()


_opened: WeakSet[NonblockingHandler] = WeakSet()


def nonblocking_handlers() -> list[NonblockingHandler]:
    """Return all of this process."""
    return list(_opened)


def nonblocking(descriptor: int) -> NonblockingHandler:
    """Return the one that writes to a descriptor, so that all lines stay in order."""
    return next((one for one in _opened if one.descriptor == descriptor), None) or NonblockingHandler(descriptor)


class _Output:
    """Writes what it can without waiting."""

    def __init__(self, write: Callable[[bytes], int], close: Callable[[], None] = lambda: None) -> None:
        self._write = write
        self.close = close

    def write(self, data: bytes) -> int:
        """Return how many bytes were written."""
        try:
            return self._write(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)  # nobody will ever read it: the other end is closed


def _open(descriptor: int) -> _Output:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        line = socket.socket(fileno=os.dup(descriptor))
        return _Output(lambda data: line.send(data, socket.MSG_DONTWAIT), line.close)
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        # Opened again, and not merely made non-blocking: that would hold for all that share it, tasks that print too.
        try:
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # another system, or another user's
            return _Output(lambda data: _write_if_ready(descriptor, data))
        return _Output(lambda data: os.write(again, data), lambda: os.close(again))
    # A copy: a task that closes the descriptor itself may make it that of a connection, in which no line may stand.
    copy = os.dup(descriptor)
    return _Output(lambda data: os.write(copy, data), lambda: os.close(copy))


def _write_if_ready(descriptor: int, data: bytes) -> int:
    """Write as much at a time as a pipe that is ready takes for certain, unless others fill it at this very moment."""
    written = 0
    while written < len(data) and select.select([], [descriptor], [], 0)[1]:
        written += os.write(descriptor, data[written : written + select.PIPE_BUF])
    return written


def flush_within(seconds: float, *streams: Any) -> None:
    """Flush streams, but wait no longer than this for somebody to read them."""

    def flush() -> None:
        for stream in streams:
            with contextlib.suppress(Exception):
                stream.flush()

    thread = threading.Thread(target=flush, name="flush", daemon=True)
    thread.start()
    thread.join(seconds)
