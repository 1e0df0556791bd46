"""Reads of snapshots, missed events, progress and logs, each shared by many listeners."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import anyio
import anyio.to_thread

from orchestrator.api.context import Api
from orchestrator.api.live.listener import Cursor
from orchestrator.api.live.subjects import SYSTEM, Kind, State, Subject, missed
from orchestrator.sdk.backend.logs import read_many, read_run
from orchestrator.sdk.tasks.logs import LogEntry
from orchestrator.store import insights
from orchestrator.transport import journal
from orchestrator.transport.changes import find_entries, history
from orchestrator.transport.codec import ProgressMark, TaskChange, stream_position

K = TypeVar("K")
V = TypeVar("V")

_PAUSE = 0.02
"""Seconds between two reads, in which more requests may arrive."""


class Batches(Generic[K, V]):
    """Answers all requests since the last read with one read. A read begins after the requests that it answers."""

    def __init__(self, read: Callable[[Sequence[K]], Mapping[K, V]]) -> None:
        self._read = read
        self._requested: dict[K, asyncio.Future[V]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._limiter: anyio.CapacityLimiter | None = None

    async def get(self, key: K) -> V:
        """Return the value of a key; raise the error of the read if it failed."""
        answer = self._requested.get(key)
        if answer is None:
            answer = self._requested[key] = asyncio.get_running_loop().create_future()
            answer.add_done_callback(retrieve_error)
        if self._reader is None:
            self._reader = asyncio.create_task(self._answer())
        return await asyncio.shield(answer)

    async def _answer(self) -> None:
        self._limiter = self._limiter or anyio.CapacityLimiter(1)
        try:
            await asyncio.sleep(0)  # concurrent requests share a read
            while self._requested:
                requested, self._requested = self._requested, {}
                try:
                    keys = list(requested)
                    values = await anyio.to_thread.run_sync(partial(self._read, keys), limiter=self._limiter)
                except Exception as error:  # noqa: BLE001  # the callers of get() raise it
                    for answer in requested.values():
                        answer.set_exception(error)
                else:
                    for key, answer in requested.items():
                        answer.set_result(values[key])
                await asyncio.sleep(_PAUSE)
        finally:
            self._reader = None


def retrieve_error(answer: asyncio.Future[Any]) -> None:
    """Retrieve the future's exception, so that asyncio does not log it when the listener has gone."""
    if not answer.cancelled():
        answer.exception()


class Gap(NamedTuple):
    """The part of the stream of changes that a listener missed, between two cursors."""

    subject: Subject
    after: Cursor
    until: Cursor


class MissedEvents(NamedTuple):
    """The events in a gap."""

    tasks: list[TaskChange]
    """State changes of a task; empty for other subjects."""
    events: bytes
    """Encoded events of a run, a queue or the system; empty for a task."""


class Journal(NamedTuple):
    """Progress and log lines of a task since the last read."""

    progress: ProgressMark | None
    lines: list[LogEntry]


class Reads:
    """The reads, which run in threads."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def states(self, subjects: Sequence[Subject]) -> dict[Subject, State | None]:
        """Return the snapshots of subjects; None for those that do not exist."""
        states: dict[Subject, State | None] = dict.fromkeys(subjects)
        tasks, runs, queues = (
            [subject for subject in subjects if subject.kind in kinds]
            for kinds in ((Kind.TASK,), (Kind.RUN, Kind.RUN_LOG), (Kind.QUEUE,))
        )
        with self._api.reading() as connection:
            if tasks:
                for task in insights.find_tasks(connection, _ids(tasks)):
                    states[Subject(Kind.TASK, task.id.bytes)] = task
            if runs:
                views = {run.id.bytes: run for run in insights.find_runs(connection, list({*_ids(runs)}))}
                states |= {subject: views.get(cast("bytes", subject.key)) for subject in runs}
            if queues:
                known = {queue.queue: queue for queue in insights.list_queues(connection)}
                states |= {
                    subject: known.get(str(subject.key)) or insights.empty_queue(str(subject.key)) for subject in queues
                }
            if SYSTEM in states:
                overview = insights.overview(connection)
        if SYSTEM in states:
            states[SYSTEM] = replace(overview, standbys=self._api.backend.insights.standbys())
        return states

    def journals(self, requests: Sequence[tuple[Subject, str]]) -> dict[tuple[Subject, str], Journal]:
        """Return progress and log lines of tasks and runs, each after an entry of its log."""
        tasks = [(cast("bytes", subject.key), after) for subject, after in requests if subject.kind is Kind.TASK]
        journals = {
            (Subject(Kind.TASK, task), after): value for (task, after), value in self._task_journals(tasks).items()
        }
        connections = self._api.backend.connections
        for subject, after in requests:
            if subject.kind is Kind.RUN_LOG:
                journals[subject, after] = Journal(None, read_run(connections, cast("bytes", subject.key), after).lines)
        return journals

    def _task_journals(self, requests: Sequence[tuple[bytes, str]]) -> dict[tuple[bytes, str], Journal]:
        connections = self._api.backend.connections
        journals: dict[tuple[bytes, str], Journal] = {}
        remaining = list(requests)
        while remaining:  # a task whose listeners have different cursors is read once for each cursor
            batch = dict(remaining)
            lines = read_many(connections, batch)
            marks = journal.read_all_progress(connections.redis, connections.keys, list(batch))
            journals |= {(task, after): Journal(marks[task], lines[task]) for task, after in batch.items()}
            remaining = [request for request in remaining if request not in journals]
        return journals

    def missed_events(self, gaps: Sequence[Gap]) -> dict[Gap, MissedEvents | None]:
        """Return the events in each gap, or None where the stream no longer has them: the listener needs a snapshot."""
        connections = self._api.backend.connections
        redis, keys = connections.redis, connections.keys
        existing = find_entries(redis, keys, {gap.after.entry for gap in gaps})
        events: dict[Gap, MissedEvents | None] = dict.fromkeys(gaps)
        available = [
            gap
            for gap in gaps
            if gap.after.entry in existing and existing[gap.after.entry].generation == gap.after.generation
        ]
        if not available:
            return events
        after = min((gap.after.entry for gap in available), key=stream_position)
        until = max((gap.until.entry for gap in available), key=stream_position)
        positioned = [(stream_position(entry.id), entry) for entry in history(redis, keys, after, until)]
        by_task: dict[bytes, list[tuple[tuple[int, int], TaskChange]]] = {}
        for position, entry in positioned:
            for task in entry.changes.tasks:
                by_task.setdefault(task.id, []).append((position, task))
        firsts = [position for position, entry in positioned if entry.changes.is_first]
        for gap in available:
            begin, end = stream_position(gap.after.entry), stream_position(gap.until.entry)
            if any(begin < position <= end for position in firsts):
                continue
            if gap.subject.kind is Kind.TASK:
                moves = by_task.get(cast("bytes", gap.subject.key), ())
                events[gap] = MissedEvents([task for position, task in moves if begin < position <= end], b"")
                continue
            entries = [entry for position, entry in positioned if begin < position <= end]
            events[gap] = MissedEvents([], missed(gap.subject, entries).events(str(gap.until)))
        return events


def _ids(subjects: Sequence[Subject]) -> list[bytes]:
    return [cast("bytes", subject.key) for subject in subjects]
