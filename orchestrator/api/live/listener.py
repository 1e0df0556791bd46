"""A listener of a stream, with a bounded buffer of events.

If a listener reads so slowly that the buffer overflows, the buffer is dropped. Its next read restarts it with a
snapshot.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

from orchestrator.api.live.subjects import Subject
from orchestrator.transport.changes import NOWHERE
from orchestrator.transport.codec import ProgressMark

_MAX_BUFFER = 1_000_000
"""Bytes buffered for one listener, at most. Listeners of one subject share the buffered objects."""
_MAX_EARLY_BUFFER = 4 * _MAX_BUFFER
"""Bytes buffered while a listener waits for its snapshot. That takes a while when thousands reconnect at once."""


END = "end"
_ENTRY = r"[0-9]{1,19}-[0-9]{1,19}"
_CURSOR = re.compile(rf"([0-9a-z-]{{1,80}}):({_ENTRY})(?:~({_ENTRY}))?")


class Cursor(NamedTuple):
    """The position of a listener: the id of the last event that was sent to it.

        12-1-9f86d081:1731720000000-0~1731719999000-2

    consists of the generation of the stream of changes, the entry in that stream, and the entry in the task's log if
    the task has logged. The end event has the id `end`.
    """

    generation: str
    entry: str
    log: str = NOWHERE

    def __str__(self) -> str:
        if self.entry == NOWHERE:
            return ""  # the stream is empty: there is no event to resume from
        return f"{self.generation}:{self.entry}" + (f"~{self.log}" if self.log != NOWHERE else "")


def parse(text: str) -> Cursor | None:
    """Return the cursor in the id of an event; None if the id is malformed."""
    match = _CURSOR.fullmatch(text)
    return Cursor(match[1], match[2], match[3] or NOWHERE) if match else None


class Listener:
    """One client of an event stream, in this process."""

    def __init__(self, subject: Subject, since: Cursor) -> None:
        self.subject = subject
        self.since = since
        """The cursor after which events are sent."""
        self.log = self._sent_log = since.log
        """The last entry of the task's log in the buffer; `_sent_log` is the last one sent."""
        self.progress: ProgressMark | None = None
        """The task's last progress in the buffer."""
        self.version = (-1, 0)
        """The version of the task at the last event: attempt and state."""
        self.log_lock = asyncio.Lock()
        self.is_log_read_due = False
        self.restarts = 0
        """The number of restarts with a new snapshot."""
        self.early_end: object = None
        """The end, if the task or run ended before the snapshot was read."""
        self.is_ending = False
        self.is_lagging = False
        """The client was too slow, and its buffer was dropped."""
        self.is_closed = False
        self._buffer: list[bytes] = []
        self._size = 0
        self._early_events: list[bytes] | None = []
        """Events that arrived while the snapshot was read; None once it was sent."""
        self._has_more = asyncio.Event()
        self._has_room = asyncio.Event()

    @property
    def is_starting(self) -> bool:
        """Return whether the snapshot is still being read."""
        return self._early_events is not None

    def restart(self, since: Cursor) -> int:
        """Drop the buffer, and collect events from this cursor on until `begin`. Return the number of the restart."""
        self._buffer, self._size, self._early_events = [], 0, []
        self.since, self.log, self.is_lagging, self.early_end = since, self._sent_log, False, None
        self.restarts += 1
        self._has_room.set()
        return self.restarts

    def begin(self, snapshot: bytes, *, is_complete: bool = False) -> None:
        """Send the snapshot, then the events that arrived while it was read. With `is_complete` no events follow."""
        early, self._early_events = self._early_events or [], None
        self._buffer.append(snapshot)
        if not is_complete:
            self._buffer += early
        self._size = 0  # a snapshot may be larger than the buffer
        self._has_more.set()
        self._has_room.set()

    async def send_log_line(self, event: bytes) -> None:
        """Send a log line once the buffer has room. Log lines are stored, so they can wait instead of being dropped."""
        if self._size > _MAX_BUFFER // 2 and not self.is_closed and not self.is_lagging:
            self._has_room.clear()
            await self._has_room.wait()
        self.send(event)

    def send(self, event: bytes) -> None:
        if not event or self.is_closed or self.is_lagging:
            return
        self._size += len(event)
        if self._size > (_MAX_BUFFER if self._early_events is None else _MAX_EARLY_BUFFER):
            self.is_lagging = True
            self._has_room.set()
            self._buffer, self.log = [], self._sent_log
            if self._early_events is not None:
                self._early_events = []
                return  # begin() sends the snapshot, and the next read restarts the listener
        elif self._early_events is not None:
            self._early_events.append(event)
            return
        else:
            self._buffer.append(event)
        self._has_more.set()

    def close(self) -> None:
        """Send the rest of the buffer, and then end the stream."""
        self.is_closed = True
        self._has_more.set()
        self._has_room.set()

    async def next_chunk(self, seconds: float) -> bytes:
        """Return the buffered events, or nothing after so many seconds without any."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_more.wait()
        except TimeoutError:
            return b""
        self._has_more.clear()
        chunk = b"".join(self._buffer)
        self._buffer, self._size, self._sent_log = [], 0, self.log
        self._has_room.set()
        return chunk

    @property
    def has_no_logs(self) -> bool:
        """Return whether this listener has received no log lines and no progress of its task."""
        return self.log == NOWHERE and self.progress is None
