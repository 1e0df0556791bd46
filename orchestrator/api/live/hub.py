"""All listeners by subject, and the events that each gets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any
from uuid import UUID

from orchestrator.api.context import Api
from orchestrator.api.live.following import Following, Watch
from orchestrator.api.live.listener import END, Cursor, Listener, parse
from orchestrator.api.live.reads import Batches, Heard, Missed, Past, Reads
from orchestrator.api.live.subjects import (
    SYSTEM,
    Fold,
    Kind,
    State,
    Subject,
    age,
    event,
    final,
    has_ended,
    line,
    move,
    outage_event,
    progress,
)
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.errors import NotFound, OrchestratorError
from orchestrator.sdk.backend.logs import PAGE
from orchestrator.store.insights import TaskView
from orchestrator.telemetry import get_logger
from orchestrator.transport.changes import NOWHERE, Entry
from orchestrator.transport.changes import Heard as HeardOfAll
from orchestrator.transport.codec import TaskChange
from orchestrator.transport.connection import UNAVAILABLE

log = get_logger("api")

_FOLDED = {Kind.SYSTEM: 1.0, Kind.QUEUE: 0.2, Kind.RUN: 0.2}
"""Seconds for which moves are gathered into one event."""
_SPEAKING = (Kind.TASK, Kind.RUN_LOG)
"""Subjects with log lines."""
_LAST_WORDS = 0.8
"""Seconds after the end of a task that has said something, in which the last of it may be written and stored."""
_LOOKED_AT = 0.1
"""Seconds between two looks at a run that goes on."""
_TRY_AGAIN = 1.0
"""Seconds before a snapshot that could not be read is tried again."""


class Over(Exception):
    """The listener has had the end already."""


class Hub:
    """All listeners of one process."""

    def __init__(self, api: Api) -> None:
        reads = Reads(api)
        self._states: Batches[Subject, State | None] = Batches(reads.states)
        self._pasts: Batches[Missed, Past | None] = Batches(reads.pasts)
        self._journals: Batches[tuple[Subject, str], Heard] = Batches(reads.journals)
        keys = api.backend.connections.keys
        self._following = Following(api.settings.require_redis(), keys, self._heard, lambda: self._watch.turn())
        self._watch = Watch(api, lambda: bool(self._listeners) and not self._is_closed, self._tell_outage)
        self._cursor = Cursor("", NOWHERE)
        self._listeners: dict[Subject, set[Listener]] = {}
        self._folds: dict[Subject, Fold] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._looked_at: dict[Subject, bool] = {}
        """Reads under way, and whether each must be repeated."""
        self._joining = 0
        self._is_closed = False

    # -- coming and going

    async def join(self, subject: Subject, last: str | None) -> Listener:
        """Return one more listener, from an event on or from now; raises where there is nothing to listen to."""
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
            listener.give(outage_event(self._watch.outage))
        try:
            state = await self._states.get(subject)
            if state is None:
                kind = Kind.RUN if subject.kind is Kind.RUN_LOG else subject.kind
                raise NotFound.by_id(str(kind), _name(subject))
            if last == END and has_ended(state):
                raise Over
            past = await self._pasts.get(Missed(subject, after, listener.since)) if after else None
        except BaseException:
            self.leave(listener)
            raise
        if listener.turn == 0:  # else it begins with a snapshot that is newer
            self._begin(listener, state, past)
        if self._is_closed:
            listener.close()
        return listener

    def leave(self, listener: Listener) -> None:
        listener.close()
        left = self._listeners.get(listener.subject)
        if left is not None:
            left.discard(listener)
            if not left:
                del self._listeners[listener.subject]
                self._folds.pop(listener.subject, None)

    def let_go(self) -> None:
        """End all streams: the server stops, and listeners connect to another."""
        self._is_closed = True
        for listener in self._all():
            listener.close()
        self._following.close()
        self._watch.turn()

    def refresh(self, listener: Listener) -> None:
        """Have a listener begin again, with a snapshot."""
        if listener.is_ending:
            return
        self._do(self._refresh(listener, listener.hold(self._cursor)))

    def _tell_outage(self, outage: str) -> None:
        for listener in self._all():
            listener.give(outage_event(outage))

    def _all(self) -> list[Listener]:
        return [listener for listeners in self._listeners.values() for listener in listeners]

    # -- beginning

    def _begin(self, listener: Listener, state: State, past: Past | None = None) -> None:
        is_over = has_ended(state)
        if past is None:
            if isinstance(state, TaskView):
                listener.age = age(state)
            listener.begin(event("snapshot", state, str(listener.since)), is_whole=is_over)
        else:
            listener.begin(past.said + self._told(listener, past.tasks), is_whole=is_over)
            if listener.subject.kind is Kind.RUN and not is_over:
                listener.give(event("run", state, str(listener.since)))
        if is_over:
            self._end(listener, final(state))
        elif listener.end is not None:
            self._end(listener, listener.end)
        elif listener.subject.kind in _SPEAKING:
            self._do(self._hear(listener))

    def _told(self, listener: Listener, moves: Iterable[TaskChange]) -> bytes:
        """Return the events of moves of its task that a listener has missed; the end has an event of its own."""
        said = b""
        for task in moves:
            if age(task) > listener.age and task.status not in ENDED_TASK_STATES:
                listener.age = age(task)
                said += event("task", move(task), str(listener.since._replace(log=listener.log)))
        return said

    async def _refresh(self, listener: Listener, turn: int) -> None:
        while True:
            try:
                state = await self._states.get(listener.subject)
                break
            except OrchestratorError as error:
                log.debug("api.snapshot_failed error=%s", error)
                await asyncio.sleep(_TRY_AGAIN)
        if listener.turn != turn or listener.is_closed or listener.is_ending:
            return
        if state is None:
            listener.close()  # it has been forgotten
        else:
            self._begin(listener, state)

    # -- the end

    def _end(self, listener: Listener, end: object) -> None:
        """Send a listener the end after all log lines of its task; a listener that has not begun gets it then."""
        if listener.is_held:
            listener.end = end
        elif not listener.is_ending:
            listener.is_ending = True
            self._do(self._finish(listener, event("end", end, END)))

    async def _finish(self, listener: Listener, end: bytes) -> None:
        if listener.subject.kind in _SPEAKING:
            await self._hear(listener)
            if not listener.is_new_to_task:
                await asyncio.sleep(_LAST_WORDS)
                await self._hear(listener)
        listener.give(end)
        listener.close()

    # -- what tasks say

    async def _hear(self, listener: Listener) -> None:
        """Send a listener new log lines of its task, or of the tasks of its run."""
        if listener.will_hear and not listener.is_ending:
            return
        listener.will_hear = True
        async with listener.hearing:
            listener.will_hear = False
            while True:
                try:
                    heard = await self._journals.get((listener.subject, listener.log))
                except (*UNAVAILABLE, OrchestratorError):
                    return  # what it said is still there when Redis and Postgres are back
                turn = listener.turn
                for said in heard.lines:
                    at = str(self._cursor._replace(log=said.entry))
                    await listener.give_line(event("log", line(listener.subject.kind, said), at))
                    if listener.turn != turn or listener.is_lagging or listener.is_closed:
                        return  # it begins again where it stands, or has gone
                    listener.log = said.entry
                if len(heard.lines) < PAGE:
                    break
            if heard.mark is not None and heard.mark != listener.mark:
                listener.mark = heard.mark
                listener.give(event("progress", progress(heard.mark), self._id(listener)))

    def _id(self, listener: Listener) -> str:
        return str(self._cursor._replace(log=listener.log))

    # -- what moves

    def _heard(self, heard: HeardOfAll, cursor: Cursor) -> bool:
        """Send changes to all listeners, up to a cursor; say whether there are any."""
        for entry in heard.entries:
            if entry.changes.is_first:
                self._cursor = Cursor(entry.changes.generation, entry.id)
                self._folds.clear()
                for listener in self._all():
                    self.refresh(listener)
            else:
                self._tell(entry)
        self._cursor = cursor
        if heard.has_gap:
            self._folds.clear()
            for listener in self._all():
                self.refresh(listener)
        for subject in self._spoken(heard):
            for listener in self._listeners.get(subject, ()):
                self._do(self._hear(listener))
        return bool(self._listeners or self._joining) and not self._is_closed

    def _spoken(self, heard: HeardOfAll) -> Iterable[Subject]:
        if heard.all_spoken:
            return [subject for subject in self._listeners if subject.kind in _SPEAKING]
        return [Subject(kind, id) for id in heard.spoken for kind in _SPEAKING]

    def _tell(self, entry: Entry) -> None:
        changes = entry.changes
        self._cursor = Cursor(changes.generation, entry.id)
        moves: dict[Subject, list[TaskChange]] = {}
        for task in changes.tasks:
            if (found := self._listeners.get(Subject(Kind.TASK, task.id))) is not None:
                self._publish_task(found, task)
            for about in (Subject(Kind.QUEUE, task.queue), Subject(Kind.RUN, task.run or b"")):
                if about in self._listeners:
                    moves.setdefault(about, []).append(task)
        for about, tasks in moves.items():
            self._fold(about).add_tasks(tasks)
        for run in changes.runs:
            for kind in (Kind.RUN, Kind.RUN_LOG, Kind.TASK):  # a run of code has a task of its id
                if (about := Subject(kind, run.id)) in self._listeners:
                    self._do(self._look_at(about))
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
        told = move(task)
        for listener in listeners:
            if age(task) <= listener.age or listener.is_ending:
                continue
            listener.age = age(task)
            if task.status in ENDED_TASK_STATES:
                self._end(listener, told)
            else:
                listener.give(event("task", told, self._id(listener)))

    async def _look_at(self, subject: Subject) -> None:
        """Send listeners of a run its state, as often as it can be read."""
        if subject in self._looked_at:
            self._looked_at[subject] = True
            return
        self._looked_at[subject] = True
        try:
            while self._looked_at[subject]:
                self._looked_at[subject] = False
                state = await self._states.get(subject)
                if state is not None:
                    self._show(subject, state)
                await asyncio.sleep(_LOOKED_AT)
        except OrchestratorError:
            for listener in self._listeners.get(subject, ()):
                self.refresh(listener)
        finally:
            del self._looked_at[subject]

    def _show(self, subject: Subject, state: State) -> None:
        if has_ended(state):
            self._flush(subject)
            for listener in self._listeners.get(subject, ()):
                self._end(listener, final(state))
            return
        if subject.kind is Kind.RUN_LOG:
            return
        said = event(str(subject.kind), final(state), str(self._cursor))
        for listener in self._listeners.get(subject, ()):
            if not listener.is_ending:
                listener.give(said)

    def _fold(self, subject: Subject) -> Fold:
        fold = self._folds.get(subject)
        if fold is None:
            fold = self._folds[subject] = Fold(subject.kind)
            asyncio.get_running_loop().call_later(_FOLDED[subject.kind], self._flush, subject)
        return fold

    def _flush(self, subject: Subject) -> None:
        """Send what has been gathered."""
        fold = self._folds.pop(subject, None)
        if fold is not None:
            said = fold.events(str(self._cursor))
            for listener in self._listeners.get(subject, ()):
                listener.give(said)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _name(subject: Subject) -> str:
    return str(UUID(bytes=subject.key)) if isinstance(subject.key, bytes) else subject.key
