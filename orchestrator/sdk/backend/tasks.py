"""Calls about tasks: enqueue, query, wait, cancel and retry."""

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
from orchestrator.domain.states import ENDED_TASK_STATES, TaskState
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import Duplicate, InvalidTask, NotFound, PayloadError, WrongState
from orchestrator.payloads.objects import Reading
from orchestrator.references import is_reference, whole_reference
from orchestrator.sdk.backend.connections import asynchronous, callers_connection, refuse_replacing
from orchestrator.sdk.backend.logs import progress_of, read_task
from orchestrator.sdk.backend.part import Part, Shared, ask, check_state, obstacles, overdue
from orchestrator.sdk.backend.retry_obstacles import retry_obstacle
from orchestrator.sdk.backend.shared_commits import SharedCommits
from orchestrator.sdk.calls.tasks import PayloadPart, TaskWork
from orchestrator.sdk.calls.waits import MISSING
from orchestrator.sdk.tasks.logs import LogPage, TaskProgress
from orchestrator.sdk.values.sealing import seal_task, task_with_stored_arguments
from orchestrator.sdk.waiting.steps import Steps, Stream
from orchestrator.sealing import reveal
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind
from orchestrator.store.namespaces import borrowed
from orchestrator.store.other_drivers import DriverConnection
from orchestrator.store.runs import cancels as run_retries
from orchestrator.store.tasks import cancels, enqueue, redrive, results, revival, shared, unique
from orchestrator.store.tasks.redrive import FailedFilter, Group
from orchestrator.store.tasks.results import TaskOutcome
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

_RETRIED = (TaskState.FAILED, TaskState.SKIPPED)


class _SentBefore(Exception):
    """A task with this id was created before and has ended."""


