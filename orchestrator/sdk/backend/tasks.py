"""Tasks: enqueued, asked about, waited for, cancelled and tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, MissingGreenlet

from orchestrator.domain.ids import to_text
from orchestrator.domain.sealed import reveal_error
from orchestrator.domain.states import ENDED_TASK_STATES, RunState, TaskState
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import Duplicate, InvalidTask, NotFound, PayloadError, WrongState
from orchestrator.payloads.objects import Reading
from orchestrator.references import is_reference, whole_reference
from orchestrator.sdk.backend.connections import asynchronous, callers_connection, refuse_replacing
from orchestrator.sdk.backend.logs import progress_of, read_task
from orchestrator.sdk.backend.part import Part, Shared, ask, check_state, obstacles, overdue
from orchestrator.sdk.backend.shared_commits import SharedCommits
from orchestrator.sdk.calls.tasks import PayloadPart, TaskWork
from orchestrator.sdk.calls.waits import MISSING
from orchestrator.sdk.tasks.logs import LogPage, TaskProgress
from orchestrator.sdk.values.sealing import left_task, seal_task
from orchestrator.sdk.waiting.steps import Steps, Stream
from orchestrator.sealing import reveal
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind
from orchestrator.store.namespaces import borrowed
from orchestrator.store.other_drivers import DriverConnection
from orchestrator.store.runs import cancels as run_retries
from orchestrator.store.runs.cancels import EndedIn
from orchestrator.store.tasks import cancels, enqueue, redrive, results, revival, shared, unique
from orchestrator.store.tasks.redrive import FailedFilter, Group
from orchestrator.store.tasks.results import TaskOutcome
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

_RETRIED = (TaskState.FAILED, TaskState.SKIPPED)


class _SentBefore(Exception):
    """A task with this id has been created before, and has ended."""


class TaskBackend(Part, TaskWork):
    """Calls about tasks."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._shared = SharedCommits(self._connections)
        self._shared_foreign = SharedCommits(self._connections, self._insert_foreign)

    def close(self) -> None:
        """Let what is being stored be stored."""
        self._shared.close()
        self._shared_foreign.close()

    @property
    def retries(self) -> int:
        return self._connections.retries

    # -- enqueueing

    def enqueue(self, task: NewTask, within: str = "", *, repeated: bool = False) -> bytes:
        """Create one task; return its id, or that of the task which has its key.

        `within` is the prefix of the caller's queues: a task of another queue that has the key is not touched, and its
        id not returned. If this is `repeated`, because the first answer was lost, the task may exist already.
        """
        if repeated:
            return self.enqueue_many([task], within, repeated=True)[0]
        task = self._outgoing(task)
        created = task.id
        if task.unique is None:
            self._connections.insert(task)
        else:
            with self._connections.writing(f"task {to_text(task.id)} was stored") as connection:
                created = unique.insert_unique(connection, task, task.unique, within)
        self._connections.nudge(is_task=task.is_ready)
        return created

    def _outgoing(self, task: NewTask) -> NewTask:
        """Return a task as it is stored: what is large elsewhere, and what is here sealed."""
        if self._payloads is not None:
            task = left_task(task, self._payloads)
        return task if self._vault is None else seal_task(task, self._vault)

    async def aenqueue(self, task: NewTask, within: str = "") -> bytes:
        """Do the same on an event loop, where concurrent calls share a commit."""
        task = await self._aoutgoing(task)
        return await self._shared.enqueue(task, partial(self.enqueue, task, within))

    async def aenqueue_foreign(self, task: NewTask, within: str = "") -> bytes:
        """Do the same for a task whose id the caller has made and may have sent before: it is created once."""
        outgoing = await self._aoutgoing(task)
        try:
            return await self._shared_foreign.enqueue(outgoing, partial(self.enqueue, outgoing, within, repeated=True))
        except (IntegrityError, _SentBefore):
            if not await asyncio.to_thread(self._were_sent, [task]):
                raise
            return task.id

    async def _aoutgoing(self, task: NewTask) -> NewTask:
        if self._payloads is not None and len(task.payload) > self._payloads.inline:
            return await asyncio.to_thread(self._outgoing, task)
        return task if self._vault is None else seal_task(task, self._vault)

    def _insert_foreign(self, tasks: Sequence[NewTask]) -> set[bytes]:
        plain = [task for task in tasks if task.unique is None]
        if plain:
            with self._connections.writing("the tasks were stored", transaction=True) as connection:
                shared.insert_plain(connection, plain)
                if results.has_ended(connection, [task.id for task in plain]):
                    raise _SentBefore  # an open one has refused these already, by its id
        return {task.id for task in tasks if task.unique is not None}

    def enqueue_in(self, given: object, task: NewTask) -> bytes:
        """Create one task in the caller's transaction, whose commit wakes the scheduler."""
        namespace = self._connections.namespace
        connection = callers_connection(given, namespace)
        refuse_replacing(task)
        try:
            with nullcontext() if isinstance(connection, DriverConnection) else borrowed(connection, namespace):
                created = _insert_in(connection, task)
        except MissingGreenlet:
            raise asynchronous(given) from None
        enqueue.notify_on_commit(connection, namespace)
        return created

    def enqueue_many(self, tasks: Iterable[NewTask], within: str = "", *, repeated: bool = False) -> list[bytes]:
        """Create many tasks, all or none; return their ids, or those of the tasks which have their keys.

        If this is `repeated`, all of them or none may have been created before.
        """
        if self._payloads is not None or self._vault is not None:
            tasks = [self._outgoing(task) for task in tasks]
        if not repeated:
            return self._create(tasks, within, repeated)
        tasks = [*tasks]
        try:
            return [task.id for task in tasks] if self._were_sent(tasks) else self._create(tasks, within, repeated)
        except (IntegrityError, _SentBefore):
            if not self._were_sent(tasks):
                raise
            return [task.id for task in tasks]  # the first time has come to its end meanwhile

    def enqueue_missing(self, tasks: Sequence[NewTask]) -> list[bytes]:
        """Create those of many tasks that are not there yet, open or ended, all or none; return the ids of all.

        The caller has made their ids, and may have sent some of them before.
        """
        while True:
            with self._reading() as connection:
                there = results.named(connection, [task.id for task in tasks])
            new = [self._outgoing(task) for task in tasks if task.id not in there]
            try:
                holders = self._create(new, "", True) if new else []
            except (IntegrityError, _SentBefore):
                continue  # another one has created some of them meanwhile
            created = dict(zip((task.id for task in new), holders, strict=True))
            return [created.get(task.id, task.id) for task in tasks]

    def enqueue_once(self, tasks: Sequence[NewTask], beyond: str, within: str = "") -> list[bytes]:
        """Create many tasks under one key, all or none; return their ids, or those of the first time.

        Some may have keys of their own. `beyond` is the key that one more would have: others under it are refused.
        """
        if self._payloads is not None or self._vault is not None:
            tasks = [self._outgoing(task) for task in tasks]
        prefix = beyond.rpartition("/")[0] + "/"
        sharing = [task for task in tasks if task.unique is not None and task.unique.key.startswith(prefix)]
        with self._connections.changing("the tasks were stored, all of them or none") as connection:
            created = _insert_all(connection, tasks, within)
            unique.check_batch(connection, sharing, created, beyond)
        return [*created.values()]

    def _were_sent(self, tasks: Sequence[NewTask]) -> bool:
        """Say whether tasks with these ids are there already; refuse ids that others have."""
        with self._reading() as connection:
            there = results.named(connection, [task.id for task in tasks])
        for task in tasks:
            if there.get(task.id, (task.name, task.queue)) != (task.name, task.queue):
                raise InvalidTask(f"The id {to_text(task.id)} is that of another task: make a new one for each task.")
        return bool(there)

    def _create(self, tasks: Iterable[NewTask], within: str, repeated: bool) -> list[bytes]:
        with self._connections.changing("the tasks were stored, all of them or none") as connection:
            created = _insert_all(connection, tasks, within)
            if repeated and results.has_ended(connection, [*created]):
                raise _SentBefore  # and ended since then; an open one has refused these already, by its id
        return [*created.values()]

    # -- asking

    def cancel(self, task: bytes) -> None:
        state = self.status(task)
        if state == TaskState.CANCELLED:
            return
        ask(self._connections, RequestKind.CANCEL_TASK, task, state, allowed=state not in ENDED_TASK_STATES)

    def withdraw(self, tasks: Sequence[bytes]) -> None:
        """Ask the leader to cancel those of these tasks that no worker was given yet; the others go on."""
        with self._connections.changing("the request to withdraw tasks was stored") as connection:
            cancels.ask_withdrawal(connection, tasks)
            self._connections.record(connection, "withdraw", "tasks", "", count=len(tasks))

    def are_withdrawn(self) -> bool:
        """Say whether the leader has applied every such request."""
        with self._reading() as connection:
            return not inbox.is_asked(connection, RequestKind.WITHDRAW_TASK)

    def retry(self, task: bytes, attempt: int | None = None) -> None:
        """Ask the leader to open a task again; if given, only after this attempt: another one may have failed since."""
        state = self.status(task)
        if state == TaskState.PENDING and self.is_retry_requested(task):
            return
        with self._reading() as connection:
            run = run_retries.ended_in(connection, task)
        if run is not None and (run.is_code or state in _RETRIED) and (reason := _bound(to_text(task), run)):
            raise WrongState(f"Cannot retry task {to_text(task)}{reason}")
        is_cancelled = run is None and state == TaskState.CANCELLED
        check_state(RequestKind.RETRY_TASK, task, state, allowed=is_cancelled or state in _RETRIED)
        what = f"the request to {RequestKind.RETRY_TASK} {to_text(task)} was stored"
        with self._connections.writing(what, transaction=True) as connection:
            held = revival.ask(connection, task, attempt)
            if held is None:
                self._connections.record(connection, "retry", "task", to_text(task))
        if held is not None:
            key, holder = held
            raise Duplicate(
                f"Cannot retry task {to_text(task)}: task {holder} has its key {key!r} now. Wait until that one has "
                f"ended, or cancel it.",
                holder,
            )
        self._connections.retries += 1
        self._connections.nudge()

    def is_retry_requested(self, task: bytes) -> bool:
        """Say whether a task has ended and is to be opened again by the leader: it is pending for its callers."""
        with self._reading() as connection:
            return results.has_ended(connection, [task]) and self.status(task) == TaskState.PENDING

    def retry_failed(self, wanted: FailedFilter, within: str = "") -> int:
        """Ask the leader to open the failed tasks again that match; return how many match now.

        A caller that is limited to queues with the prefix `within` asks for each of these by its name.
        """
        with self._connections.changing("the request to retry failed tasks was stored") as connection:
            groups = redrive.preview(connection, wanted, within)
            for queue in sorted({group.queue for group in groups}) if within else [wanted.queue] if groups else []:
                redrive.ask(connection, msgspec.structs.replace(wanted, queue=queue))
                self._connections.record(connection, "retry", "failed tasks", queue or "", **_said(wanted))
            self._connections.retries += 1
        return sum(group.tasks for group in groups)

    def preview_retry(self, wanted: FailedFilter, within: str = "") -> list[Group]:
        with self._reading() as connection:
            return redrive.preview(connection, wanted, within)

    # -- reading

    def status(self, task: bytes) -> str:
        return self._outcome(task).status

    def _outcome(self, task: bytes) -> TaskOutcome:
        found = self._connections.outcomes([task]).get(task)
        if found is None:
            raise NotFound.by_id("task", to_text(task))
        return found

    def progress(self, task: bytes) -> TaskProgress | None:
        return progress_of(self._connections, task)

    def log(self, task: bytes, after: str = "", wait: float = 0.0, attempt: int | None = None) -> LogPage:
        return read_task(self._connections, task, after, wait, attempt)

    def obstacles(self, target: bytes) -> list[str]:
        return obstacles(self._connections, target)

    def overdue(self, task: bytes) -> str:
        return overdue(self._connections, task)

    def payload_part(self, task: bytes, reference: bytes = b"", number: int = 0) -> PayloadPart:
        if not reference:
            reference = self._outcome(task).result or b""
            if not is_reference(reference):
                return PayloadPart(reveal(reference), 1)
        try:
            stored = whole_reference(reference)
        except ValueError as error:
            raise PayloadError(f"Task {to_text(task)}: {error}.") from None
        if stored is None or stored.task != task:
            raise PayloadError(f"Task {to_text(task)}: expected a reference to a payload of it, found something else.")
        if self._payloads is None:
            raise PayloadError(
                f"A payload of task {to_text(task)} is stored outside, and this process has no payload store. See the "
                f"setting payload_store."
            )
        with closing(Reading(self._payloads.store, stored)) as reading:
            if stored.item is not None:
                return PayloadPart(reading.encoded(), 1)
            if number >= max(1, reading.chunks):
                raise PayloadError(f"A payload of task {to_text(task)} has {reading.chunks} parts, and no {number}.")
            return PayloadPart(reading.chunk(number) if reading.chunks else b"", reading.chunks)

    # -- waiting

    def wait(self, task: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        return self._waiting.wait(task, lambda: self._find_end(task), limit)

    def wait_each(self, tasks: Sequence[bytes], limit: TimeLimit) -> Stream[Ended]:
        return self._waiting.each(tasks, self.find_ends, limit)

    def _find_end(self, task: bytes) -> Ended | None:
        return next(iter(self.find_ends([task])), None)

    def find_ends(self, tasks: Sequence[bytes]) -> list[Ended]:
        """Return those that have ended, or do not exist."""
        found = self._connections.outcomes(tasks)
        ends: list[Ended] = []
        for task in tasks:
            outcome = found.get(task)
            if outcome is None:
                ends.append(Ended(task, MISSING))
            elif outcome.status in ENDED_TASK_STATES:
                error = outcome.error and reveal_error(outcome.error)
                ends.append(Ended(task, outcome.status, reveal(outcome.result), error))
        return ends


def _said(wanted: FailedFilter) -> dict[str, str]:
    """Return what a filter says, for people."""
    given = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    given["type"] = given.pop("kind")  # a line of the audit log has a kind of its own
    return {name: str(value) for name, value in given.items() if value is not None}


def _insert_all(connection: Connection, tasks: Iterable[NewTask], within: str) -> dict[bytes, bytes]:
    """Create tasks; return for each, in order, the task that has its key, or itself."""
    holders: dict[bytes, bytes] = {}
    keyed: list[NewTask] = []

    def plain() -> Iterator[NewTask]:
        for task in tasks:
            holders[task.id] = task.id
            if task.unique is None:
                yield task
            else:
                keyed.append(task)

    enqueue.copy_tasks(connection, plain())
    holders.update(unique.insert_many_unique(connection, keyed, within))
    return holders


def _insert_in(connection: Connection, task: NewTask, within: str = "") -> bytes:
    """Create one task in a transaction that may last."""
    if task.unique is None:
        enqueue.insert_task(connection, task)
        return task.id
    unique.wait_for_key(connection, task.unique)
    return unique.insert_unique(connection, task, task.unique, within)


def _bound(task: str, run: EndedIn) -> str:
    """Say what keeps an ended task from being opened again by itself, and what can be done in the place of it."""
    if run.is_code and task == run.run:
        return (
            f": it stands for a run of a workflow as code, which has ended. To do all of it again: "
            f"orchestrator runs rerun {run.run}; to keep what was done up to an event: "
            f"orchestrator runs reset {run.run} --to EVENT"
        )
    if run.is_code:
        return (
            f": the code of its run has been told how it ended. To do it again, reset the run to an event before: "
            f"orchestrator runs reset {run.run} --to EVENT"
        )
    if run.is_flow:
        return (
            f" by itself: the flow of its run has gone on with how it ended. A run that has failed goes on at the "
            f"node that failed: orchestrator runs retry {run.run}"
        )
    if run.status == RunState.FAILED and run.is_whole:
        return (
            f" by itself: its run has ended, and timed out, has a limit of its workflow or is a step of another run. "
            f"Retry the run: orchestrator runs retry {run.run}"
        )
    again = f"To do all of it again: orchestrator runs rerun {run.run}" if run.has_workflow else "Enqueue it again."
    if run.is_cancelled:
        return f": its run was cancelled. {again}"
    if run.status not in (RunState.RUNNING, RunState.FAILED):
        return f": its run has ended ({run.status}) without it. {again}"
    return ""
