"""Lines that tasks have said and that nobody has been handed yet: by attempt, in order, and within limits.

Of an attempt that says more than `log_limit` bytes, as UTF-8 and with the ends of its lines, the first lines are passed
on as they come and the last ones are kept until it ends; what is between is counted, and one line tells how many there
were. The same holds where all attempts of the process together say more than can be passed on. Many lines that come as
one text stay one until they are passed on: those that are dropped cost no more than to count them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from orchestrator.sealing import Vault
from orchestrator.transport.codec import LogChunk, LogLine, encode
from orchestrator.workers.running.job import Job

DROPPED = "dropped"
"""The source of a line that says how many are missing."""

_LONGEST = 10_000
"""Characters of one line."""
_OVERHEAD = 40
"""Bytes that a line takes beside its text while it waits, roughly."""
_LAST_SHARE = 5
"""Its last lines get a fifth of an attempt's limit, and its first ones the rest."""
_MOST_WAITING = 4_000_000
"""Bytes of lines of all attempts that wait to be passed on."""
_MOST_ATTEMPTS = 20_000
"""Attempts that have said something; of more, nothing is kept."""


class _Said(NamedTuple):
    """A line, or many that are one text."""

    line: LogLine
    many: bool = False

    @property
    def number(self) -> int:
        """How many lines it is."""
        return self.line.text.count("\n") + 1 if self.many else 1

    @property
    def size(self) -> int:
        """How many bytes it has."""
        text = self.line.text
        return (len(text) if text.isascii() else len(text.encode())) + 1

    def part(self, text: str) -> _Said:
        """Return some of its lines."""
        return _Said(msgspec.structs.replace(self.line, text=text), self.many)

    def split(self, room: int) -> tuple[_Said | None, _Said | None]:
        """Return what has room in so many bytes, and the rest; a single line is not split."""
        if self.size <= room:
            return self, None
        data = self.line.text.encode()
        cut = data.rfind(b"\n", 0, max(0, room)) if self.many else -1
        if cut < 0:
            return None, self
        return self.part(data[:cut].decode()), self.part(data[cut + 1 :].decode())

    def last(self, room: int) -> _Said | None:
        """Return the last of its lines that have room in so many bytes."""
        data = self.line.text.encode()
        cut = data.find(b"\n", len(data) - room) if self.many and room > 0 else -1
        return None if cut < 0 else self.part(data[cut + 1 :].decode())

    def lines(self) -> list[LogLine]:
        """Return each of its lines that has something in it."""
        if not self.many:
            return [self.line]
        at, attempt, level, source = self.line.at, self.line.attempt, self.line.level, self.line.source
        texts = self.line.text.split("\n")
        return [LogLine(at, attempt, level, text, source) for text in texts if text and not text.isspace()]


class _Attempt:
    """What one attempt has said."""

    __slots__ = ("dropped", "has_ended", "job", "last", "last_size", "lines", "part", "size", "told", "why")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.part = 0
        self.lines: list[_Said] = []
        """To be passed on."""
        self.size = 0
        """Bytes of first lines, those that have been passed on included."""
        self.last: deque[_Said] = deque()
        self.last_size = 0
        self.dropped = 0
        self.told = 0
        """How many lines those stand for that say how many are missing, without themselves."""
        self.why = ""
        self.has_ended = False

    def note_dropped(self) -> None:
        """Say in the place of lines that were dropped how many there were."""
        if self.dropped:
            number = "1 line was" if self.dropped == 1 else f"{self.dropped:,} lines were"
            text = f"{number} dropped here: {self.why}"
            self.lines.append(_Said(LogLine(time.time(), self.job.dispatch.attempt, "warning", text, DROPPED)))
            self.told += self.dropped - 1
            self.dropped = 0


class Taken(NamedTuple):
    """What is to be passed on: chunks, and whose they are."""

    chunks: list[LogChunk]
    attempts: list[_Attempt]
    counts: list[int]
    """How many lines each chunk has, or stands for."""


