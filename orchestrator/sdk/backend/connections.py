"""The client's connections, opened on first use: Postgres for writes and reads, Redis for nudges to the leader."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast
from uuid import UUID

import msgspec
from redis import Redis
from sqlalchemy import Connection, Engine, exc

from orchestrator import time_limits
from orchestrator.domain.ids import to_text
from orchestrator.domain.redaction import Redaction, split_patterns
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask, OrchestratorError, SchemaError, Unavailable, Uncertain
from orchestrator.sdk import acting
from orchestrator.sdk.checks import for_message
from orchestrator.sdk.values.display import as_json, stored_value
from orchestrator.sdk.values.sealing import store_of
from orchestrator.sdk.waiting.per_process import PerProcess
from orchestrator.settings import Settings
from orchestrator.store import audit, compatibility, database, deadlines, postgres_errors, shards
from orchestrator.store.inbox import RequestKind
from orchestrator.store.other_drivers import other_driver
from orchestrator.store.tasks import enqueue, results, shared
from orchestrator.store.tasks.results import TaskOutcome
from orchestrator.transport.client import Nudges
from orchestrator.transport.connection import connect, connect_shared
from orchestrator.transport.keys import Keys

MAX_AUDITED_LENGTH = 300
"""Characters of a value or a reason in the audit log, at most."""


class Connections:
    """Connection pools that raise the errors of this package, and the nudges to the leader.

    A forked process opens connections of its own. So does a signal handler that has interrupted a call, because the
    interrupted call holds locks until the handler has returned.
    """

    def __init__(self, settings: Settings) -> None:
        self.namespace = settings.namespace
        self.keys = Keys.of(settings)
        self.payloads = store_of(settings)
        """The payload store; None if there is none."""
        self._settings = settings
        self._links = PerProcess(lambda: _Links(settings))
        self._links()  # refuses invalid settings at once
        self._thread = _Thread()
        self.retries = 0
        """How many retries of ended tasks and runs this program has requested. A retry invalidates cached ends."""

    def close(self) -> None:
        links = self._links.take()
        if links is not None:
            links.close()

    @property
    def redis(self) -> Redis:
        return self._links().redis

    @property
    def shared_redis(self) -> Redis:
        """The connections for Redis keys that all shards share."""
        return self._links().shared_redis

    def nudge(self, *, is_task: bool = False) -> None:
        """Wake the leader after a commit. `is_task` says that only claimable tasks are new."""
        self._links().nudges.send(is_task=is_task)

    def reading(self) -> AbstractContextManager[Connection]:
        return self._connected("", transaction=False)

    @contextmanager
    def writing(self, what: str, *, transaction: bool = False) -> Iterator[Connection]:
        """Open a connection for one writing statement, or for a transaction. `what` describes the write in errors."""
        with self._connected(what, transaction=transaction) as connection:
            if not transaction:
                yield connection
                return
            try:
                connection.begin()
                yield connection
            except exc.SQLAlchemyError as error:
                self._raise_known(error, written="")  # nothing was committed
                raise
            with deadlines.limited(connection, "COMMIT"):
                connection.commit()

    @contextmanager
    def changing(self, what: str, *, nudge: bool = True) -> Iterator[Connection]:
        """Open a transaction, and nudge the leader after its commit. `what` describes the write in errors."""
        with self.writing(what, transaction=True) as connection:
            yield connection
        if nudge:
            self.nudge()

    def record(self, connection: Connection, act: str, kind: str, target: str, **detail: Any) -> None:
        """Write an entry into the audit log, in the transaction of the action."""
        who, origin = acting.current(self._settings.audit_as)
        audit.add(connection, who=who, origin=origin, act=act, kind=kind, target=target, detail=detail)

    def ask(self, connection: Connection, request: RequestKind, run: bytes, body: str, **detail: Any) -> bool:
        """Put a request about a run into the inbox and an entry into the audit log, in one statement.

        Return False for a message to a run that has ended.
        """
        who, origin = acting.current(self._settings.audit_as)
        entry = {"who": who, "origin": origin, "act": request.split(" ")[0], "kind": "run", "target": to_text(run)}
        return audit.insert_request(connection, request, run, body, **entry, detail=detail)

    def ask_all(
        self, request: RequestKind, targets: Sequence[bytes], seen: audit.Seen = audit.NOTHING_SEEN
    ) -> set[UUID]:
        """Send one request for several tasks or runs, in one statement. Return those whose state allows it."""
        who, origin = acting.current(self._settings.audit_as)
        act, _, kind = request.partition(" ")
        with self.changing(f"the requests to {request} were stored") as connection:
            entry = {"who": who, "origin": origin, "act": act, "kind": kind, "detail": {}}
            accepted = audit.insert_requests(connection, request, targets, seen, **entry)
        self.retries += act == "retry"
        return accepted

    def audited(self, name: str, data: bytes) -> str:
        """Return a value for the audit log: shortened and redacted, or a placeholder if values are sealed."""
        if self.keys.vault is not None:
            return "(sealed)"
        redacted = Redaction(split_patterns(self._settings.redact)).redacted({name: as_json(stored_value(data))})[name]
        text = msgspec.json.encode(redacted).decode()
        return text if len(text) <= MAX_AUDITED_LENGTH else f"{text[:MAX_AUDITED_LENGTH]}…"

    def insert(self, task: NewTask) -> None:
        """Insert one task without a unique key, with as little overhead as possible."""
        if time_limits.spares_writes():
            with time_limits.endless():
                return self.insert(task)
        thread = self._thread
        if thread.is_busy:
            with self._connected(f"task {to_text(task.id)} was stored", transaction=False) as connection:
                enqueue.insert_task(connection, task)
            return
        thread.is_busy = True
        try:
            enqueue.insert_alone(self._links().engine, task)
        except exc.SQLAlchemyError as error:
            self._raise_known(error, f"task {to_text(task.id)} was stored")
            raise
        finally:
            thread.is_busy = False

    def outcomes(self, tasks: Sequence[bytes]) -> dict[bytes, TaskOutcome]:
        """Return the outcomes of tasks, with as little overhead as possible."""
        _refuse_late()
        thread = self._thread
        if thread.is_busy:
            with self.reading() as connection:
                return results.outcomes(connection, tasks)
        thread.is_busy = True
        try:
            return results.outcomes_alone(self._links().reading, tasks)
        except exc.SQLAlchemyError as error:
            self._raise_known(error, "")
            raise
        finally:
            thread.is_busy = False

    def insert_shared(self, tasks: Sequence[NewTask]) -> set[bytes]:
        """Insert tasks with one commit. Return those whose unique keys are locked. Raise errors of the driver."""
        return shared.insert_shared(self._links().engine, tasks)

    @contextmanager
    def _connected(self, written: str, *, transaction: bool) -> Iterator[Connection]:
        if written and time_limits.spares_writes():
            with time_limits.endless(), self._connected(written, transaction=transaction) as connection:
                yield connection
            return
        _refuse_late()
        try:
            connection = self._open(transaction=transaction, is_reading=not written)
            try:
                yield connection
            finally:
                with self._thread.busy():
                    connection.close()
        except exc.SQLAlchemyError as error:
            self._raise_known(error, written)
            raise

    def _open(self, *, transaction: bool, is_reading: bool) -> Connection:
        links = self._links()
        if self._thread.is_busy:
            settings = links.of_readers if is_reading else self._settings
            return _engine(settings, links.deadlines, autocommit=not transaction, pool_size=0).connect()
        with self._thread.busy():
            return (links.transactions if transaction else links.reading if is_reading else links.engine).connect()

    def _raise_known(self, error: exc.SQLAlchemyError, written: str) -> None:
        """Raise the error of this package that a database error means; return if there is none."""
        translated = self.known_error(error, written)
        if isinstance(translated, SchemaError) and self._settings.shards > 1 and (text := self._other_shards()):
            raise SchemaError(text) from error
        if translated is not None:
            raise translated

    def _other_shards(self) -> str | None:
        """Return a message if the database has tables for another number of shards than the setting."""
        with self._open(transaction=False, is_reading=True) as connection:
            found = shards.list_shards(connection) if shards.are_there(connection) else ()
            if not found and not self._settings.shard and database.current_revision(connection) is None:
                return None
            return shards.mismatch(found, self._settings.shards)

    def known_error(self, error: Exception, written: str) -> OrchestratorError | None:
        """Return the error of this package that a database error means, if any. `written` may have been committed."""
        if isinstance(error, exc.ProgrammingError) and compatibility.lacks_tables(error, self.namespace):
            return _caused(SchemaError(compatibility.no_tables(self.namespace)), error)
        if not postgres_errors.is_outage(error):
            return None
        reason = postgres_errors.explain(error, self.namespace)
        if written and postgres_errors.is_broken_off(error):
            message = f"The connection to Postgres broke, and it is not known whether {written}: {reason}"
            return _caused(Uncertain(message), error)
        return _caused(Unavailable(f"Postgres cannot be used: {reason}"), error)


def _refuse_late() -> None:
    """Refuse a query after the time limit of the call."""
    if time_limits.is_over():
        raise Unavailable("Postgres was not queried: the time limit of the call has passed.")


def _caused(translated: OrchestratorError, error: Exception) -> OrchestratorError:
    translated.__cause__ = error
    return translated


class _Links:
    """The open connections of one process."""

    def __init__(self, settings: Settings) -> None:
        self.redis = connect(settings.require_redis())
        self.shared_redis = connect_shared(settings, self.redis)
        self.nudges = Nudges(settings.require_redis(), Keys.of(settings))
        self.deadlines = deadlines.Deadlines(settings.database_timeout)
        self.engine = _engine(settings, self.deadlines, autocommit=True)
        # A separate pool: if a dead connection changed its mode, it would stay in the pool, dead forever.
        self.transactions = _engine(settings, self.deadlines, autocommit=False)
        self.of_readers = settings.of_shard("all") if settings.shards > 1 else settings
        self.reading = self.engine
        if settings.shards > 1:
            self.reading = _engine(self.of_readers, self.deadlines, autocommit=True)

    def close(self) -> None:
        self.nudges.close()
        self.redis.close()
        self.shared_redis.close()
        self.engine.dispose()
        self.reading.dispose()
        self.transactions.dispose()
        self.deadlines.close()


class _Thread(threading.local):
    is_busy = False
    """Whether the thread is checking a connection out of a pool or in. Only a signal handler can observe this."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark a section that must not be entered again."""
        before, self.is_busy = self.is_busy, True
        try:
            yield
        finally:
            self.is_busy = before


