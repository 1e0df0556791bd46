"""Log lines of tasks that have not been passed on yet: by attempt, in order, and within limits.

Of an attempt with more than `log_limit` bytes, as UTF-8 and with the ends of its lines, or more lines than a tenth of
that number, the first lines are passed on as they come and the last ones are kept until it ends; the lines between are
counted, and one line says how many there were. The same holds where all attempts of the process together say more than
can be passed on. Many lines that come as one text stay one until they are passed on: dropped lines cost no more than
counting them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from orchestrator.sealing import Vault
from orchestrator.transport.codec import LogChunk, LogLine, encode
from orchestrator.workers.running.job import Job

DROPPED = "dropped"
"""The source of a line that says how many are missing."""
BY_LINE = ""
"""The level of lines that each get their own: a warning if it speaks of an error."""

LONGEST = 10_000
"""Characters of one line."""
_SHORTEST = 10
"""Bytes that a line has on average, at least, where as many bytes are kept as the limit says."""
_OVERHEAD = 40
"""Bytes that a text takes beside its characters while it waits, roughly."""
_LAST_SHARE = 5
"""Its last lines get a fifth of an attempt's limit, and its first ones the rest."""
_MOST_WAITING = 4_000_000
"""Bytes of lines of all attempts that wait to be passed on."""
_MOST_ATTEMPTS = 20_000
"""Attempts that have said something; of more, nothing is kept."""
_TOO_MUCH = "more was said than could be passed on"


class _Said(NamedTuple):
    """A line, or many that are one text."""

    line: LogLine
    size: int
    """How many bytes it has."""
    number: int = 1
    """How many lines it is."""
    many: bool = False

    def part(self, data: bytes) -> _Said:
        line = msgspec.structs.replace(self.line, text=data.decode())
        return _Said(line, len(data) + 1, data.count(b"\n") + 1, many=True)

    def split(self, room: int, lines: int) -> tuple[_Said | None, _Said | None]:
        """Return what has room in so many bytes and lines, and the rest; a single line is not split."""
        if self.size <= room and self.number <= lines:
            return self, None
        if not self.many or lines <= 0:
            return None, self
        data = self.line.text.encode()
        cut = len(data)
        if self.number > lines:
            cut -= len(data.split(b"\n", lines)[lines]) + 1
        if cut >= room:
            cut = data.rfind(b"\n", 0, max(0, room))
        return (None, self) if cut < 0 else (self.part(data[:cut]), self.part(data[cut + 1 :]))

    def last(self, room: int, lines: int) -> _Said | None:
        """Return the last of its lines that have room in so many bytes and lines."""
        if self.size <= room and self.number <= lines:
            return self
        if not self.many or room <= 0 or lines <= 0:
            return None
        data = self.line.text.encode()
        cut = -1
        if self.number > lines:
            cut = len(data.rsplit(b"\n", lines)[0])
        if len(data) - cut > room:
            cut = data.find(b"\n", len(data) - room)
        return None if cut < 0 else self.part(data[cut + 1 :])

    def lines(self) -> list[LogLine]:
        at, attempt, level, text, source = msgspec.structs.astuple(self.line)
        texts = text.split("\n") if self.many else [text]
        if level != BY_LINE or "error" not in text.lower():
            return [LogLine(at, attempt, level or "info", text, source) for text in texts]
        return [LogLine(at, attempt, "warning" if "error" in text.lower() else "info", text, source) for text in texts]


