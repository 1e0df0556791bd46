"""The logs of tasks, read from Postgres, where the leader stores them, and their progress, read from Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.ids import to_text
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.tasks.logs import LogEntry, LogPage, TaskProgress
from orchestrator.sealing import is_sealed_text, reveal_text
from orchestrator.store import logs
from orchestrator.store.logs import Chunk
from orchestrator.transport.changes import last_spoken, wait_spoken
from orchestrator.transport.codec import LogLine, Malformed, decode
from orchestrator.transport.journal import LOSSES, read_progress

PAGE = 200
"""Chunks that are read at once."""
_MOST_PAGES = 10
"""Of chunks that are looked at for lines that fit."""
_PAUSE = 0.5
"""Seconds between two looks while Redis is away."""


class LogPosition(NamedTuple):
    """A position in a log: a chunk, and a line of it, counted from 1."""

    chunk: int
    line: int

    @classmethod
    def of(cls, entry: str) -> LogPosition:
        """Return the position that an entry names; the beginning, if it names none."""
        chunk, _, line = entry.partition("-")
        return cls(min(int(chunk or 0), 2**63 - 1), int(line or 0))


def entries_of(chunks: Sequence[Chunk], after: LogPosition) -> Iterator[LogEntry]:
    """Yield the lines of chunks that come after a position, opened where this process can."""
    for chunk in chunks:
        task = to_text(chunk.task_id.bytes)
        for number, line in enumerate(_lines(chunk), 1):
            if (chunk.id, number) > after:
                text = reveal_text(line.text) if is_sealed_text(line.text) else line.text
                position = f"{chunk.id}-{number}"
                yield LogEntry(line.at, line.attempt, line.level, text, line.source, task, chunk.step, position)


def _lines(chunk: Chunk) -> list[LogLine]:
    try:
        return decode(list[LogLine], bytes(chunk.lines))
    except Malformed:
        return []  # of another release, or not ours


def read_task(
    connections: Connections, task: bytes, after: str = "", wait: float = 0.0, attempt: int | None = None
) -> LogPage:
    """Return what a task said after an entry; wait so many seconds for something new."""
    return _read(connections, task, after, wait, lambda on, first: logs.of_task(on, task, first, PAGE, attempt))


def read_run(connections: Connections, run: bytes, after: str = "", wait: float = 0.0) -> LogPage:
    """Return what the tasks of a run said after an entry; wait so many seconds for something new."""
    return _read(connections, run, after, wait, lambda on, first: logs.of_run(on, run, first, PAGE))


def read_last(connections: Connections, task: bytes, lines: int, attempt: int | None = None) -> list[LogEntry]:
    with connections.reading() as connection:
        chunks = logs.last_of_task(connection, task, lines, attempt)
    return list(entries_of(chunks, LogPosition(0, 0)))[-lines:]


class LogPart(NamedTuple):
    """Lines of a task or run, and how many stand before them."""

    lines: list[LogEntry]
    first: str
    """The first line that was looked at: older ones stand before it."""
    last: str
    """The last one that was looked at."""
    earlier: int
    """How many lines are kept before these."""
    left_out: list[LogEntry]
    """Some of those, which were read as well."""


def read_before(
    connections: Connections,
    target: bytes,
    before: str,
    lines: int,
    attempt: int | None = None,
    fits: Callable[[LogEntry], bool] = lambda _: True,
    *,
    is_run: bool = False,
) -> LogPart:
    """Return the last lines that fit before an entry, or the last of all; it looks at a bounded number of them."""
    end = LogPosition.of(before) if before else LogPosition(logs.LAST, 0)
    found: list[LogEntry] = []
    last = ""
    with connections.reading() as connection:
        for _ in range(_MOST_PAGES):
            if is_run:
                chunks = logs.last_of_run(connection, target, PAGE, _behind(end))
            else:
                chunks = logs.last_of_task(connection, target, PAGE, attempt, _behind(end))
            read = [one for one in entries_of(chunks, LogPosition(0, 0)) if LogPosition.of(one.entry) < end]
            found = [*filter(fits, read), *found]
            last = last or (read[-1].entry if read else "")
            end = LogPosition(chunks[0].id, 1) if chunks else end
            if len(found) >= lines or len(chunks) < PAGE:
                break
        shown = found[-lines:]
        if len(found) > lines:
            end = LogPosition.of(shown[0].entry)
        earlier = logs.count_lines(connection, target, attempt, end.chunk, is_run=is_run) + max(0, end.line - 1)
    return LogPart(shown, f"{end.chunk}-{end.line}", last, earlier, found[:-lines])


def _behind(end: LogPosition) -> int:
    """Return the id that all chunks with lines before a position are below."""
    return end.chunk + 1 if end.line > 1 else end.chunk


def read_many(connections: Connections, after: Mapping[bytes, str]) -> dict[bytes, list[LogEntry]]:
    """Return what tasks have said, each after an entry of its log."""
    positions = {task: LogPosition.of(entry) for task, entry in after.items()}
    found: dict[bytes, list[LogEntry]] = {task: [] for task in after}
    with connections.reading() as connection:
        chunks = logs.of_tasks(connection, {task: position.chunk for task, position in positions.items()}, PAGE)
    for chunk in chunks:
        task = chunk.task_id.bytes
        found[task] += entries_of([chunk], positions[task])
    return found


def _read(
    connections: Connections, target: bytes, after: str, wait: float, read: Callable[[Connection, int], list[Chunk]]
) -> LogPage:
    position = LogPosition.of(after)
    give_up_at = time.monotonic() + wait
    spoken = _last(connections) if wait > 0 else None
    while True:
        with connections.reading() as connection:
            entries = list(entries_of(read(connection, position.chunk), position))
        left = give_up_at - time.monotonic()
        if entries or left <= 0:
            return LogPage(entries, entries[-1].entry if entries else after)
        spoken = _wait(connections, target, spoken, left)


def _last(connections: Connections) -> str | None:
    """Return the end of the stream of tasks that have logged something; None while Redis is away."""
    try:
        return last_spoken(connections.shared_redis, connections.keys)
    except LOSSES:
        return None


def _wait(connections: Connections, target: bytes, spoken: str | None, seconds: float) -> str | None:
    """Wait until the task or run has logged something, or so many seconds."""
    try:
        if spoken is not None:
            return wait_spoken(connections.shared_redis, connections.keys, target, spoken, seconds)
    except LOSSES:
        pass
    time.sleep(min(_PAUSE, seconds))
    return _last(connections)


def progress_of(connections: Connections, task: bytes) -> TaskProgress | None:
    """Return a task's last progress, or None if it has said nothing, or long ago."""
    try:
        found = read_progress(connections.shared_redis, connections.keys, task)
    except LOSSES as error:
        raise OrchestratorError(f"Redis, which keeps the progress of tasks, cannot tell: {error}") from error
    if found is None:
        return None
    mark, age = found
    return TaskProgress(fraction=mark.fraction, text=mark.text, attempt=mark.attempt, age=age)
