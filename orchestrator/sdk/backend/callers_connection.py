"""The connection of a caller's own transaction, in which `enqueue_in` stores a task."""

from __future__ import annotations

from typing import cast

from sqlalchemy import Connection

from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask
from orchestrator.sdk.checks import shown
from orchestrator.store.other_drivers import other_driver


def callers_connection(given: object, namespace: str) -> Connection:
    """Return the connection of a caller's transaction, however that is given."""
    if (other := other_driver(given, namespace)) is not None:
        return cast(Connection, other)
    if not isinstance(given, Connection):
        from sqlalchemy.orm import Session, scoped_session  # a caller with a session has loaded it

        if isinstance(given, (Session, scoped_session)):
            given = given.connection()
    if isinstance(given, Connection):
        if given.dialect.name != "postgresql":
            raise InvalidTask(
                f"enqueue_in: expected a connection to the Postgres that holds the orchestrator's tables, found one to "
                f"{given.dialect.name}. Elsewhere, call `task.enqueue(…)` after your commit."
            )
        return given
    if hasattr(given, "run_sync"):
        raise asynchronous(given)
    raise no_connection(given)


def no_connection(given: object) -> InvalidTask:
    """Return the error of a call in a transaction without one."""
    return InvalidTask(
        f"enqueue_in: expected a connection or a session of SQLAlchemy, or a connection of psycopg2, psycopg, asyncpg "
        f"or Django to Postgres, found {shown(given)}."
    )


def refuse_replacing(task: NewTask) -> None:
    """Refuse a task in the caller's transaction that would replace another."""
    if task.unique is not None and task.unique.on_duplicate == "replace":
        raise InvalidTask(
            "Option on_duplicate: 'replace' does not go with enqueue_in, because the scheduler would have to wait "
            "for your transaction. Use 'return' or 'raise'."
        )


def asynchronous(given: object) -> InvalidTask:
    """Return the error of a blocking call with an asynchronous connection."""
    return InvalidTask(
        f"enqueue_in: {shown(given)} is asynchronous, and nothing was enqueued. Call "
        f"`await task.aenqueue_in(session, …)`."
    )
