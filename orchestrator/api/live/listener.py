"""A listener of a stream, with a bounded buffer of events.

If a listener reads so slowly that the buffer overflows, the buffer is dropped. When it reads again, it gets a snapshot,
and goes on from there.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

from orchestrator.api.live.subjects import Subject
from orchestrator.transport.changes import NOWHERE
from orchestrator.transport.codec import ProgressMark

_MOST_BYTES = 1_000_000
"""That may wait for one listener; listeners of the same subject share them."""
_MOST_HELD = 4 * _MOST_BYTES
"""While its snapshot is read, which takes a while when thousands of listeners come back at once."""


END = "end"
_ENTRY = r"[0-9]{1,19}-[0-9]{1,19}"
_CURSOR = re.compile(rf"([0-9a-z-]{{1,80}}):({_ENTRY})(?:~({_ENTRY}))?")


class Cursor(NamedTuple):
    """Where a listener stands: the id of the last event that it has got.

        12-1-9f86d081:1731720000000-0~1731719999000-2

    is the generation of the stream of changes, the entry in it, and, for a task that has said something, the entry in
    its log. The last event of all has the id `end`.
    """

    generation: str
    entry: str
    log: str = NOWHERE

    def __str__(self) -> str:
        if self.entry == NOWHERE:
            return ""  # there is nothing to go on from
        return f"{self.generation}:{self.entry}" + (f"~{self.log}" if self.log != NOWHERE else "")


def parse(text: str) -> Cursor | None:
    """Return the cursor that an id of an event says, or None if it says none."""
    found = _CURSOR.fullmatch(text)
    return Cursor(found[1], found[2], found[3] or NOWHERE) if found else None


class Listener:
    """The end of one stream of events, in this process."""

    def __init__(self, subject: Subject, since: Cursor) -> None:
        self.subject = subject
        self.since = since
        """It is given what comes after this."""
        self.log = self._sent_log = since.log
        """How far it has been given the log of its task."""
        self.mark: ProgressMark | None = None
        """The last progress that it was given."""
        self.age = (-1, 0)
        """How far its task had come at the last event."""
        self.hearing = asyncio.Lock()
        self.will_hear = False
        self.turn = 0
        """How often it has begun."""
        self.end: object = None
        """How it has ended, as far as that came while it had not begun yet."""
        self.is_ending = False
        self.is_lagging = False
        """It was too slow, and what waited for it was thrown away."""
        self.is_closed = False
        self._waiting: list[bytes] = []
        self._size = 0
        self._held: list[bytes] | None = []
        """Events that came before its snapshot."""
        self._has_more = asyncio.Event()
        self._has_room = asyncio.Event()

    @property
    def is_held(self) -> bool:
        """Say whether it is not known yet what it begins with."""
        return self._held is not None

    def hold(self, since: Cursor) -> int:
        """Give it nothing until it begins anew, from this cursor; return the number of that beginning."""
        self._waiting, self._size, self._held = [], 0, []
        self.since, self.log, self.is_lagging, self.end = since, self._sent_log, False, None
        self.turn += 1
        self._has_room.set()
        return self.turn

    def begin(self, said: bytes, *, is_whole: bool = False) -> None:
        """Give it what it begins with, however long, and then what has come meanwhile; nothing if it is whole."""
        held, self._held = self._held or [], None
        self._waiting.append(said)
        if not is_whole:
            self._waiting += held
        self._size = 0  # it is behind by no fault of its own
        self._has_more.set()
        self._has_room.set()

    async def give_line(self, said: bytes) -> None:
        """Have a line of a log sent once there is room: it is kept elsewhere, and need not be thrown away."""
        if self._size > _MOST_BYTES // 2 and not self.is_closed and not self.is_lagging:
            self._has_room.clear()
            await self._has_room.wait()
        self.give(said)

    def give(self, said: bytes) -> None:
        if not said or self.is_closed or self.is_lagging:
            return
        self._size += len(said)
        if self._size > (_MOST_BYTES if self._held is None else _MOST_HELD):
            self.is_lagging = True
            self._has_room.set()
            self._waiting, self.log = [], self._sent_log
            if self._held is not None:
                self._held = []
                return  # and when it has begun, it begins once more
        elif self._held is not None:
            self._held.append(said)
            return
        else:
            self._waiting.append(said)
        self._has_more.set()

    def close(self) -> None:
        """Send what there is, and then no more."""
        self.is_closed = True
        self._has_more.set()
        self._has_room.set()

    async def take(self, seconds: float) -> bytes:
        """Return what is to be sent, or nothing if there was nothing for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_more.wait()
        except TimeoutError:
            return b""
        self._has_more.clear()
        said = b"".join(self._waiting)
        self._waiting, self._size, self._sent_log = [], 0, self.log
        self._has_room.set()
        return said

    @property
    def is_new_to_task(self) -> bool:
        """Say whether its task has said nothing yet, as far as it knows."""
        return self.log == NOWHERE and self.mark is None
