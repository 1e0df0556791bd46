"""The attempts that a process holds, in memory that it shares with its parent.

The child writes a slot when it receives a task and clears it when the report is known to be applied and the code has
ended. The parent reads them for each heartbeat, however busy the child is, and still has them when the child is dead.
Beside each attempt stands until when it may run and whether its policy allows another after that, so that the parent
can end it where the child cannot: code that keeps the interpreter to itself stops the child's own clock too. And the
parent shows when it last beat: a child of a parent that has stopped begins nothing that others may have by now.
The last word of a child stands here too: its exit code says nothing, because any task can end the process with any.
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
"""Slots in use up to now, and tasks running now. Two threads write them, each its own."""
_RUNNING_PLACE = 4
_PULSE = struct.Struct("<dd")
"""When the child's clock last ticked, and how full the process has been of late (0 to 1)."""
_PULSE_PLACE = 8
_NOD = struct.Struct("<d")
"""When the parent last gave a sign of life."""
_NOD_PLACE = 24
_FAREWELL_PLACE = 32
_HANDED_BACK_PLACE = 36
_EXECUTING_PLACE = 40
_ATTEMPT = struct.Struct(">I")
_LIMIT = struct.Struct("<dd?")
"""Until when an attempt may run, its timeout, and whether it is tried again after that."""
_NO_LIMIT = 0.0
_ENDED = -1.0
"""In place of the time: the attempt has ended as far as the leader is concerned, and only its code goes on."""
_BLOCKING = -2.0
"""In place of the time: its code keeps others from going on: it blocks the event loop, or may have closed it."""
_TURN = -3.0
"""In place of the time: code of a workflow decides, in the thread whose number stands in place of the timeout."""


class Farewell(IntEnum):
    """The last message of a process."""

    NONE = 0
    """Nothing: it was killed, or a task has ended it."""
    FINISHED = 1
    UNFINISHED = 2
    """Tasks still ran when the time to drain was over. They end with the process; then the parent hands them back."""
    UNUSABLE = 3
    """There is no such application: starting again would not help."""
    BROKEN = 4
    """The application cannot be imported: starting again would help only if a file were changed."""


class Limit(NamedTuple):
    """An attempt that may run until `deadline`, `timeout` seconds after it began."""

    id: bytes
    attempt: int
    deadline: float
    timeout: float
    retryable: bool
    """Its policy lets it be tried again after a timeout, as far as tries are left."""


