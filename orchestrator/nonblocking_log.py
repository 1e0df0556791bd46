"""A log handler that never blocks.

A write to a full pipe, a stopped terminal or a hanging journal blocks until somebody reads. If a heartbeat waits for
it, the process counts as dead. So lines that cannot be written at once are buffered in order. When the buffer is full,
further lines are dropped and counted.
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

_MAX_BUFFER = 2_000_000
"""Bytes of buffered lines, at most."""
_FLUSH_TIMEOUT = 1.0
"""Seconds to write buffered lines when the process ends."""


class NonblockingHandler(logging.Handler):
    """Writes to a file descriptor without waiting."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self._output: _Output | None = None
        self._buffer: deque[tuple[bytes, int]] = deque()
        """Encoded text, and its number of lines."""
        self._size = 0
        self._dropped = 0
        self._process = os.getpid()
        self._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or buffer it."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001  # logging's default error output to stderr could block
            line = f"a line of this log cannot be formatted: {record.msg!r}: {error!r}"
        self._enqueue(f"{line}\n")
        self._send()

    def write(self, text: str, lines: int = 1) -> None:
        """Write complete lines that do not come from a log record, or buffer them."""
        self.acquire()
        try:
            self._enqueue(text, lines)
            self._send()
        finally:
            self.release()

    @property
    def is_behind(self) -> bool:
        """Whether lines are buffered."""
        return bool(self._buffer)

    def retry(self) -> None:
        """Write as many buffered lines as possible now."""
        if not self._buffer:
            return
        self.acquire()
        try:
            self._send()
        finally:
            self.release()

    def flush(self) -> None:
        """Write buffered lines at the end of the process, within a short timeout."""
        give_up_at = time.monotonic() + _FLUSH_TIMEOUT
        self.retry()
        while self._buffer and time.monotonic() < give_up_at:
            select.select([], [self.descriptor], [], give_up_at - time.monotonic())
            self.retry()

    def close(self) -> None:
        """Close the duplicate of the descriptor. The original stays open.

        The next line opens it again: `logging.config` closes all existing handlers, and a closed descriptor's number
        may by then belong to a connection.
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

    def _enqueue(self, text: str, lines: int = 1) -> None:
        if self._process != os.getpid():  # after a fork, the parent writes its buffer itself
            self._process = os.getpid()
            self._buffer.clear()
            self._size = 0
        if self._size >= _MAX_BUFFER:
            self._dropped += lines
        else:
            self._append(text.encode(errors="backslashreplace"), lines)

    def _append(self, data: bytes, lines: int) -> None:
        self._buffer.append((data, lines))
        self._size += len(data)

    def _send(self) -> None:
        while self._buffer or self._dropped:
            if not self._buffer:
                self._append(f"{self._dropped} lines of this log were dropped: its output was not read\n".encode(), 1)
                self._dropped = 0
            data, lines = self._buffer[0]
            written = self._open().write(data)
            self._size -= written
            if written < len(data):
                self._buffer[0] = data[written:], lines
                return
            self._buffer.popleft()


_opened: WeakSet[NonblockingHandler] = WeakSet()


def nonblocking_handlers() -> list[NonblockingHandler]:
    """Return all open handlers of this process."""
    return list(_opened)


def nonblocking(descriptor: int) -> NonblockingHandler:
    """Return the handler for a descriptor. Sharing it keeps all lines in order."""
    return next((h for h in _opened if h.descriptor == descriptor), None) or NonblockingHandler(descriptor)


class _Output:
    def __init__(self, write: Callable[[bytes], int], close: Callable[[], None] = lambda: None) -> None:
        self._write = write
        self.close = close

    def write(self, data: bytes) -> int:
        try:
            return self._write(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)  # discard the data: the other end is closed


def _open(descriptor: int) -> _Output:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        connection = socket.socket(fileno=os.dup(descriptor))
        return _Output(lambda data: connection.send(data, socket.MSG_DONTWAIT), connection.close)
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        # O_NONBLOCK on the original would affect all processes that share it, also tasks that print.
        try:
            reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # not Linux, or the file of another user
            return _Output(lambda data: _write_if_ready(descriptor, data))
        return _Output(lambda data: os.write(reopened, data), lambda: os.close(reopened))
    # Duplicate it: if a task closes the descriptor, its number may be reused for a connection.
    copy = os.dup(descriptor)
    return _Output(lambda data: os.write(copy, data), lambda: os.close(copy))


def _write_if_ready(descriptor: int, data: bytes) -> int:
    """Write in pieces of PIPE_BUF bytes, which never block on a ready pipe unless others fill it at the same time."""
    written = 0
    while written < len(data) and select.select([], [descriptor], [], 0)[1]:
        written += os.write(descriptor, data[written : written + select.PIPE_BUF])
    return written


def flush_within(seconds: float, *streams: Any) -> None:
    """Flush streams, but wait at most this many seconds."""

    def flush() -> None:
        for stream in streams:
            with contextlib.suppress(Exception):
                stream.flush()

    thread = threading.Thread(target=flush, name="flush", daemon=True)
    thread.start()
    thread.join(seconds)
