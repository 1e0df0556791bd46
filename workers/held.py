"""The attempts that a process holds, in memory that it shares with its parent.

The child writes a slot when it receives a task and clears it when the report is known to be applied. The parent
reads them for each heartbeat, however busy the child is, and still has them when the child is dead.
"""

from __future__ import annotations

import mmap
import struct

from orchestrator.transport.codec import ATTEMPT_SIZE

_HEADER = 16
_NUMBERS = struct.Struct("<II")
"""Slots ever used, and tasks running now."""
_ATTEMPT = struct.Struct(">I")


class HeldAttempts:
    """A table of attempts in shared memory; one writer, one reader."""

    def __init__(self, capacity: int = 20_000) -> None:
        self.capacity = capacity
        self._memory = mmap.mmap(-1, _HEADER + capacity * ATTEMPT_SIZE)
        self._free: list[int] = []
        self._used = 0
        self._running = 0

    # -- the child

    def add(self, identifier: bytes, attempt: int) -> int:
        """Note an attempt; return its slot."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._used
            self._used += 1
            self._write_header()
        place = _HEADER + slot * ATTEMPT_SIZE
        self._memory[place : place + 16] = identifier
        _ATTEMPT.pack_into(self._memory, place + 16, attempt)  # last: a slot without attempt is empty
        return slot

    def drop(self, slot: int) -> None:
        """Forget the attempt in a slot."""
        _ATTEMPT.pack_into(self._memory, _HEADER + slot * ATTEMPT_SIZE + 16, 0)
        self._free.append(slot)

    @property
    def room(self) -> int:
        """Return how many more attempts fit."""
        return self.capacity - self._used + len(self._free)

    def show_running(self, count: int) -> None:
        """Say how many tasks are running."""
        if count != self._running:
            self._running = count
            self._write_header()

    def _write_header(self) -> None:
        _NUMBERS.pack_into(self._memory, 0, self._used, self._running)

    # -- the parent

    def snapshot(self) -> tuple[bytes, int]:
        """Return the attempts as heartbeats carry them, and how many tasks are running."""
        used, running = _NUMBERS.unpack_from(self._memory, 0)
        table = self._memory[_HEADER : _HEADER + used * ATTEMPT_SIZE]
        empty = b"\0\0\0\0"
        slots = (table[start : start + ATTEMPT_SIZE] for start in range(0, len(table), ATTEMPT_SIZE))
        return b"".join(slot for slot in slots if slot[16:] != empty), running
