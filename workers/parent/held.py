"""The table of attempts that a process holds, in memory shared with its parent.

The child writes a slot when it receives a task, and clears it when the report is known to be applied and the code has
ended. The parent reads the table for each heartbeat, however busy the child is, and still has it when the child is
dead. Beside each attempt is its deadline, and whether its policy allows a retry after a timeout: the parent enforces
them where code that never releases the interpreter stops the child's own clock. The parent also writes when it last
ran: a child of a stopped parent begins no attempt that another worker may have by now. The table also holds how the
child ended, because any task can end the process with any exit code.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.transport.codec import ATTEMPT_SIZE, encode, unpack_attempts
from orchestrator.transport.worker import WorkerStreams

_HEADER = 48
_NUMBER = struct.Struct("<I")
_NUMBERS = struct.Struct("<II")
"""Slots in use and running tasks. Each number is written by a thread of its own."""
_RUNNING_OFFSET = 4
_PULSE = struct.Struct("<dd")
"""Time of the last tick of the child's clock, and the recent load of the process (0 to 1)."""
_PULSE_OFFSET = 8
_PARENT_BEAT = struct.Struct("<d")
"""Time when the parent last ran."""
_PARENT_BEAT_OFFSET = 24
_FAREWELL_OFFSET = 32
_HANDED_BACK_OFFSET = 36
_EXECUTING_OFFSET = 40
_ATTEMPT = struct.Struct(">I")
_LIMIT = struct.Struct("<dd?")
"""Deadline of an attempt, its timeout, and whether it may be retried after a timeout."""
_NO_LIMIT = 0.0
_ENDED = -1.0
"""Instead of a deadline: the leader knows that the attempt has ended, and only its code goes on."""
_BLOCKING = -2.0
"""Instead of a deadline: the code of the attempt blocks the event loop, or may have closed it."""
_TURN = -3.0
"""Instead of a deadline: the attempt is a workflow turn; the timeout field holds the id of its thread."""


class Farewell(IntEnum):
    """How a process ended."""

    NONE = 0
    """The process was killed, or ended by a task."""
    FINISHED = 1
    UNFINISHED = 2
    """Tasks still ran when the drain timeout was over. They end with the process, and the parent hands them back."""
    UNUSABLE = 3
    """The application does not exist, so restarting the process would not help."""
    BROKEN = 4
    """The application cannot be imported. Restarting the process helps only after a file has changed."""


class Limit(NamedTuple):
    """An attempt with a deadline, `timeout` seconds after it began."""

    id: bytes
    attempt: int
    deadline: float
    timeout: float
    retryable: bool
    """Whether the retry policy allows a retry after a timeout, if retries are left."""