def _engine(settings: Settings, limit: deadlines.Deadlines, *, autocommit: bool, pool_size: int = 5) -> Engine:
    return database.engine_for(
        settings.require_database(),
        autocommit=autocommit,
        pool_size=pool_size,
        name="orchestrator client",
        namespace=settings.namespace,
        deadlines=limit,
    )


def callers_connection(value: object, namespace: str) -> Connection:
    """Return the connection of a caller's transaction, from any supported connection or session."""
    if (other := other_driver(value, namespace)) is not None:
        return cast(Connection, other)
    if not isinstance(value, Connection):
        from sqlalchemy.orm import Session, scoped_session  # a caller with a session has loaded it

        if isinstance(value, (Session, scoped_session)):
            value = value.connection()
    if isinstance(value, Connection):
        if value.dialect.name != "postgresql":
            raise InvalidTask(
                f"enqueue_in: expected a connection to the Postgres that holds the orchestrator's tables, found one to "
                f"{value.dialect.name}. Elsewhere, call `task.enqueue(…)` after your commit."
            )
        return value
    if hasattr(value, "run_sync"):
        raise asynchronous(value)
    raise no_connection(value)


def no_connection(value: object) -> InvalidTask:
    """Return the error for a value that is no supported connection."""
    return InvalidTask(
        f"enqueue_in: expected a connection or a session of SQLAlchemy, or a connection of psycopg2, psycopg, asyncpg "
        f"or Django to Postgres, found {for_message(value)}."
    )


def refuse_replacing(task: NewTask) -> None:
    """Refuse `on_duplicate="replace"` in a caller's transaction."""
    if task.unique is not None and task.unique.on_duplicate == "replace":
        raise InvalidTask(
            "Option on_duplicate: 'replace' cannot be combined with enqueue_in, because the scheduler would have "
            "to wait for your transaction. Use 'return' or 'raise'."
        )


def asynchronous(value: object) -> InvalidTask:
    """Return the error for an asynchronous connection in a blocking call."""
    return InvalidTask(
        f"enqueue_in: {for_message(value)} is asynchronous, and nothing was enqueued. Call "
        f"`await task.aenqueue_in(session, …)`."
    )