@dataclass(slots=True, eq=False)
class _Attempt:
    job: Job
    part: int = 0
    lines: list[_Said] = field(default_factory=list)
    """To be passed on."""
    size: int = 0
    """Bytes of first lines, those that have been passed on included."""
    count: int = 0
    """How many these are."""
    last: deque[_Said] = field(default_factory=deque)
    last_size: int = 0
    last_count: int = 0
    dropped: int = 0
    """Lines that were dropped, and that no line mentions yet."""
    dropped_size: int = 0
    """Their bytes."""
    told: int = 0
    """How many those stand for that say how many are missing, without themselves."""
    told_size: int = 0
    why: str = ""
    has_ended: bool = False
    is_full: bool = False
    """A line has said that the last ones come at the end."""

    def drop(self, lines: int, size: int, why: str) -> None:
        """Count lines that are missing."""
        if why != self.why:
            self.note_dropped()
            self.why = why
        self.dropped += lines
        self.dropped_size += size

    def note_dropped(self) -> None:
        """Say in the place of lines that were dropped how many there were."""
        if self.dropped:
            number = "1 line" if self.dropped == 1 else f"{self.dropped:,} lines"
            were = "was" if self.dropped == 1 else "were"
            self.note(f"{number} ({self.dropped_size:,} bytes) {were} dropped here: {self.why}")
            self.told += self.dropped - 1
            self.told_size += self.dropped_size
            self.dropped = self.dropped_size = 0

    def note(self, text: str) -> None:
        """Say something about lines that are missing."""
        self.lines.append(_Said(LogLine(time.time(), self.job.dispatch.attempt, "warning", text, DROPPED), 0))


class Taken(NamedTuple):
    """Chunks to pass on, with their attempts."""

    chunks: list[LogChunk]
    attempts: list[_Attempt]
    counts: list[tuple[int, int]]
    """How many lines and bytes each chunk has, or stands for."""


