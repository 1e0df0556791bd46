"""Buffers log lines of tasks until they are sent: by attempt, in order, and within limits.

An attempt may keep `log_limit` bytes (UTF-8, with line ends), and a tenth of that number of lines. Beyond that, its
first lines are sent as they come, its last lines are kept until it ends, and the lines between are dropped and counted
in one line. Lines are also dropped if all attempts of the process together write faster than lines can be sent. Many
lines that arrive as one text stay one text until they are sent, so that a dropped line costs no more than counting it.
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
"""Source of a line that says how many lines were dropped."""
BY_LINE = ""
"""Level of a text whose lines each get their own level: `warning` if the line contains "error", else `info`."""

MAX_LINE_LENGTH = 10_000
"""Characters of one line, at most."""
_MIN_AVERAGE = 10
"""Bytes per line from which the line limit derives: `log_limit` divided by this number."""
_OVERHEAD = 40
"""Bytes of memory that a waiting text takes beside its characters, roughly."""
_LAST_SHARE = 5
"""Divisor of an attempt's limit: a fifth is for its last lines, the rest for its first ones."""
_MAX_WAITING = 4_000_000
"""Bytes of waiting lines, of all attempts together, at most."""
_MAX_ATTEMPTS = 20_000
"""Attempts with lines, at most. Lines of further attempts are ignored."""
_TOO_FAST = "it came faster than it could be sent"


class _Text(NamedTuple):
    """A log line, or many lines in one text."""

    line: LogLine
    size: int
    """Size in bytes, with line ends."""
    number: int = 1
    """Number of lines."""
    many: bool = False

    def part(self, data: bytes) -> _Text:
        line = msgspec.structs.replace(self.line, text=data.decode())
        return _Text(line, len(data) + 1, data.count(b"\n") + 1, many=True)

    def split(self, room: int, lines: int) -> tuple[_Text | None, _Text | None]:
        """Return the lines that fit into so many bytes and lines, and the rest. A single line is not split."""
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

    def last(self, room: int, lines: int) -> _Text | None:
        """Return the last lines that fit into so many bytes and lines."""
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
    lines: list[_Text] = field(default_factory=list)
    """Lines to send."""
    size: int = 0
    """Bytes of the first lines, including those already sent."""
    count: int = 0
    """Number of the first lines."""
    last: deque[_Text] = field(default_factory=deque)
    last_size: int = 0
    last_count: int = 0
    dropped: int = 0
    """Lines that were dropped since the last note about dropped lines."""
    dropped_size: int = 0
    """Bytes of these lines."""
    noted: int = 0
    """Dropped lines that the notes in `lines` stand for, minus the notes themselves."""
    noted_size: int = 0
    reason: str = ""
    has_ended: bool = False
    is_full: bool = False
    """Whether a note has said that the last lines follow at the end."""

    def drop(self, lines: int, size: int, reason: str) -> None:
        """Count dropped lines."""
        if reason != self.reason:
            self.note_dropped()
            self.reason = reason
        self.dropped += lines
        self.dropped_size += size

    def note_dropped(self) -> None:
        """Add a note about the lines that were dropped at this point."""
        if self.dropped:
            number = "1 line" if self.dropped == 1 else f"{self.dropped:,} lines"
            were = "was" if self.dropped == 1 else "were"
            self.note(f"{number} ({self.dropped_size:,} bytes) {were} dropped here: {self.reason}")
            self.noted += self.dropped - 1
            self.noted_size += self.dropped_size
            self.dropped = self.dropped_size = 0

    def note(self, text: str) -> None:
        """Add a line about missing lines."""
        self.lines.append(_Text(LogLine(time.time(), self.job.dispatch.attempt, "warning", text, DROPPED), 0))


class Taken(NamedTuple):
    """Chunks to send, with their attempts."""

    chunks: list[LogChunk]
    attempts: list[_Attempt]
    counts: list[tuple[int, int]]
    """Lines and bytes of each chunk, including the dropped lines that its notes stand for."""