class HeldAttempts:
    """A table of attempts in shared memory; one writer, one reader."""

    def __init__(self, capacity: int = 20_000) -> None:
        self.capacity = capacity
        self._limits = _HEADER + capacity * ATTEMPT_SIZE
        self._begun = self._limits + capacity * _LIMIT.size
        self._memory = mmap.mmap(-1, self._begun + capacity)
        self._free: list[int] = []
        self._limited: set[int] = set()
        """Slots with something else than `_NO_LIMIT`."""
        self._used = 0
        self._running = 0
        self._adding = threading.Lock()
        """Held while adding: tasks are received in one thread, and executions in another."""

    # -- the child

    def add(self, identifier: bytes, attempt: int) -> int:
        """Note an attempt; return its slot."""
        return self.add_all([(identifier, attempt)])[0]

    def add_all(self, attempts: Sequence[tuple[bytes, int]]) -> list[int]:
        """Note attempts; return their slots."""
        with self._adding:
            slots = [self._free.pop() for _ in range(min(len(attempts), len(self._free)))]
            if more := len(attempts) - len(slots):
                slots += range(self._used, self._used + more)
                self._use(self._used + more)
        for slot, (identifier, attempt) in zip(slots, attempts, strict=True):
            place = _HEADER + slot * ATTEMPT_SIZE
            self._memory[place : place + 16] = identifier
            _ATTEMPT.pack_into(self._memory, place + 16, attempt)  # last: a slot without attempt is empty
        return slots

    def drop(self, *slots: int) -> None:
        """Forget the attempts in slots."""
        memory, limited = self._memory, self._limited
        for slot in slots:
            _ATTEMPT.pack_into(memory, _HEADER + slot * ATTEMPT_SIZE + 16, 0)
            memory[self._begun + slot] = 0
            if slot in limited:
                self.unlimit(slot)
        self._free += slots

    def shrink(self) -> None:
        """Begin anew where nothing is held, so that the parent has only to look at current attempts.

        Nothing is added meanwhile, and nothing can be dropped, so nothing happens in between.
        """
        with self._adding:
            if self._used and len(self._free) == self._used:
                self._free.clear()
                self._use(0)

    def mark_begun(self, slot: int) -> None:
        """Say that the code of the attempt in a slot may begin from now on."""
        self._memory[self._begun + slot] = 1

    def limit(self, slot: int, deadline: float, timeout: float, *, retryable: bool) -> None:
        """Say until when the attempt in a slot may run, and whether it may be tried again after that."""
        self._write_limit(slot, deadline, timeout, retryable=retryable)

    def show_turn(self, slot: int, thread: int) -> None:
        """Say in which thread the turn in a slot runs, by the number that the system gives it."""
        self._write_limit(slot, _TURN, float(thread))

    def unlimit(self, slot: int) -> None:
        """Its end has been seen to."""
        self._write_limit(slot, _NO_LIMIT)

    def mark_ended(self, slot: int) -> None:
        """The leader knows that the attempt has ended; the slot stays, because its code has not."""
        self._write_limit(slot, _ENDED)

    def mark_blocking(self, slot: int) -> None:
        """The code of the attempt in a slot keeps its neighbours from going on."""
        self._write_limit(slot, _BLOCKING)

    def say(self, farewell: Farewell) -> None:
        """Leave the last word of this process."""
        _NUMBER.pack_into(self._memory, _FAREWELL_PLACE, farewell)

    def say_handed_back(self, count: int) -> None:
        """Leave how many attempts this process has handed back at its end."""
        _NUMBER.pack_into(self._memory, _HANDED_BACK_PLACE, count)

    @property
    def room(self) -> int:
        """Return how many more attempts fit."""
        return self.capacity - self._used + len(self._free)

    def show_running(self, count: int) -> None:
        """Say how many tasks are running."""
        if count != self._running:
            self._running = count
            _NUMBER.pack_into(self._memory, _RUNNING_PLACE, count)

    def show_executing(self, count: int) -> None:
        """Say how many executions are watched."""
        _NUMBER.pack_into(self._memory, _EXECUTING_PLACE, count)

    def beat(self, now: float, load: float) -> None:
        """Show that the clock of this process ticks, and how full it has been of late."""
        _PULSE.pack_into(self._memory, _PULSE_PLACE, now, load)

    def unheard(self, now: float) -> float:
        """Return for how many seconds the parent, which beats for this process, has given no sign of life."""
        (moment,) = _NOD.unpack_from(self._memory, _NOD_PLACE)
        return now - moment if moment else 0.0

    def _use(self, slots: int) -> None:
        self._used = slots
        _NUMBER.pack_into(self._memory, 0, slots)

    def _write_limit(self, slot: int, deadline: float, timeout: float = 0.0, *, retryable: bool = True) -> None:
        self._limited.add(slot) if deadline != _NO_LIMIT else self._limited.discard(slot)
        _LIMIT.pack_into(self._memory, self._limits + slot * _LIMIT.size, deadline, timeout, retryable)

    # -- the parent

    def nod(self, now: float) -> None:
        """Give the child a sign of life."""
        _NOD.pack_into(self._memory, _NOD_PLACE, now)

    def snapshot(self) -> tuple[bytes, int]:
        """Return the attempts as heartbeats carry them, and how many tasks are running."""
        empty = b"\0\0\0\0"
        used, running = self._numbers()
        return b"".join(slot for slot in self._slots(used) if slot[16:] != empty), running

    @property
    def executing(self) -> int:
        """Return how many executions the child watches."""
        count: int = _NUMBER.unpack_from(self._memory, _EXECUTING_PLACE)[0]
        return count

    def unended(self) -> list[tuple[bytes, int]]:
        """Return the attempts of which the leader does not know that they have ended."""
        attempts = unpack_attempts(b"".join(slot for slot, (deadline, *_) in self._table() if deadline != _ENDED))
        return [(task, attempt) for task, attempt in attempts if attempt]

    def begun(self) -> set[tuple[bytes, int]]:
        """Return the attempts whose code may have begun."""
        return set(
            unpack_attempts(
                b"".join(
                    slot
                    for place, slot in enumerate(self._slots(self._numbers()[0]))
                    if self._memory[self._begun + place]
                )
            )
        )

    def overdue(self, now: float) -> list[Limit]:
        """Return the attempts that have run for longer than they may."""
        return [
            Limit(slot[:16], int.from_bytes(slot[16:], "big"), deadline, timeout, retryable)
            for slot, (deadline, timeout, retryable) in self._table()
            if 0.0 < deadline < now
        ]

    @property
    def farewell(self) -> Farewell:
        """Return the last word of the child."""
        return Farewell(_NUMBER.unpack_from(self._memory, _FAREWELL_PLACE)[0])

    @property
    def handed_back(self) -> int:
        """Return how many attempts the child has handed back at its end."""
        count: int = _NUMBER.unpack_from(self._memory, _HANDED_BACK_PLACE)[0]
        return count

    def blocking(self) -> set[tuple[bytes, int]]:
        """Return the attempts whose code kept their neighbours from going on."""
        return set(unpack_attempts(b"".join(slot for slot, (deadline, *_) in self._table() if deadline == _BLOCKING)))

    def turns(self) -> list[tuple[bytes, int, int]]:
        """Return the turns that run, each with its thread."""
        return [
            (slot[:16], int.from_bytes(slot[16:], "big"), int(thread))
            for slot, (deadline, thread, _) in self._table()
            if deadline == _TURN
        ]

    def pulse(self) -> tuple[float, float]:
        """Return when the child's clock last ticked (0.0: not yet), and how full the process has been of late."""
        moment, load = _PULSE.unpack_from(self._memory, _PULSE_PLACE)
        return moment, load

    def _numbers(self) -> tuple[int, int]:
        used, running = _NUMBERS.unpack_from(self._memory, 0)
        return used, running

    def _table(self) -> Iterator[tuple[bytes, tuple[float, float, bool]]]:
        """Yield slots with their limits; as many as there are now, for the child adds to them all the time."""
        used = self._numbers()[0]
        limits = _LIMIT.iter_unpack(self._memory[self._limits : self._limits + used * _LIMIT.size])
        return zip(self._slots(used), limits, strict=True)

    def _slots(self, used: int) -> list[bytes]:
        end = _HEADER + used * ATTEMPT_SIZE
        return [self._memory[start : start + ATTEMPT_SIZE] for start in range(_HEADER, end, ATTEMPT_SIZE)]


# -- processes that have ended: their ends, and the reports of what they held, until Redis has taken them


class EndedProcesses:
    """Signs processes off, and reports what they held; while Redis is away, both wait."""

    def __init__(self, streams: WorkerStreams) -> None:
        self._streams = streams
        self._gone: dict[str, bool] = {}
        """Ended processes that are not reported to the leader yet, and whether they ended in good order."""
        self._reports: list[Flush] = []

    def add(self, worker: str, reports: Sequence[Report], *, in_order: bool) -> None:
        """Note that a process has ended."""
        self._gone[worker] = in_order
        if reports:
            self._reports.append(Flush(worker, list(reports)))

    @property
    def has_reports(self) -> bool:
        """Say whether there are reports that Redis has not taken yet."""
        return bool(self._reports)

    def report(self) -> None:
        """Report as far as Redis takes it."""
        if self._gone:
            self._streams.leave(list(self._gone), [worker for worker, in_order in self._gone.items() if in_order])
            self._gone = {}
        while self._reports:
            generation = self._streams.generation()
            if generation is None or self._streams.flush(generation, encode(self._reports[0]), {}).entry is None:
                return
            self._reports.pop(0)