class Lines:
    """Gathers the lines of a worker process; any thread may add some."""

    def __init__(self, limit: int, vault: Vault | None = None) -> None:
        self._limit = limit
        self._last = limit // _LAST_SHARE
        most = max(_LAST_SHARE, limit // _SHORTEST)
        self._last_count = most // _LAST_SHARE
        self._first, self._first_count = limit - self._last, most - self._last_count
        self._why = f"of an attempt, {limit:,} bytes and {most:,} lines are kept (setting log_limit)"
        self._vault = vault
        self._lock = threading.Lock()
        self._attempts: dict[int, _Attempt] = {}
        """By their jobs."""
        self._fresh: dict[int, _Attempt] = {}
        """Those that have something to be passed on."""
        self._waiting = 0

    def add(self, job: Job, line: LogLine) -> None:
        """Take a line, or count it."""
        text = line.text
        if len(text) > LONGEST:
            text = _cut(text)
            line = msgspec.structs.replace(line, text=text)
        self._add(job, _Said(line, (len(text) if text.isascii() else len(text.encode())) + 1))

    def add_many(self, job: Job, lines: LogLine) -> None:
        """Take many lines that are one text, or count them."""
        text = "\n".join(map(_cut, blocks(lines.text)))
        if text is not lines.text:
            lines = msgspec.structs.replace(lines, text=text)
        size = (len(text) if text.isascii() else len(text.encode())) + 1
        self._add(job, _Said(lines, size, text.count("\n") + 1, many=True))

    def _add(self, job: Job, said: _Said) -> None:
        job.has_lines = True
        with self._lock:
            attempt = self._attempts.get(id(job))
            if attempt is None:
                if len(self._attempts) >= _MOST_ATTEMPTS:
                    return
                attempt = self._attempts[id(job)] = _Attempt(job)
            if attempt.size >= self._limit:
                self._keep_last(attempt, said)
                return
            first, last = said.split(self._first - attempt.size, self._first_count - attempt.count)
            if first is not None:
                self._fresh[id(job)] = attempt
                self._pass_on(attempt, first)
            if last is not None:
                attempt.size = self._limit  # a shorter line that would fit would be out of order
                self._fresh[id(job)] = attempt
                self._keep_last(attempt, last)

    def _pass_on(self, attempt: _Attempt, said: _Said) -> None:
        """Pass on as much as there is room for."""
        first, rest = said.split(_MOST_WAITING - self._waiting - _OVERHEAD, said.number)
        if first is not None:
            attempt.note_dropped()
            attempt.lines.append(first)
            attempt.size += first.size
            attempt.count += first.number
            self._waiting += first.size + _OVERHEAD
        if rest is not None:
            attempt.drop(rest.number, rest.size, _TOO_MUCH)

    def _keep_last(self, attempt: _Attempt, said: _Said) -> None:
        last = attempt.last
        last.append(said)
        attempt.last_size += said.size
        attempt.last_count += said.number
        while len(last) > 1 and (
            attempt.last_size - last[0].size >= self._last or attempt.last_count - last[0].number >= self._last_count
        ):
            first = last.popleft()
            attempt.last_size -= first.size
            attempt.last_count -= first.number
            attempt.drop(first.number, first.size, self._why)
        if said.many and len(last) == 1:
            self._cut_last(attempt)

    def _cut_last(self, attempt: _Attempt) -> None:
        """Let an attempt have no more last lines than are kept, but for a last one that is longer than that."""
        if attempt.last and (attempt.last_size > self._last or attempt.last_count > self._last_count):
            first = attempt.last.popleft()
            size, count = attempt.last_size - first.size, attempt.last_count - first.number
            kept = first.last(self._last - size, self._last_count - count)
            if kept is None and not attempt.last:
                kept = first.part(first.line.text.rpartition("\n")[2].encode()) if first.many else first
            if kept is not None:
                attempt.last.appendleft(kept)
                size, count = size + kept.size, count + kept.number
            attempt.drop(attempt.last_count - count, attempt.last_size - size, self._why)
            attempt.last_size, attempt.last_count = size, count

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
        taken: list[tuple[_Attempt, list[_Said], int, int]] = []
        with self._lock:
            fresh, self._fresh, self._waiting = self._fresh, {}, 0
            for key, attempt in fresh.items():
                if attempt.has_ended:
                    self._cut_last(attempt)
                if attempt.has_ended or not attempt.last:
                    attempt.note_dropped()
                elif not attempt.is_full:
                    attempt.is_full = True
                    attempt.told -= 1  # what follows is no line of the task
                    attempt.note(f"The next lines are kept back, and the last of them follow at the end: {self._why}")
                if attempt.has_ended:
                    attempt.lines += attempt.last
                    attempt.last.clear()
                    del self._attempts[key]
                if attempt.lines:
                    taken.append((attempt, attempt.lines, attempt.told, attempt.told_size))
                    attempt.lines, attempt.told, attempt.told_size = [], 0, 0
        return Taken(
            [self._chunk(attempt, [line for one in said for line in one.lines()]) for attempt, said, _, _ in taken],
            [attempt for attempt, _, _, _ in taken],
            [
                (told + sum(one.number for one in said), told_size + sum(one.size for one in said))
                for _, said, told, told_size in taken
            ],
        )

    def _chunk(self, attempt: _Attempt, lines: Sequence[LogLine]) -> LogChunk:
        if self._vault is not None:
            seal = self._vault.seal_text
            lines = [msgspec.structs.replace(line, text=seal(line.text)) for line in lines]
        task, part = attempt.job.dispatch, attempt.part
        attempt.part += 1
        return LogChunk(task.id, task.attempt, part, task.run_id, attempt.job.label, encode(lines))

    def lose(self, taken: Taken, first: int, why: str) -> None:
        """Count chunks that could not be passed on; the next lines of the attempts mention it."""
        with self._lock:
            for attempt, (count, size) in zip(taken.attempts[first:], taken.counts[first:], strict=True):
                attempt.drop(count, size, why)
                key = id(attempt.job)
                if attempt.has_ended and len(self._attempts) >= _MOST_ATTEMPTS:
                    continue
                self._attempts[key] = self._fresh[key] = attempt


def blocks(text: str) -> Iterator[str]:
    """Yield a text in parts that are as many whole lines as have room in the longest line, or one that is longer."""
    start, size = 0, len(text)
    while size - start > LONGEST:
        end = text.rfind("\n", start, start + LONGEST + 1)
        if end < 0:
            end = text.find("\n", start + LONGEST)
        if end < 0:
            break
        yield text[start:end]
        start = end + 1
    yield text[start:] if start else text


def as_it_stands(text: str) -> str:
    """Return lines as a terminal shows them at last: a bar that is drawn over with carriage returns is there once."""
    text = text.replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join([line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")])
    return text


def _cut(text: str) -> str:
    """Return a line that is not too long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
