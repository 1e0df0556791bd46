"""Snapshots, missed events, and progress and logs of tasks: read for many listeners at once."""

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
"""Seconds between two reads, in which more may gather."""


class Batches(Generic[K, V]):
    """Answers all questions since the last read began with one read. No answer is older than its question."""

    def __init__(self, read: Callable[[Sequence[K]], Mapping[K, V]]) -> None:
        self._read = read
        self._asked: dict[K, asyncio.Future[V]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._free: anyio.CapacityLimiter | None = None

    async def get(self, key: K) -> V:
        """Return what a read says of this; raises what went wrong with it."""
        answer = self._asked.get(key)
        if answer is None:
            answer = self._asked[key] = asyncio.get_running_loop().create_future()
            answer.add_done_callback(looked_at)
        if self._reader is None:
            self._reader = asyncio.create_task(self._answer())
        return await asyncio.shield(answer)

    async def _answer(self) -> None:
        self._free = self._free or anyio.CapacityLimiter(1)
        try:
            await asyncio.sleep(0)  # concurrent requests share a read
            while self._asked:
                asked, self._asked = self._asked, {}
                try:
                    keys = list(asked)
                    found = await anyio.to_thread.run_sync(partial(self._read, keys), limiter=self._free)
                except Exception as error:  # noqa: BLE001  # it is for those who asked
                    for answer in asked.values():
                        answer.set_exception(error)
                else:
                    for key, answer in asked.items():
                        answer.set_result(found[key])
                await asyncio.sleep(_PAUSE)
        finally:
            self._reader = None


def looked_at(answer: asyncio.Future[Any]) -> None:
    """Look at an error whose listener may have gone."""
    if not answer.cancelled():
        answer.exception()


class Missed(NamedTuple):
    """A question: what happened to a subject between two cursors?"""

    subject: Subject
    after: Cursor
    until: Cursor


class Past(NamedTuple):
    """The missed events."""

    tasks: list[TaskChange]
    """Moves of the one task."""
    said: bytes
    """Events, of all other subjects."""


class Heard(NamedTuple):
    """Progress and log lines of a task since the last read."""

    mark: ProgressMark | None
    lines: list[LogEntry]


class Reads:
    """Reads in threads."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def states(self, subjects: Sequence[Subject]) -> dict[Subject, State | None]:
        """Return what there is of subjects; None of those that there are not."""
        found: dict[Subject, State | None] = dict.fromkeys(subjects)
        tasks, runs, queues = (
            [subject for subject in subjects if subject.kind in kinds]
            for kinds in ((Kind.TASK,), (Kind.RUN, Kind.RUN_LOG), (Kind.QUEUE,))
        )
        with self._api.reading() as connection:
            if tasks:
                for task in insights.find_tasks(connection, _ids(tasks)):
                    found[Subject(Kind.TASK, task.id.bytes)] = task
            if runs:
                views = {run.id.bytes: run for run in insights.find_runs(connection, list({*_ids(runs)}))}
                found |= {subject: views.get(cast("bytes", subject.key)) for subject in runs}
            if queues:
                known = {one.queue: one for one in insights.list_queues(connection)}
                found |= {
                    subject: known.get(str(subject.key)) or insights.empty_queue(str(subject.key)) for subject in queues
                }
            if SYSTEM in found:
                overview = insights.overview(connection)
        if SYSTEM in found:
            found[SYSTEM] = replace(overview, standbys=self._api.backend.insights.standbys())
        return found

    def journals(self, asked: Sequence[tuple[Subject, str]]) -> dict[tuple[Subject, str], Heard]:
        """Return what tasks, or all tasks of runs, have said, each after an entry of its log."""
        tasks = [(cast("bytes", subject.key), after) for subject, after in asked if subject.kind is Kind.TASK]
        heard = {(Subject(Kind.TASK, task), after): said for (task, after), said in self._of_tasks(tasks).items()}
        connections = self._api.backend.connections
        for subject, after in asked:
            if subject.kind is Kind.RUN_LOG:
                heard[subject, after] = Heard(None, read_run(connections, cast("bytes", subject.key), after).lines)
        return heard

    def _of_tasks(self, asked: Sequence[tuple[bytes, str]]) -> dict[tuple[bytes, str], Heard]:
        connections = self._api.backend.connections
        heard: dict[tuple[bytes, str], Heard] = {}
        rest = list(asked)
        while rest:  # a task whose listeners stand at different entries is read for each of them
            now = dict(rest)
            lines = read_many(connections, now)
            marks = journal.read_marks(connections.redis, connections.keys, list(now))
            heard |= {(task, after): Heard(marks[task], lines[task]) for task, after in now.items()}
            rest = [one for one in rest if one not in heard]
        return heard

    def pasts(self, asked: Sequence[Missed]) -> dict[Missed, Past | None]:
        """Return what listeners have missed; None where it is not known, and they begin again."""
        connections = self._api.backend.connections
        redis, keys = connections.redis, connections.keys
        standing = find_entries(redis, keys, {one.after.entry for one in asked})
        pasts: dict[Missed, Past | None] = dict.fromkeys(asked)
        known = [
            one
            for one in asked
            if one.after.entry in standing and standing[one.after.entry].generation == one.after.generation
        ]
        if not known:
            return pasts
        after = min((one.after.entry for one in known), key=stream_position)
        until = max((one.until.entry for one in known), key=stream_position)
        positioned = [(stream_position(entry.id), entry) for entry in history(redis, keys, after, until)]
        by_task: dict[bytes, list[tuple[tuple[int, int], TaskChange]]] = {}
        for position, entry in positioned:
            for task in entry.changes.tasks:
                by_task.setdefault(task.id, []).append((position, task))
        firsts = [position for position, entry in positioned if entry.changes.is_first]
        for one in known:
            begin, end = stream_position(one.after.entry), stream_position(one.until.entry)
            if any(begin < position <= end for position in firsts):
                continue
            if one.subject.kind is Kind.TASK:
                moves = by_task.get(cast("bytes", one.subject.key), ())
                pasts[one] = Past([task for position, task in moves if begin < position <= end], b"")
                continue
            theirs = [entry for position, entry in positioned if begin < position <= end]
            pasts[one] = Past([], missed(one.subject, theirs).events(str(one.until)))
        return pasts


def _ids(subjects: Sequence[Subject]) -> list[bytes]:
    return [cast("bytes", subject.key) for subject in subjects]