class TaskBackend(Part, TaskWork):
    """Calls about tasks."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._shared = SharedCommits(self._connections)
        self._shared_foreign = SharedCommits(self._connections, self._insert_foreign)

    def close(self) -> None:
        """Finish the running commits."""
        self._shared.close()
        self._shared_foreign.close()

    @property
    def retries(self) -> int:
        return self._connections.retries

    # -- enqueueing

    def enqueue(self, task: NewTask, within: str = "", *, repeated: bool = False) -> bytes:
        """Create one task. Return its id, or the id of the task that holds its unique key.

        `within` is the prefix of the queues that the caller may use: if a task of another queue holds the key, that
        task stays unchanged and its id is not returned. With `repeated`, because the first answer was lost, the task
        may exist already.
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
        """Return a task as it is stored: with sealed arguments, or with large arguments in the payload store."""
        if self._payloads is not None:
            task = task_with_stored_arguments(task, self._payloads)
        return task if self._vault is None else seal_task(task, self._vault)

    async def aenqueue(self, task: NewTask, within: str = "") -> bytes:
        """Do the same as `enqueue` on an event loop, where concurrent calls share a commit."""
        task = await self._aoutgoing(task)
        return await self._shared.enqueue(task, partial(self.enqueue, task, within))

    async def aenqueue_foreign(self, task: NewTask, within: str = "") -> bytes:
        """Do the same as `aenqueue`, but only once for each id. The caller has made the id, and may send it again."""
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
                    raise _SentBefore  # for an open task, the insert has already failed
        return {task.id for task in tasks if task.unique is not None}

    def enqueue_in(self, given: object, task: NewTask) -> bytes:
        """Create one task in the caller's transaction. The commit wakes the leader."""
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
        """Create many tasks in one transaction. Return their ids, or the ids of the tasks that hold their unique keys.

        With `repeated`, an earlier try may have created them.
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
            return [task.id for task in tasks]  # the first try has succeeded meanwhile

    def enqueue_missing(self, tasks: Sequence[NewTask]) -> list[bytes]:
        """Create those tasks that do not exist yet, open or ended, in one transaction. Return the ids of all tasks.

        The caller has made the ids, and may have sent some of the tasks before.
        """
        while True:
            with self._reading() as connection:
                existing = results.named(connection, [task.id for task in tasks])
            new = [self._outgoing(task) for task in tasks if task.id not in existing]
            try:
                holders = self._create(new, "", True) if new else []
            except (IntegrityError, _SentBefore):
                continue  # another caller has created some of the tasks meanwhile
            created = dict(zip((task.id for task in new), holders, strict=True))
            return [created.get(task.id, task.id) for task in tasks]

    def enqueue_once(self, tasks: Sequence[NewTask], beyond: str, within: str = "") -> list[bytes]:
        """Create many tasks under one idempotency key, in one transaction. A second call returns the ids of the first.

        Some tasks may have unique keys of their own. `beyond` is the key of one more task: a batch of another size
        under the same idempotency key is refused.
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
        """Return whether tasks with these ids exist already. Refuse ids of tasks with another name or queue."""
        with self._reading() as connection:
            existing = results.named(connection, [task.id for task in tasks])
        for task in tasks:
            if existing.get(task.id, (task.name, task.queue)) != (task.name, task.queue):
                raise InvalidTask(f"The id {to_text(task.id)} belongs to another task: make a new id for each task.")
        return bool(existing)

    def _create(self, tasks: Iterable[NewTask], within: str, repeated: bool) -> list[bytes]:
        with self._connections.changing("the tasks were stored, all of them or none") as connection:
            created = _insert_all(connection, tasks, within)
            if repeated and results.has_ended(connection, [*created]):
                raise _SentBefore  # it has ended; for an open task, the insert has already failed
        return [*created.values()]

    # -- requests

    def cancel(self, task: bytes) -> None:
        state = self.status(task)
        if state == TaskState.CANCELLED:
            return
        ask(self._connections, RequestKind.CANCEL_TASK, task, state, allowed=state not in ENDED_TASK_STATES)

    def withdraw(self, tasks: Sequence[bytes]) -> None:
        """Ask the leader to cancel those tasks that were not dispatched yet. The others continue."""
        with self._connections.changing("the request to withdraw tasks was stored") as connection:
            cancels.request_withdrawal(connection, tasks)
            self._connections.record(connection, "withdraw", "tasks", "", count=len(tasks))

    def are_withdrawn(self) -> bool:
        """Return whether the leader has applied all requests to withdraw tasks."""
        with self._reading() as connection:
            return not inbox.is_pending(connection, RequestKind.WITHDRAW_TASK)

    def retry(self, task: bytes, attempt: int | None = None) -> None:
        """Ask the leader to retry a task. With `attempt`, retry only if this was the last attempt that failed."""
        state = self.status(task)
        if state == TaskState.PENDING and self.is_retry_requested(task):
            return
        with self._reading() as connection:
            run = run_retries.ended_in(connection, task)
        if run is not None and (run.is_code or state in _RETRIED) and (reason := retry_obstacle(to_text(task), run)):
            raise WrongState(f"Cannot retry task {to_text(task)}{reason}")
        is_cancelled = run is None and state == TaskState.CANCELLED
        check_state(RequestKind.RETRY_TASK, task, state, allowed=is_cancelled or state in _RETRIED)
        written = f"the request to {RequestKind.RETRY_TASK} {to_text(task)} was stored"
        with self._connections.writing(written, transaction=True) as connection:
            taken = revival.request_retry(connection, task, attempt)
            if taken is None:
                self._connections.record(connection, "retry", "task", to_text(task))
        if taken is not None:
            key, holder = taken
            raise Duplicate(
                f"Cannot retry task {to_text(task)}: task {holder} has its key {key!r} now. Wait until that "
                "task has ended, or cancel it.",
                holder,
            )
        self._connections.retries += 1
        self._connections.nudge()

    def is_retry_requested(self, task: bytes) -> bool:
        """Return whether a task has ended and the leader will retry it. Its state is already `pending` for callers."""
        with self._reading() as connection:
            return results.has_ended(connection, [task]) and self.status(task) == TaskState.PENDING

    def retry_failed(self, wanted: FailedFilter, within: str = "") -> int:
        """Ask the leader to retry the failed tasks that match. Return how many match now.

        For a caller that is limited to queues with the prefix `within`, send a request for each queue by name.
        """
        with self._connections.changing("the request to retry failed tasks was stored") as connection:
            groups = redrive.preview(connection, wanted, within)
            for queue in sorted({group.queue for group in groups}) if within else [wanted.queue] if groups else []:
                redrive.request_retries(connection, msgspec.structs.replace(wanted, queue=queue))
                self._connections.record(connection, "retry", "failed tasks", queue or "", **_criteria(wanted))
            self._connections.retries += 1
        return sum(group.tasks for group in groups)

    def preview_retry(self, wanted: FailedFilter, within: str = "") -> list[Group]:
        with self._reading() as connection:
            return redrive.preview(connection, wanted, within)

    # -- reading

    def status(self, task: bytes) -> str:
        return self._outcome(task).status

    def _outcome(self, task: bytes) -> TaskOutcome:
        outcome = self._connections.outcomes([task]).get(task)
        if outcome is None:
            raise NotFound.by_id("task", to_text(task))
        return outcome

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
            raise PayloadError(
                f"Task {to_text(task)}: expected a reference to a payload of this task, found something else."
            )
        if self._payloads is None:
            raise PayloadError(
                f"A payload of task {to_text(task)} is stored outside, and this process has no payload store. See the "
                f"setting payload_store."
            )
        with closing(Reading(self._payloads.store, stored)) as reading:
            if stored.item is not None:
                return PayloadPart(reading.encoded(), 1)
            if number >= max(1, reading.chunks):
                raise PayloadError(
                    f"A payload of task {to_text(task)} has {reading.chunks} parts, and no part {number}."
                )
            return PayloadPart(reading.chunk(number) if reading.chunks else b"", reading.chunks)

    # -- waiting

    def wait(self, task: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        return self._waiting.wait(task, lambda: self._find_end(task), limit)

    def wait_each(self, tasks: Sequence[bytes], limit: TimeLimit) -> Stream[Ended]:
        return self._waiting.each(tasks, self.find_ends, limit)

    def _find_end(self, task: bytes) -> Ended | None:
        return next(iter(self.find_ends([task])), None)

    def find_ends(self, tasks: Sequence[bytes]) -> list[Ended]:
        """Return the ends of tasks that have ended or do not exist."""
        outcomes = self._connections.outcomes(tasks)
        ends: list[Ended] = []
        for task in tasks:
            outcome = outcomes.get(task)
            if outcome is None:
                ends.append(Ended(task, MISSING))
            elif outcome.status in ENDED_TASK_STATES:
                error = outcome.error and reveal_error(outcome.error)
                ends.append(Ended(task, outcome.status, reveal(outcome.result), error))
        return ends


def _criteria(wanted: FailedFilter) -> dict[str, str]:
    criteria = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    criteria["type"] = criteria.pop("kind")  # an entry of the audit log has another field `kind`
    return {name: str(value) for name, value in criteria.items() if value is not None}


def _insert_all(connection: Connection, tasks: Iterable[NewTask], within: str) -> dict[bytes, bytes]:
    """Insert tasks. Return for each id, in order, the id of the task that holds its key, or the same id."""
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
    """Insert one task in a transaction that may take long."""
    if task.unique is None:
        enqueue.insert_task(connection, task)
        return task.id
    unique.wait_for_key(connection, task.unique)
    return unique.insert_unique(connection, task, task.unique, within)
