"""All listeners by subject, and the events that each receives."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any
from uuid import UUID

from orchestrator.api.context import Api
from orchestrator.api.live.following import Following, Watch
from orchestrator.api.live.listener import END, Cursor, Listener, parse
from orchestrator.api.live.reads import Batches, Gap, Journal, MissedEvents, Reads
from orchestrator.api.live.subjects import (
    SYSTEM,
    Fold,
    Kind,
    State,
    Subject,
    event,
    final,
    has_ended,
    line,
    move,
    outage_event,
    progress,
    version,
)
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.errors import NotFound, OrchestratorError
from orchestrator.sdk.backend.logs import PAGE
from orchestrator.store.insights import TaskView
from orchestrator.telemetry import get_logger
from orchestrator.transport.changes import NOWHERE, Entry, StreamRead
from orchestrator.transport.codec import TaskChange
from orchestrator.transport.connection import UNAVAILABLE

log = get_logger("api")

_FOLD_SECONDS = {Kind.SYSTEM: 1.0, Kind.QUEUE: 0.2, Kind.RUN: 0.2}
"""Seconds for which state changes are collected into one event."""
_KINDS_WITH_LOGS = (Kind.TASK, Kind.RUN_LOG)
_LAST_LOGS_DELAY = 0.8
"""Seconds after the end of a task with logs or progress, in which its last log lines may still be stored."""
_RUN_READ_INTERVAL = 0.1
"""Seconds between two reads of a run whose state changes."""
_RETRY_DELAY = 1.0
"""Seconds before a failed read of a snapshot is retried."""


class AlreadyEnded(Exception):
    """The listener received the end event before it reconnected."""


class Hub:
    """All listeners of one API process."""

    def __init__(self, api: Api) -> None:
        reads = Reads(api)
        self._states: Batches[Subject, State | None] = Batches(reads.states)
        self._missed_events: Batches[Gap, MissedEvents | None] = Batches(reads.missed_events)
        self._journals: Batches[tuple[Subject, str], Journal] = Batches(reads.journals)
        keys = api.backend.connections.keys
        self._following = Following(
            api.settings.require_redis(), keys, self._on_changes, lambda: self._watch.check_now()
        )
        self._watch = Watch(api, lambda: bool(self._listeners) and not self._is_closed, self._send_outage)
        self._cursor = Cursor("", NOWHERE)
        self._listeners: dict[Subject, set[Listener]] = {}
        self._folds: dict[Subject, Fold] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._run_reads: dict[Subject, bool] = {}
        """Runs that are being read, and whether each must be read again."""
        self._joining = 0
        self._is_closed = False

    # -- joining and leaving

    async def join(self, subject: Subject, last: str | None) -> Listener:
        """Subscribe a listener, from the event `last` on or from now. Raise NotFound if the subject does not exist."""
        self._joining += 1
        try:
            await self._following.begin()
        finally:
            self._joining -= 1
        self._flush(subject)
        after = parse(last) if last else None
        listener = Listener(subject, self._cursor._replace(log=after.log if after else NOWHERE))
        self._listeners.setdefault(subject, set()).add(listener)
        self._watch.begin()
        if self._watch.outage:
            listener.send(outage_event(self._watch.outage))
        try:
            state = await self._states.get(subject)
            if state is None:
                kind = Kind.RUN if subject.kind is Kind.RUN_LOG else subject.kind
                raise NotFound.by_id(str(kind), _name(subject))
            if last == END and has_ended(state):
                raise AlreadyEnded
            missed = await self._missed_events.get(Gap(subject, after, listener.since)) if after else None
        except BaseException:
            self.leave(listener)
            raise
        if listener.restarts == 0:  # otherwise a newer snapshot is being read
            self._begin(listener, state, missed)
        if self._is_closed:
            listener.close()
        return listener

    def leave(self, listener: Listener) -> None:
        listener.close()
        remaining = self._listeners.get(listener.subject)
        if remaining is not None:
            remaining.discard(listener)
            if not remaining:
                del self._listeners[listener.subject]
                self._folds.pop(listener.subject, None)

    def close_streams(self) -> None:
        """End all streams: the server stops, and listeners reconnect to another one."""
        self._is_closed = True
        for listener in self._all():
            listener.close()
        self._following.close()
        self._watch.check_now()

    def refresh(self, listener: Listener) -> None:
        """Restart a listener with a new snapshot."""
        if listener.is_ending:
            return
        self._spawn(self._refresh(listener, listener.restart(self._cursor)))

    def _send_outage(self, outage: str) -> None:
        for listener in self._all():
            listener.send(outage_event(outage))

    def _all(self) -> list[Listener]:
        return [listener for listeners in self._listeners.values() for listener in listeners]

    # -- snapshots

    def _begin(self, listener: Listener, state: State, missed: MissedEvents | None = None) -> None:
        has_ended_already = has_ended(state)
        if missed is None:
            if isinstance(state, TaskView):
                listener.version = version(state)
            listener.begin(event("snapshot", state, str(listener.since)), is_complete=has_ended_already)
        else:
            listener.begin(missed.events + self._missed_moves(listener, missed.tasks), is_complete=has_ended_already)
            if listener.subject.kind is Kind.RUN and not has_ended_already:
                listener.send(event("run", state, str(listener.since)))
        if has_ended_already:
            self._end(listener, final(state))
        elif listener.early_end is not None:
            self._end(listener, listener.early_end)
        elif listener.subject.kind in _KINDS_WITH_LOGS:
            self._spawn(self._send_logs(listener))

    def _missed_moves(self, listener: Listener, moves: Iterable[TaskChange]) -> bytes:
        """Return the events of a task's state changes that a listener missed. The end is a separate event."""
        events = b""
        for task in moves:
            if version(task) > listener.version and task.status not in ENDED_TASK_STATES:
                listener.version = version(task)
                events += event("task", move(task), str(listener.since._replace(log=listener.log)))
        return events

    async def _refresh(self, listener: Listener, restarts: int) -> None:
        while True:
            try:
                state = await self._states.get(listener.subject)
                break
            except OrchestratorError as error:
                log.debug("api.snapshot_failed error=%s", error)
                await asyncio.sleep(_RETRY_DELAY)
        if listener.restarts != restarts or listener.is_closed or listener.is_ending:
            return
        if state is None:
            listener.close()  # the task or run was deleted
        else:
            self._begin(listener, state)

    # -- the end

    def _end(self, listener: Listener, end: object) -> None:
        """Send the end event after all log lines. A listener that waits for its snapshot receives it after that."""
        if listener.is_starting:
            listener.early_end = end
        elif not listener.is_ending:
            listener.is_ending = True
            self._spawn(self._finish(listener, event("end", end, END)))

    async def _finish(self, listener: Listener, end: bytes) -> None:
        if listener.subject.kind in _KINDS_WITH_LOGS:
            await self._send_logs(listener)
            if not listener.has_no_logs:
                await asyncio.sleep(_LAST_LOGS_DELAY)
                await self._send_logs(listener)
        listener.send(end)
        listener.close()

    # -- logs and progress

    async def _send_logs(self, listener: Listener) -> None:
        """Send a listener new log lines and the progress of its task, or log lines of all tasks of its run."""
        if listener.is_log_read_due and not listener.is_ending:
            return
        listener.is_log_read_due = True
        async with listener.log_lock:
            listener.is_log_read_due = False
            while True:
                try:
                    journal = await self._journals.get((listener.subject, listener.log))
                except (*UNAVAILABLE, OrchestratorError):
                    return  # the lines are still stored, and a later read returns them
                restarts = listener.restarts
                for entry in journal.lines:
                    at = str(self._cursor._replace(log=entry.entry))
                    await listener.send_log_line(event("log", line(listener.subject.kind, entry), at))
                    if listener.restarts != restarts or listener.is_lagging or listener.is_closed:
                        return  # the listener restarts at its cursor, or has disconnected
                    listener.log = entry.entry
                if len(journal.lines) < PAGE:
                    break
            if journal.progress is not None and journal.progress != listener.progress:
                listener.progress = journal.progress
                listener.send(event("progress", progress(journal.progress), self._id(listener)))

    def _id(self, listener: Listener) -> str:
        return str(self._cursor._replace(log=listener.log))

    # -- changes

    def _on_changes(self, changes: StreamRead, cursor: Cursor) -> bool:
        """Send a batch of changes to all listeners, and set the cursor. Return whether there are any listeners."""
        for entry in changes.entries:
            if entry.changes.is_first:
                self._cursor = Cursor(entry.changes.generation, entry.id)
                self._folds.clear()
                for listener in self._all():
                    self.refresh(listener)
            else:
                self._publish(entry)
        self._cursor = cursor
        if changes.has_gap:
            self._folds.clear()
            for listener in self._all():
                self.refresh(listener)
        for subject in self._logged_subjects(changes):
            for listener in self._listeners.get(subject, ()):
                self._spawn(self._send_logs(listener))
        return bool(self._listeners or self._joining) and not self._is_closed

    def _logged_subjects(self, changes: StreamRead) -> Iterable[Subject]:
        if changes.any_logged:
            return [subject for subject in self._listeners if subject.kind in _KINDS_WITH_LOGS]
        return [Subject(kind, id) for id in changes.logged_tasks for kind in _KINDS_WITH_LOGS]

    def _publish(self, entry: Entry) -> None:
        changes = entry.changes
        self._cursor = Cursor(changes.generation, entry.id)
        moves: dict[Subject, list[TaskChange]] = {}
        for task in changes.tasks:
            if (listeners := self._listeners.get(Subject(Kind.TASK, task.id))) is not None:
                self._publish_task(listeners, task)
            for subject in (Subject(Kind.QUEUE, task.queue), Subject(Kind.RUN, task.run or b"")):
                if subject in self._listeners:
                    moves.setdefault(subject, []).append(task)
        for subject, tasks in moves.items():
            self._fold(subject).add_tasks(tasks)
        for run in changes.runs:
            for kind in (Kind.RUN, Kind.RUN_LOG, Kind.TASK):  # a workflow as code has a turn task with the run's id
                if (subject := Subject(kind, run.id)) in self._listeners:
                    self._spawn(self._read_run(subject))
        if SYSTEM in self._listeners and (changes.tasks or changes.runs or changes.workers):
            fold = self._fold(SYSTEM)
            fold.add_tasks(changes.tasks)
            fold.add_runs(changes.runs)
            fold.add_workers(changes.workers)
        if changes.queues:
            for listener in self._all():
                if listener.subject.kind in (Kind.QUEUE, Kind.SYSTEM):
                    self.refresh(listener)

    def _publish_task(self, listeners: Iterable[Listener], task: TaskChange) -> None:
        moved = move(task)
        for listener in listeners:
            if version(task) <= listener.version or listener.is_ending:
                continue
            listener.version = version(task)
            if task.status in ENDED_TASK_STATES:
                self._end(listener, moved)
            else:
                listener.send(event("task", moved, self._id(listener)))

    async def _read_run(self, subject: Subject) -> None:
        """Send the state of a run to its listeners. Read again after changes that arrived during the read."""
        if subject in self._run_reads:
            self._run_reads[subject] = True
            return
        self._run_reads[subject] = True
        try:
            while self._run_reads[subject]:
                self._run_reads[subject] = False
                state = await self._states.get(subject)
                if state is not None:
                    self._publish_state(subject, state)
                await asyncio.sleep(_RUN_READ_INTERVAL)
        except OrchestratorError:
            for listener in self._listeners.get(subject, ()):
                self.refresh(listener)
        finally:
            del self._run_reads[subject]

    def _publish_state(self, subject: Subject, state: State) -> None:
        if has_ended(state):
            self._flush(subject)
            for listener in self._listeners.get(subject, ()):
                self._end(listener, final(state))
            return
        if subject.kind is Kind.RUN_LOG:
            return
        events = event(str(subject.kind), final(state), str(self._cursor))
        for listener in self._listeners.get(subject, ()):
            if not listener.is_ending:
                listener.send(events)

    def _fold(self, subject: Subject) -> Fold:
        fold = self._folds.get(subject)
        if fold is None:
            fold = self._folds[subject] = Fold(subject.kind)
            asyncio.get_running_loop().call_later(_FOLD_SECONDS[subject.kind], self._flush, subject)
        return fold

    def _flush(self, subject: Subject) -> None:
        """Send the collected changes of a subject."""
        fold = self._folds.pop(subject, None)
        if fold is not None:
            events = fold.events(str(self._cursor))
            for listener in self._listeners.get(subject, ()):
                listener.send(events)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _name(subject: Subject) -> str:
    return str(UUID(bytes=subject.key)) if isinstance(subject.key, bytes) else subject.key