class HeldAttempts:
    """A table of attempts in shared memory, with one writing and one reading process."""

    def __init__(self, capacity: int = 20_000) -> None:
        self.capacity = capacity
        self._limits = _HEADER + capacity * ATTEMPT_SIZE
        self._begun = self._limits + capacity * _LIMIT.size
        self._memory = mmap.mmap(-1, self._begun + capacity)
        self._free: list[int] = []
        self._limited: set[int] = set()
        """Slots with another limit than `_NO_LIMIT`."""
        self._used = 0
        self._running = 0
        self._add_lock = threading.Lock()
        """Lock for adding: tasks are received in one thread, executions in another."""

    # -- for the child

    def add(self, identifier: bytes, attempt: int) -> int:
        """Add an attempt. Return its slot."""
        return self.add_all([(identifier, attempt)])[0]

    def add_all(self, attempts: Sequence[tuple[bytes, int]]) -> list[int]:
        """Add attempts. Return their slots."""
        with self._add_lock:
            slots = [self._free.pop() for _ in range(min(len(attempts), len(self._free)))]
            if more := len(attempts) - len(slots):
                slots += range(self._used, self._used + more)
                self._set_used(self._used + more)
        for slot, (identifier, attempt) in zip(slots, attempts, strict=True):
            offset = _HEADER + slot * ATTEMPT_SIZE
            self._memory[offset : offset + 16] = identifier
            _ATTEMPT.pack_into(self._memory, offset + 16, attempt)  # last: a slot with attempt 0 is empty
        return slots

    def drop(self, *slots: int) -> None:
        """Clear slots."""
        memory, limited = self._memory, self._limited
        for slot in slots:
            _ATTEMPT.pack_into(memory, _HEADER + slot * ATTEMPT_SIZE + 16, 0)
            memory[self._begun + slot] = 0
            if slot in limited:
                self.unlimit(slot)
        self._free += slots

    def shrink(self) -> None:
        """Reset an empty table, so that the parent reads only slots in use.

        While all slots are free, nothing can be dropped, and the lock keeps attempts from being added.
        """
        with self._add_lock:
            if self._used and len(self._free) == self._used:
                self._free.clear()
                self._set_used(0)

    def mark_begun(self, slot: int) -> None:
        """Record that the code of an attempt may begin from now on."""
        self._memory[self._begun + slot] = 1

    def limit(self, slot: int, deadline: float, timeout: float, *, retryable: bool) -> None:
        """Record the deadline of an attempt, and whether it may be retried after a timeout."""
        self._write_limit(slot, deadline, timeout, retryable=retryable)

    def mark_turn(self, slot: int, thread: int) -> None:
        """Record that a slot holds a workflow turn, and the native id of its thread."""
        self._write_limit(slot, _TURN, float(thread))

    def unlimit(self, slot: int) -> None:
        """Remove the limit of an attempt."""
        self._write_limit(slot, _NO_LIMIT)

    def mark_ended(self, slot: int) -> None:
        """Record that the leader knows the end of an attempt whose code goes on."""
        self._write_limit(slot, _ENDED)

    def mark_blocking(self, slot: int) -> None:
        """Record that the code of an attempt blocks others in its process."""
        self._write_limit(slot, _BLOCKING)

    def write_farewell(self, farewell: Farewell) -> None:
        """Record how this process ended."""
        _NUMBER.pack_into(self._memory, _FAREWELL_OFFSET, farewell)

    def write_handed_back(self, count: int) -> None:
        """Record how many attempts this process has handed back at its end."""
        _NUMBER.pack_into(self._memory, _HANDED_BACK_OFFSET, count)

    @property
    def room(self) -> int:
        """The number of attempts that still fit."""
        return self.capacity - self._used + len(self._free)

    def write_running(self, count: int) -> None:
        """Record how many tasks are running."""
        if count != self._running:
            self._running = count
            _NUMBER.pack_into(self._memory, _RUNNING_OFFSET, count)

    def write_executing(self, count: int) -> None:
        """Record how many executions are being watched."""
        _NUMBER.pack_into(self._memory, _EXECUTING_OFFSET, count)

    def beat(self, now: float, load: float) -> None:
        """Record that the clock of this process ticks, and the recent load."""
        _PULSE.pack_into(self._memory, _PULSE_OFFSET, now, load)

    def parent_silence(self, now: float) -> float:
        """Return the seconds since the parent, which sends the heartbeats of this process, last ran."""
        (moment,) = _PARENT_BEAT.unpack_from(self._memory, _PARENT_BEAT_OFFSET)
        return now - moment if moment else 0.0

    def _set_used(self, slots: int) -> None:
        self._used = slots
        _NUMBER.pack_into(self._memory, 0, slots)

    def _write_limit(self, slot: int, deadline: float, timeout: float = 0.0, *, retryable: bool = True) -> None:
        self._limited.add(slot) if deadline != _NO_LIMIT else self._limited.discard(slot)
        _LIMIT.pack_into(self._memory, self._limits + slot * _LIMIT.size, deadline, timeout, retryable)

    # -- for the parent

    def write_parent_beat(self, now: float) -> None:
        """Record that the parent runs."""
        _PARENT_BEAT.pack_into(self._memory, _PARENT_BEAT_OFFSET, now)

    def snapshot(self) -> tuple[bytes, int]:
        """Return the attempts in the encoding of heartbeats, and the number of running tasks."""
        empty = b"\0\0\0\0"
        used, running = self._numbers()
        return b"".join(slot for slot in self._slots(used) if slot[16:] != empty), running

    @property
    def executing(self) -> int:
        """The number of executions that the child watches."""
        count: int = _NUMBER.unpack_from(self._memory, _EXECUTING_OFFSET)[0]
        return count

    def unended(self) -> list[tuple[bytes, int]]:
        """Return the attempts whose end the leader may not know."""
        attempts = unpack_attempts(b"".join(slot for slot, (deadline, *_) in self._table() if deadline != _ENDED))
        return [(task, attempt) for task, attempt in attempts if attempt]

    def begun(self) -> set[tuple[bytes, int]]:
        """Return the attempts whose code may have begun."""
        return set(
            unpack_attempts(
                b"".join(
                    slot
                    for index, slot in enumerate(self._slots(self._numbers()[0]))
                    if self._memory[self._begun + index]
                )
            )
        )

    def overdue(self, now: float) -> list[Limit]:
        """Return the attempts past their deadlines."""
        return [
            Limit(slot[:16], int.from_bytes(slot[16:], "big"), deadline, timeout, retryable)
            for slot, (deadline, timeout, retryable) in self._table()
            if 0.0 < deadline < now
        ]

    @property
    def farewell(self) -> Farewell:
        """How the child ended."""
        return Farewell(_NUMBER.unpack_from(self._memory, _FAREWELL_OFFSET)[0])

    @property
    def handed_back(self) -> int:
        """The number of attempts that the child has handed back at its end."""
        count: int = _NUMBER.unpack_from(self._memory, _HANDED_BACK_OFFSET)[0]
        return count

    def blocking(self) -> set[tuple[bytes, int]]:
        """Return the attempts whose code blocked others in the process."""
        return set(unpack_attempts(b"".join(slot for slot, (deadline, *_) in self._table() if deadline == _BLOCKING)))

    def turns(self) -> list[tuple[bytes, int, int]]:
        """Return the running workflow turns with their attempts and threads."""
        return [
            (slot[:16], int.from_bytes(slot[16:], "big"), int(thread))
            for slot, (deadline, thread, _) in self._table()
            if deadline == _TURN
        ]

    def pulse(self) -> tuple[float, float]:
        """Return the time of the last tick of the child's clock (0.0: none yet), and its recent load."""
        moment, load = _PULSE.unpack_from(self._memory, _PULSE_OFFSET)
        return moment, load

    def _numbers(self) -> tuple[int, int]:
        used, running = _NUMBERS.unpack_from(self._memory, 0)
        return used, running

    def _table(self) -> Iterator[tuple[bytes, tuple[float, float, bool]]]:
        """Yield slots with their limits, up to the current number of slots: the child may add more meanwhile."""
        used = self._numbers()[0]
        limits = _LIMIT.iter_unpack(self._memory[self._limits : self._limits + used * _LIMIT.size])
        return zip(self._slots(used), limits, strict=True)

    def _slots(self, used: int) -> list[bytes]:
        end = _HEADER + used * ATTEMPT_SIZE
        return [self._memory[start : start + ATTEMPT_SIZE] for start in range(_HEADER, end, ATTEMPT_SIZE)]


# -- processes that have ended: sign-offs and reports that Redis has not taken yet


class EndedProcesses:
    """Signs processes off, and reports the attempts they held. While Redis is down, both wait."""

    def __init__(self, streams: WorkerStreams) -> None:
        self._streams = streams
        self._ended: dict[str, bool] = {}
        """Ended processes not yet signed off, and whether they ended in good order."""
        self._reports: list[Flush] = []

    def add(self, worker: str, reports: Sequence[Report], *, in_order: bool) -> None:
        """Add a process that has ended, with the reports of its attempts."""
        self._ended[worker] = in_order
        if reports:
            self._reports.append(Flush(worker, list(reports)))

    @property
    def has_reports(self) -> bool:
        """Return whether there are reports that Redis has not taken yet."""
        return bool(self._reports)

    def report(self) -> None:
        """Sign the processes off and send the reports, as far as Redis takes them."""
        if self._ended:
            self._streams.deregister(
                list(self._ended), [worker for worker, in_order in self._ended.items() if in_order]
            )
            self._ended = {}
        while self._reports:
            generation = self._streams.generation()
            if generation is None or self._streams.flush(generation, encode(self._reports[0]), {}).entry is None:
                return
            self._reports.pop(0)
