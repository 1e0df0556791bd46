"""The transaction that completes a task. This module imports the store, so workers load it only for such tasks."""

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
from orchestrator.sdk.values.payload import encode_value
from orchestrator.sdk.waiting.per_process import PerProcess
from orchestrator.settings import Settings
from orchestrator.store import database
from orchestrator.store.namespaces import borrowed
from orchestrator.store.tasks import completions, enqueue, unique

_KEY_TIMEOUT = 10.0
"""Seconds to wait for a unique key that another transaction may be taking."""
_POOL_SIZE = 5
"""The size of the connection pool that the tasks of one worker process share."""
_END_STATEMENT = re.compile(
    r"\s*(?:(?:--[^\n]*\n|/\*.*?\*/)\s*)*(COMMIT|END|ABORT|PREPARE\s+TRANSACTION|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))\b",
    re.IGNORECASE | re.DOTALL,
)
_SAVEPOINT = re.compile(
    r"\s*(SAVEPOINT|RELEASE(?:\s+SAVEPOINT)?|ROLLBACK(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT)?)\s+([^\s;]+)",
    re.IGNORECASE,
)
_NO_RESULT = encode_value(None, "nothing", 1)
_HINT = "To roll back only a part, use connection.begin_nested()."


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
        """Open a transaction for an attempt, which must be the current one. Roll back unless it is committed."""
        with self._engine().connect() as connection:
            with borrowed(connection, self._namespace):
                began = completions.begin(connection, task, attempt)
                if began is None:
                    raise _attempt_over(task, attempt)
            transaction = TaskTransaction(connection, self._namespace, task, attempt, began)
            event.listen(connection, "rollback", transaction.note_rollback)
            event.listen(connection, "before_cursor_execute", transaction.note_savepoint)
            try:
                yield transaction
            except BaseException:
                connection.invalidate()  # whatever state the block left, Postgres rolls back
                raise


def _engine(settings: Settings) -> Engine:
    url = settings.require_database()
    engine = database.engine_for(url, pool_size=_POOL_SIZE, max_overflow=0, name="orchestrator task")
    event.listen(engine, "commit", _refuse_commit)
    event.listen(engine, "before_cursor_execute", _refuse_end)
    return engine


class TaskTransaction:
    """An open transaction that completes an attempt."""

    def __init__(self, connection: Connection, namespace: str, task: bytes, attempt: int, began: int) -> None:
        self.connection = connection
        self._namespace = namespace
        self._task = task
        self._attempt = attempt
        self._began: int | None = began
        self.result = _NO_RESULT
        """The result that the commit records. Like the task's writes, a rollback undoes it."""
        self._savepoints: list[tuple[str, bytes]] = []
        """The savepoints by name, with the result at each, the oldest first."""

    def note_rollback(self, _: Connection) -> None:
        """Note that the task called `connection.rollback()`, which undoes all writes and begins a new transaction."""
        self._began = None
        self.result = _NO_RESULT
        self._savepoints.clear()

    def note_savepoint(self, _: Connection, _cursor: object, statement: str, *_rest: Any) -> None:
        """Note a statement about a savepoint, by `connection.begin_nested()` or in SQL."""
        if (found := _SAVEPOINT.match(statement)) is None:
            return
        kind, name = found[1].upper(), found[2].lower()
        if kind == "SAVEPOINT":
            self._savepoints.append((name, self.result))
            return
        while self._savepoints:  # a rollback or a release ends the later savepoints, too
            last, result = self._savepoints.pop()
            if last == name:
                if kind.startswith("ROLLBACK"):
                    self.result = result
                    self._savepoints.append((last, result))
                return

    def enqueue(self, tasks: Sequence[NewTask]) -> dict[bytes, bytes]:
        """Insert tasks in the transaction. Return the ids of the tasks that hold the unique keys."""
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

    def insert_callbacks(self, tasks: Sequence[NewTask]) -> None:
        """Insert the tasks that the success enqueues. Tasks with unique keys go to the inbox, to wait for the keys."""
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
        """Lock a unique key until the end of this transaction. Time out, because two transactions could deadlock."""
        give_up_at = time.monotonic() + _KEY_TIMEOUT
        while not unique.try_key(self.connection, key):
            if time.monotonic() > give_up_at:
                raise Unavailable(
                    f"Another transaction is taking the key {key.key!r} and has not ended within "
                    f"{_KEY_TIMEOUT:g} s, so it is not known yet which task has it."
                )
            time.sleep(0.02)

    def commit(self, result: bytes, duration: float) -> None:
        """Complete the task and commit, if the attempt is still the current one."""
        with borrowed(self.connection, self._namespace):
            try:
                done = completions.commit(self.connection, self._task, self._attempt, result, duration, self._began)
            except completions.TransactionEnded:
                raise WrongState(
                    "A statement inside the block of ctx.transaction() has ended its transaction (COMMIT or "
                    "ROLLBACK, in SQL). Work that it committed is kept, and is written again whenever the task "
                    "runs again; later work was rolled back. Remove the statement: the block commits by itself, "
                    f"with the task. {_HINT}"
                ) from None
            if not done:
                raise _attempt_over(self._task, self._attempt)


def _attempt_over(task: bytes, attempt: int) -> AttemptOver:
    return AttemptOver(
        f"Attempt {attempt} of task {to_text(task)} no longer counts: it was cancelled, or considered lost and "
        "given to another worker. Its transaction was rolled back."
    )


def _refuse_commit(_: Connection) -> None:
    raise WrongState(
        f"The connection of ctx.transaction() commits at the end of its block, together with the task. {_HINT}"
    )


def _refuse_end(_: Connection, _cursor: object, statement: str, *_rest: Any) -> None:
    if found := _END_STATEMENT.match(statement):
        raise WrongState(
            f"{' '.join(found[1].split()).upper()} inside the block of ctx.transaction() would end the transaction "
            f"that completes the task. It was not run: the block commits by itself, and is rolled back if it raises. "
            f"{_HINT}"
        )