class Lines:
    """Buffers the lines of a worker process. Any thread may add lines."""

    def __init__(self, limit: int, vault: Vault | None = None) -> None:
        self._limit = limit
        self._last = limit // _LAST_SHARE
        max_lines = max(_LAST_SHARE, limit // _MIN_AVERAGE)
        self._last_count = max_lines // _LAST_SHARE
        self._first, self._first_count = limit - self._last, max_lines - self._last_count
        self._why = f"of an attempt, {limit:,} bytes and {max_lines:,} lines are kept (setting log_limit)"
        self._vault = vault
        self._lock = threading.Lock()
        self._attempts: dict[int, _Attempt] = {}
        """Attempts by the id of their job object."""
        self._ready: dict[int, _Attempt] = {}
        """The attempts that have lines to send."""
        self._waiting = 0

    def add(self, job: Job, line: LogLine) -> None:
        """Add a line, or count it as dropped."""
        text = line.text
        if len(text) > MAX_LINE_LENGTH:
            text = _cut(text)
            line = msgspec.structs.replace(line, text=text)
        self._add(job, _Text(line, (len(text) if text.isascii() else len(text.encode())) + 1))

    def add_many(self, job: Job, lines: LogLine) -> None:
        """Add many lines in one text, or count them as dropped."""
        text = "\n".join(map(_cut, blocks(lines.text)))
        if text is not lines.text:
            lines = msgspec.structs.replace(lines, text=text)
        size = (len(text) if text.isascii() else len(text.encode())) + 1
        self._add(job, _Text(lines, size, text.count("\n") + 1, many=True))

    def _add(self, job: Job, text_lines: _Text) -> None:
        job.has_lines = True
        with self._lock:
            attempt = self._attempts.get(id(job))
            if attempt is None:
                if len(self._attempts) >= _MAX_ATTEMPTS:
                    return
                attempt = self._attempts[id(job)] = _Attempt(job)
            if attempt.size >= self._limit:
                self._keep_last(attempt, text_lines)
                return
            first, last = text_lines.split(self._first - attempt.size, self._first_count - attempt.count)
            if first is not None:
                self._ready[id(job)] = attempt
                self._pass_on(attempt, first)
            if last is not None:
                attempt.size = self._limit  # a shorter line that would fit would be out of order
                self._ready[id(job)] = attempt
                self._keep_last(attempt, last)

    def _pass_on(self, attempt: _Attempt, text_lines: _Text) -> None:
        """Queue as many lines as fit into the memory limit, and count the rest as dropped."""
        first, rest = text_lines.split(_MAX_WAITING - self._waiting - _OVERHEAD, text_lines.number)
        if first is not None:
            attempt.note_dropped()
            attempt.lines.append(first)
            attempt.size += first.size
            attempt.count += first.number
            self._waiting += first.size + _OVERHEAD
        if rest is not None:
            attempt.drop(rest.number, rest.size, _TOO_FAST)

    def _keep_last(self, attempt: _Attempt, text_lines: _Text) -> None:
        last = attempt.last
        last.append(text_lines)
        attempt.last_size += text_lines.size
        attempt.last_count += text_lines.number
        while len(last) > 1 and (
            attempt.last_size - last[0].size >= self._last or attempt.last_count - last[0].number >= self._last_count
        ):
            first = last.popleft()
            attempt.last_size -= first.size
            attempt.last_count -= first.number
            attempt.drop(first.number, first.size, self._why)
        if text_lines.many and len(last) == 1:
            self._cut_last(attempt)

    def _cut_last(self, attempt: _Attempt) -> None:
        """Trim the last lines of an attempt to their limits. A single last line is kept, however long."""
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
        """Note that an attempt has ended. Return whether it has lines to send."""
        if not self._attempts:
            return False
        with self._lock:
            attempt = self._attempts.get(id(job))
            if attempt is None:
                return False
            attempt.has_ended = True
            if attempt.last or attempt.dropped:
                self._ready[id(job)] = attempt
            elif id(job) not in self._ready:
                del self._attempts[id(job)]
            return id(job) in self._ready

    def take(self) -> Taken:
        """Return the chunks to send, and clear the buffer."""
        batch: list[tuple[_Attempt, list[_Text], int, int]] = []
        with self._lock:
            fresh, self._ready, self._waiting = self._ready, {}, 0
            for key, attempt in fresh.items():
                if attempt.has_ended:
                    self._cut_last(attempt)
                if attempt.has_ended or not attempt.last:
                    attempt.note_dropped()
                elif not attempt.is_full:
                    attempt.is_full = True
                    attempt.noted -= 1  # the following note is no line of the task
                    attempt.note(f"The next lines are kept back, and the last of them follow at the end: {self._why}")
                if attempt.has_ended:
                    attempt.lines += attempt.last
                    attempt.last.clear()
                    del self._attempts[key]
                if attempt.lines:
                    batch.append((attempt, attempt.lines, attempt.noted, attempt.noted_size))
                    attempt.lines, attempt.noted, attempt.noted_size = [], 0, 0
        return Taken(
            [self._chunk(attempt, [line for text in texts for line in text.lines()]) for attempt, texts, _, _ in batch],
            [attempt for attempt, _, _, _ in batch],
            [
                (noted + sum(text.number for text in texts), noted_size + sum(text.size for text in texts))
                for _, texts, noted, noted_size in batch
            ],
        )

    def _chunk(self, attempt: _Attempt, lines: Sequence[LogLine]) -> LogChunk:
        if self._vault is not None:
            seal = self._vault.seal_text
            lines = [msgspec.structs.replace(line, text=seal(line.text)) for line in lines]
        task, part = attempt.job.dispatch, attempt.part
        attempt.part += 1
        return LogChunk(task.id, task.attempt, part, task.run_id, attempt.job.label, encode(lines))

    def drop_unsent(self, batch: Taken, first: int, reason: str) -> None:
        """Count chunks that could not be sent. The next lines of their attempts mention them."""
        with self._lock:
            for attempt, (count, size) in zip(batch.attempts[first:], batch.counts[first:], strict=True):
                attempt.drop(count, size, reason)
                key = id(attempt.job)
                if attempt.has_ended and len(self._attempts) >= _MAX_ATTEMPTS:
                    continue
                self._attempts[key] = self._ready[key] = attempt


def blocks(text: str) -> Iterator[str]:
    """Split a text into blocks of whole lines, of at most `MAX_LINE_LENGTH` characters unless one line is longer."""
    start, size = 0, len(text)
    while size - start > MAX_LINE_LENGTH:
        end = text.rfind("\n", start, start + MAX_LINE_LENGTH + 1)
        if end < 0:
            end = text.find("\n", start + MAX_LINE_LENGTH)
        if end < 0:
            break
        yield text[start:end]
        start = end + 1
    yield text[start:] if start else text


def final_text(text: str) -> str:
    """Return the text as a terminal finally shows it: for a line redrawn with carriage returns, the last version."""
    text = text.replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join([line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")])
    return text


def _cut(text: str) -> str:
    """Cut a line to the maximum length."""
    return text if len(text) <= MAX_LINE_LENGTH else f"{text[: MAX_LINE_LENGTH - 1]}…"
