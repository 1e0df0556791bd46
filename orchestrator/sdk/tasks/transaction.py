"""The transaction with which a task completes. Loads the store, so a worker pays for it only where a task uses it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.starts import is_start
from orchestrator.domain.tasks.task import NewTask, UniqueKey
from orchestrator.errors import AttemptOver, Unavailable, WrongState
from orchestrator.sdk.waiting.per_process import PerProcess
from orchestrator.settings import Settings
from orchestrator.store import database
from orchestrator.store.namespaces import borrowed
from orchestrator.store.tasks import completions, enqueue, unique

_KEY_TIMEOUT = 10.0
"""Seconds to wait for a unique key that another transaction may be taking."""
_POOL = 5
"""Connections that the tasks of one worker process share; one that needs another waits for it."""
_ENDS = re.compile(
    r"\s*(?:(?:--[^\n]*\n|/\*.*?\*/)\s*)*(COMMIT|END|ABORT|PREPARE\s+TRANSACTION|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))\b",
    re.IGNORECASE | re.DOTALL,
)
"""A statement that ends its transaction."""
_INSTEAD = "For a part that may be undone by itself, use connection.begin_nested()."


class Transactions:
    """The database connections of the tasks in one worker process."""

    def __init__(self, settings: Settings) -> None:
        self._engine = PerProcess(lambda: _engine(settings))
        self._namespace = settings.namespace

    def close(self) -> None:
        engine = self._engine.take()
        if engine is not None:
            engine.dispose()

    @contextmanager
    def begin(self, task: bytes, attempt: int) -> Iterator[TaskTransaction]:
        """Open a transaction for an attempt, which must still count; what is not committed is rolled back."""
        with self._engine().connect() as connection:
            with borrowed(connection, self._namespace):
                began = completions.begin(connection, task, attempt)
                if began is None:
                    raise _attempt_over(task, attempt)
            transaction = TaskTransaction(connection, self._namespace, task, attempt, began)
            event.listen(connection, "rollback", transaction.note_rollback)
            try:
                yield transaction
            except BaseException:
                connection.invalidate()  # whatever the block has done to it, Postgres rolls back what it held
                raise


def _engine(settings: Settings) -> Engine:
    url = settings.require_database()
    engine = database.engine_for(url, pool_size=_POOL, max_overflow=0, name="orchestrator task")
    event.listen(engine, "commit", _refuse_commit)
    event.listen(engine, "before_cursor_execute", _refuse_end)
    return engine


class TaskTransaction:
    """An open transaction, and the attempt that it completes."""

    def __init__(self, connection: Connection, namespace: str, task: bytes, attempt: int, began: int) -> None:
        self.connection = connection
        self._namespace = namespace
        self._task = task
        self._attempt = attempt
        self._began: int | None = began

    def note_rollback(self, _: Connection) -> None:
        """Go on in another transaction: connection.rollback() takes back what was done so far, and begins one."""
        self._began = None

    def enqueue(self, tasks: Sequence[NewTask]) -> dict[bytes, bytes]:
        """Create tasks, which exist only if the transaction commits; return the ids of those that have their keys."""
        holders: dict[bytes, bytes] = {}
        starts = [task for task in tasks if is_start(task)]
        others = [task for task in tasks if not is_start(task)]
        with borrowed(self.connection, self._namespace):
            if starts:
                unique.defer(self.connection, starts)
            for task in sorted(others, key=lambda task: task.unique.key if task.unique else ""):
                if task.unique is None:
                    enqueue.insert_task(self.connection, task)
                else:
                    self._await_key(task.unique)
                    holders[task.id] = unique.insert_unique(self.connection, task, task.unique)
        if tasks:
            enqueue.notify_on_commit(self.connection, self._namespace)
        return holders

    def promise(self, tasks: Sequence[NewTask]) -> None:
        """Create tasks that follow the success. A task that needs a taken key waits for it in the inbox."""
        with_keys = [task for task in tasks if task.unique is not None]
        with borrowed(self.connection, self._namespace):
            if with_keys:
                unique.defer(self.connection, with_keys)
            for task in tasks:
                if task.unique is None:
                    enqueue.insert_task(self.connection, task)
        if tasks:
            enqueue.notify_on_commit(self.connection, self._namespace)

    def _await_key(self, key: UniqueKey) -> None:
        """Keep others from taking a key until this transaction has ended; not for ever, or two could wait in a ring."""
        give_up_at = time.monotonic() + _KEY_TIMEOUT
        while not unique.try_key(self.connection, key):
            if time.monotonic() > give_up_at:
                raise Unavailable(
                    f"Another transaction may be taking the key {key.key!r} and has not ended within "
                    f"{_KEY_TIMEOUT:g} s, so nobody knows yet which task has it."
                )
            time.sleep(0.02)

    def commit(self, result: bytes, duration: float) -> None:
        """Commit, and complete the task with it, if its attempt still counts."""
        with borrowed(self.connection, self._namespace):
            try:
                done = completions.commit(self.connection, self._task, self._attempt, result, duration, self._began)
            except completions.TransactionEnded:
                raise WrongState(
                    "A statement inside the block of ctx.transaction() has ended its transaction (COMMIT or ROLLBACK, "
                    "in SQL). What was committed so is kept, and written again whenever the task runs again; what came "
                    f"after it was rolled back. Leave it out: the block commits by itself, with the task. {_INSTEAD}"
                ) from None
            if not done:
                raise _attempt_over(self._task, self._attempt)


def _attempt_over(task: bytes, attempt: int) -> AttemptOver:
    return AttemptOver(
        f"Attempt {attempt} of task {to_text(task)} no longer counts: it was cancelled, or taken for lost and given to "
        f"another worker. Nothing of its transaction was kept."
    )


def _refuse_commit(_: Connection) -> None:
    raise WrongState(
        f"The connection of ctx.transaction() commits at the end of its block, together with the task. {_INSTEAD}"
    )


def _refuse_end(_: Connection, _cursor: object, statement: str, *_rest: Any) -> None:
    if found := _ENDS.match(statement):
        raise WrongState(
            f"{' '.join(found[1].split()).upper()} inside the block of ctx.transaction() would end the transaction "
            f"that completes the task. It was not run: the block commits by itself, and is rolled back if it raises. "
            f"{_INSTEAD}"
        )