class Lines:
    """Gathers the lines of a worker process; any thread may add some."""

    def __init__(self, limit: int, vault: Vault | None = None) -> None:
        self._limit = limit
        self._last = limit // _LAST_SHARE
        self._vault = vault
        self._lock = threading.Lock()
        self._attempts: dict[int, _Attempt] = {}
        """By their jobs."""
        self._fresh: dict[int, _Attempt] = {}
        """Those that have something to be passed on."""
        self._waiting = 0

    def add(self, job: Job, line: LogLine) -> None:
        """Take a line, or count it."""
        if len(line.text) > _LONGEST:
            line = msgspec.structs.replace(line, text=_cut(line.text))
        self._add(job, _Said(line))

    def add_many(self, job: Job, lines: LogLine) -> None:
        """Take many lines that are one text, or count them."""
        if len(lines.text) > _LONGEST:
            texts = lines.text.split("\n")
            if max(map(len, texts)) > _LONGEST:
                lines = msgspec.structs.replace(lines, text="\n".join(map(_cut, texts)))
        self._add(job, _Said(lines, many=True))

    def _add(self, job: Job, said: _Said) -> None:
        job.has_lines = True
        with self._lock:
            attempt = self._attempts.get(id(job))
            if attempt is None:
                if len(self._attempts) >= _MOST_ATTEMPTS:
                    return
                attempt = self._attempts[id(job)] = _Attempt(job)
            first, last = said.split(self._limit - self._last - attempt.size)
            if first is not None:
                self._fresh[id(job)] = attempt
                self._pass_on(attempt, first)
            if last is not None:
                attempt.size = self._limit  # a shorter line that would fit would be out of order
                self._keep_last(attempt, last)

    def _pass_on(self, attempt: _Attempt, said: _Said) -> None:
        size, count = said.size, said.number
        if self._waiting + size + count * _OVERHEAD > _MOST_WAITING:
            attempt.dropped += count
            attempt.why = "more was said than could be passed on"
            return
        attempt.note_dropped()
        attempt.lines.append(said)
        attempt.size += size
        self._waiting += size + count * _OVERHEAD

    def _keep_last(self, attempt: _Attempt, said: _Said) -> None:
        attempt.last.append(said)
        attempt.last_size += said.size
        while len(attempt.last) > 1 and attempt.last_size - attempt.last[0].size >= self._last:
            first = attempt.last.popleft()
            attempt.last_size -= first.size
            self._drop(attempt, first.number)

    def _drop(self, attempt: _Attempt, lines: int) -> None:
        attempt.dropped += lines
        attempt.why = f"of an attempt, {self._limit:,} bytes are kept (setting log_limit)"

    def _cut_last(self, attempt: _Attempt) -> None:
        """Let an attempt that has ended have no more last lines than are kept."""
        if attempt.last and attempt.last_size > self._last:
            first = attempt.last.popleft()
            kept = first.last(self._last - (attempt.last_size - first.size))
            if kept is None and not attempt.last:
                kept = first  # a line that is longer than all that is kept
            if kept is not None:
                attempt.last.appendleft(kept)
            self._drop(attempt, first.number - (0 if kept is None else kept.number))

    def end(self, job: Job) -> bool:
        """Let an attempt have no more to say; return whether there is something to be passed on."""
        if not self._attempts:
            return False
        with self._lock:
            attempt = self._attempts.get(id(job))
            if attempt is None:
                return False
            attempt.has_ended = True
            if attempt.last or attempt.dropped:
                self._fresh[id(job)] = attempt
            elif id(job) not in self._fresh:
                del self._attempts[id(job)]
            return id(job) in self._fresh

    def take(self) -> Taken:
        """Return what is to be passed on."""
        with self._lock:
            fresh, self._fresh, self._waiting = self._fresh, {}, 0
            taken: list[tuple[_Attempt, list[LogLine], int]] = []
            for key, attempt in fresh.items():
                if attempt.has_ended:
                    self._cut_last(attempt)
                if attempt.has_ended or not attempt.last:
                    attempt.note_dropped()
                if attempt.has_ended:
                    attempt.lines += attempt.last
                    attempt.last.clear()
                    del self._attempts[key]
                if lines := [line for said in attempt.lines for line in said.lines()]:
                    taken.append((attempt, lines, len(lines) + attempt.told))
                    attempt.lines, attempt.told = [], 0
        return Taken(
            [self._chunk(attempt, lines) for attempt, lines, _ in taken],
            [attempt for attempt, _, _ in taken],
            [count for _, _, count in taken],
        )

    def _chunk(self, attempt: _Attempt, lines: Sequence[LogLine]) -> LogChunk:
        if self._vault is not None:
            seal = self._vault.seal_text
            lines = [msgspec.structs.replace(line, text=seal(line.text)) for line in lines]
        task, part = attempt.job.dispatch, attempt.part
        attempt.part += 1
        return LogChunk(task.id, task.attempt, part, task.run_id, attempt.job.label, encode(lines))

    def lose(self, taken: Taken, first: int, why: str) -> None:
        """Count what could not be passed on, from a chunk on; it is told with what the attempts say next."""
        with self._lock:
            for attempt, count in zip(taken.attempts[first:], taken.counts[first:], strict=True):
                attempt.dropped += count
                attempt.why = why
                key = id(attempt.job)
                if attempt.has_ended and len(self._attempts) >= _MOST_ATTEMPTS:
                    continue
                self._attempts[key] = self._fresh[key] = attempt


def _cut(text: str) -> str:
    """Return a line that is not too long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
