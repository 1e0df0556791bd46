"""The client's connections, opened on first use: Postgres to write and read, Redis to be quick about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from sqlalchemy import Connection, Engine, exc

from orchestrator.domain.ids import to_text
from orchestrator.domain.task import NewTask
from orchestrator.errors import SchemaError, Unavailable, Uncertain
from orchestrator.settings import Settings
from orchestrator.store import database, enqueue
from orchestrator.transport.client import Nudges
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys


class Connections:
    """Pools of connections whose errors a caller can act on, and the way to tell the leader that something is new."""

    def __init__(self, settings: Settings) -> None:
        url, name = settings.require_database(), "orchestrator client"
        self.namespace = settings.namespace
        self.keys = Keys(settings.namespace)
        self.redis = connect(settings.require_redis())
        self._nudges = Nudges(settings.require_redis(), self.keys)
        self._engine = database.engine_for(url, autocommit=True, name=name, namespace=settings.namespace)
        # A pool of its own: changing the mode of a connection that had died would leave it in the pool, dead for ever.
        self._transactions = database.engine_for(url, name=name, namespace=settings.namespace)

    def close(self) -> None:
        """Close every connection."""
        self._nudges.close()
        self.redis.close()
        self._engine.dispose()
        self._transactions.dispose()

    def nudge(self) -> None:
        """Tell the leader that something is new, which must be committed by now."""
        self._nudges.send()

    def reading(self) -> AbstractContextManager[Connection]:
        """Open a connection to read."""
        return self._connected(self._engine, "")

    @contextmanager
    def writing(self, what: str, *, transaction: bool = False) -> Iterator[Connection]:
        """Open a connection to write: one statement, or as many as the transaction needs. `what` is then done."""
        with self._connected(self._transactions if transaction else self._engine, what) as connection:
            if transaction:
                with connection.begin():
                    yield connection
            else:
                yield connection

    def insert(self, task: NewTask) -> None:
        """Create one task without a unique key, on the shortest way."""
        try:
            enqueue.insert_alone(self._engine, task)
        except exc.SQLAlchemyError as error:
            self._tell(error, f"task {to_text(task.id)} was stored")
            raise

    @contextmanager
    def _connected(self, engine: Engine, written: str) -> Iterator[Connection]:
        try:
            with engine.connect() as connection:
                yield connection
        except exc.SQLAlchemyError as error:
            self._tell(error, written)
            raise

    def _tell(self, error: exc.SQLAlchemyError, written: str) -> None:
        """Raise what a caller can act on, where it is that."""
        if isinstance(error, exc.ProgrammingError) and database.lacks_tables(error, self.namespace):
            raise SchemaError(database.no_tables(self.namespace)) from error
        if not database.is_outage(error):
            return
        reason = database.explain(error)
        if written and database.is_broken_off(error):
            raise Uncertain(
                f"The connection to Postgres broke, and it is not known whether {written}: {reason}"
            ) from error
        raise Unavailable(f"Postgres cannot be used: {reason}") from error
