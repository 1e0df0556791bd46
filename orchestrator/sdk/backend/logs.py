"""Reads of task logs from Postgres, where the leader stores them, and of task progress from Redis."""

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
from orchestrator.transport.changes import last_log_entry, wait_for_log
from orchestrator.transport.codec import LogLine, Malformed, decode
from orchestrator.transport.journal import LOSSES, read_progress

PAGE = 200
"""Chunks per page."""
_MAX_PAGES = 10
"""Pages of chunks that are searched for matching lines, at most."""
_POLL_INTERVAL = 0.5
"""Seconds between two polls while Redis is unavailable."""


class LogPosition(NamedTuple):
    """A position in a log: a chunk, and a line of it, counted from 1."""

    chunk: int
    line: int

    @classmethod
    def of(cls, entry: str) -> LogPosition:
        """Return the position that a log cursor encodes; for an empty cursor, the beginning."""
        chunk, _, line = entry.partition("-")
        return cls(min(int(chunk or 0), 2**63 - 1), int(line or 0))


def entries_of(chunks: Sequence[Chunk], after: LogPosition) -> Iterator[LogEntry]:
    """Yield the lines of chunks after a position, decrypted if this process has the key."""
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
        return []  # from another release, or damaged


def read_task(
    connections: Connections, task: bytes, after: str = "", wait: float = 0.0, attempt: int | None = None
) -> LogPage:
    """Return a page of a task's log after a cursor. Wait up to `wait` seconds for new lines."""
    return _read(connections, task, after, wait, lambda on, first: logs.of_task(on, task, first, PAGE, attempt))


def read_run(connections: Connections, run: bytes, after: str = "", wait: float = 0.0) -> LogPage:
    """Return a page of the log of a run after a cursor. Wait up to `wait` seconds for new lines."""
    return _read(connections, run, after, wait, lambda on, first: logs.of_run(on, run, first, PAGE))


def read_last(connections: Connections, task: bytes, lines: int, attempt: int | None = None) -> list[LogEntry]:
    with connections.reading() as connection:
        chunks = logs.last_of_task(connection, task, lines, attempt)
    return list(entries_of(chunks, LogPosition(0, 0)))[-lines:]


class LogPart(NamedTuple):
    """Some lines of the log of a task or run, and the number of earlier lines."""

    lines: list[LogEntry]
    first: str
    """The cursor of the first line that was searched. Older lines precede it."""
    last: str
    """The cursor of the last line that was searched."""
    earlier: int
    """The number of stored lines before these."""
    left_out: list[LogEntry]
    """Matching lines before these that were read as well."""


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
    """Return the last matching lines before a cursor, or at the end of the log. The search is bounded."""
    end = LogPosition.of(before) if before else LogPosition(logs.LAST, 0)
    matches: list[LogEntry] = []
    last = ""
    with connections.reading() as connection:
        for _ in range(_MAX_PAGES):
            if is_run:
                chunks = logs.last_of_run(connection, target, PAGE, _chunk_bound(end))
            else:
                chunks = logs.last_of_task(connection, target, PAGE, attempt, _chunk_bound(end))
            page = [entry for entry in entries_of(chunks, LogPosition(0, 0)) if LogPosition.of(entry.entry) < end]
            matches = [*filter(fits, page), *matches]
            last = last or (page[-1].entry if page else "")
            end = LogPosition(chunks[0].id, 1) if chunks else end
            if len(matches) >= lines or len(chunks) < PAGE:
                break
        selected = matches[-lines:]
        if len(matches) > lines:
            end = LogPosition.of(selected[0].entry)
        earlier = logs.count_lines(connection, target, attempt, end.chunk, is_run=is_run) + max(0, end.line - 1)
    return LogPart(selected, f"{end.chunk}-{end.line}", last, earlier, matches[:-lines])


def _chunk_bound(end: LogPosition) -> int:
    """Return the exclusive upper bound of the ids of chunks with lines before a position."""
    return end.chunk + 1 if end.line > 1 else end.chunk


def read_many(connections: Connections, after: Mapping[bytes, str]) -> dict[bytes, list[LogEntry]]:
    """Return the log lines of several tasks, each after a cursor."""
    positions = {task: LogPosition.of(entry) for task, entry in after.items()}
    entries: dict[bytes, list[LogEntry]] = {task: [] for task in after}
    with connections.reading() as connection:
        chunks = logs.of_tasks(connection, {task: position.chunk for task, position in positions.items()}, PAGE)
    for chunk in chunks:
        task = chunk.task_id.bytes
        entries[task] += entries_of([chunk], positions[task])
    return entries


def _read(
    connections: Connections, target: bytes, after: str, wait: float, read: Callable[[Connection, int], list[Chunk]]
) -> LogPage:
    position = LogPosition.of(after)
    give_up_at = time.monotonic() + wait
    stream_end = _stream_end(connections) if wait > 0 else None
    while True:
        with connections.reading() as connection:
            entries = list(entries_of(read(connection, position.chunk), position))
        remaining = give_up_at - time.monotonic()
        if entries or remaining <= 0:
            return LogPage(entries, entries[-1].entry if entries else after)
        stream_end = _wait(connections, target, stream_end, remaining)


def _stream_end(connections: Connections) -> str | None:
    """Return the last entry of the Redis stream that announces new log lines; None while Redis is unavailable."""
    try:
        return last_log_entry(connections.shared_redis, connections.keys)
    except LOSSES:
        return None


def _wait(connections: Connections, target: bytes, stream_end: str | None, seconds: float) -> str | None:
    """Wait until the task or run has new log lines, for `seconds` at most. Return the new end of the stream."""
    try:
        if stream_end is not None:
            return wait_for_log(connections.shared_redis, connections.keys, target, stream_end, seconds)
    except LOSSES:
        pass
    time.sleep(min(_POLL_INTERVAL, seconds))
    return _stream_end(connections)


def progress_of(connections: Connections, task: bytes) -> TaskProgress | None:
    """Return the last progress of a task; None if it reported none, or long ago."""
    try:
        found = read_progress(connections.shared_redis, connections.keys, task)
    except LOSSES as error:
        raise OrchestratorError(f"The progress of tasks cannot be read from Redis: {error}") from error
    if found is None:
        return None
    progress, age = found
    return TaskProgress(fraction=progress.fraction, text=progress.text, attempt=progress.attempt, age=age)
