"""Postgres engines, and the schema revision that this release needs."""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psycopg2 import ProgrammingError
from psycopg2.extensions import make_dsn
from sqlalchemy import Connection, Engine, create_engine, event, exc, text
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.pool import NullPool, QueuePool

from orchestrator import time_limits
from orchestrator.errors import ConfigurationError, SchemaError
from orchestrator.prerequisites import Prerequisite
from orchestrator.settings import DEFAULT_NAMESPACE, Settings
from orchestrator.store.compatibility import (
    has_views,
    no_tables,
    oldest_supported,
    refuse_early,
    refuse_old_server,
)
from orchestrator.store.deadlines import Deadlines, missed, use_deadlines
from orchestrator.store.dialing import hide_rows, several_hosts, use_dialing
from orchestrator.store.namespaces import ALL, NOT_SHARED, namespace_of, use_namespace
from orchestrator.store.postgres_errors import as_outage, outage_of
from orchestrator.store.tables.columns import SCHEMA
from orchestrator.terminal_safe import without_password, without_password_of

if TYPE_CHECKING:
    from alembic.config import Config

REVISION = "0041"
"""The newest migration: `orchestrator db upgrade` brings a database to this revision."""

_NOTICE_SILENCE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 11_000}
"""Give up a connection after about ten seconds without a packet. With the defaults, a query waits a quarter of an hour
or for ever after a cable is pulled or the server's machine is gone."""
_POOL_TIMEOUT = 10.0
"""Seconds to wait for a connection of the pool, or for a new connection."""
_MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"
_UPGRADE_LOCK = 0x6F7263685F6462


def probe_engine(settings: Settings, name: str, longest: float) -> Engine:
    """Return an engine for probes: one connection of its own, and a statement timeout of `longest` seconds."""
    return engine_for(
        settings.require_database(),
        autocommit=True,
        pool_size=1,
        max_overflow=0,
        name=name,
        namespace=(settings.of_shard("all") if settings.shards > 1 else settings).namespace,
        deadlines=Deadlines(longest),
    )


def engine_for(
    url: str,
    *,
    autocommit: bool = False,
    pool_size: int = 5,
    max_overflow: int = 20,
    name: str = "orchestrator",
    namespace: str = DEFAULT_NAMESPACE,
    deadlines: Deadlines | None = None,
) -> Engine:
    """Return an engine for a Postgres URL; psycopg2 unless the URL names a driver. A pool of 0 keeps no connection."""
    timeout = _POOL_TIMEOUT if deadlines is None else min(_POOL_TIMEOUT, deadlines.seconds)
    pool: dict[str, Any] = {"poolclass": NullPool}
    if pool_size:
        pool = {"poolclass": _Pool, "pool_size": pool_size, "max_overflow": max_overflow, "pool_timeout": timeout}
    try:
        url, hosts = several_hosts(url)
        parsed = make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg2")
        # In autocommit mode every statement is one round trip, and there is nothing to roll back on return.
        engine = create_engine(
            parsed,
            **pool,
            pool_reset_on_return=None if autocommit else "rollback",
            isolation_level="AUTOCOMMIT" if autocommit else "READ COMMITTED",
            connect_args={"application_name": name, "connect_timeout": math.ceil(timeout), **_NOTICE_SILENCE, **hosts},
            hide_parameters=True,
        )
        engine.dialect.skip_autocommit_rollback = autocommit  # SQLAlchemy before 2.0.43 lacks the argument for this
        if engine.dialect.is_async:
            raise ValueError(f"{engine.driver} is an asynchronous driver; remove it, or use psycopg2 or psycopg")
        if engine.driver == "psycopg2":  # psycopg2 reports an unknown option only when connecting
            make_dsn(**engine.dialect.create_connect_args(parsed)[1])
    except (exc.ArgumentError, ValueError, TypeError, ImportError, ProgrammingError) as error:
        reason = without_password_of(url, str(error).strip().partition("\n")[0])
        raise ConfigurationError(
            f"Setting database_url: expected postgresql://user:password@host/database, found "
            f"{without_password(url)!r:.300}: {reason}."
        ) from None  # the driver's message may contain the password
    use_namespace(engine, namespace)
    event.listen(engine, "checkout", _refuse_if_closed)
    event.listen(engine, "handle_error", _as_outage, retval=True)
    if deadlines is not None:
        use_deadlines(engine, deadlines)
        use_dialing(engine)
    return engine


class _Pool(QueuePool):
    """A pool in which waiting for a connection ends with the deadline of the call."""

    _sqla_logger_namespace = "sqlalchemy.pool.QueuePool"  # SQLAlchemy's own logger

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept: deque[Any] = deque(maxlen=1)
        """A connection that single statements reuse without returning it to the pool (`driver.execute`)."""

    def dispose(self) -> None:
        while self.kept:
            self.kept.pop().connection.close()
        super().dispose()

    @property
    def _timeout(self) -> float:
        return time_limits.remaining(self._longest)

    @_timeout.setter
    def _timeout(self, seconds: float) -> None:
        self._longest = seconds


def _refuse_if_closed(connection: Any, record: Any, proxy: object) -> None:
    """Make the pool replace a connection that Postgres has closed while it was idle.

    No data is in flight on an idle connection, so a readable connection has ended. The check costs no round trip.
    """
    del proxy
    if not record.info.setdefault("orchestrator_rested", False):
        record.info["orchestrator_rested"] = True  # the connection is new; with TLS, data may still be in flight
        return
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if poll.poll(0):
        raise exc.DisconnectionError


def _as_outage(context: ExceptionContext) -> exc.OperationalError | None:
    if late := missed(context.connection, context.statement or ""):
        return late
    error = context.sqlalchemy_exception
    if not isinstance(error, exc.DBAPIError):
        return None
    hide_rows(error)
    outage = as_outage(error, is_broken=context.is_disconnect)
    context.is_disconnect = context.is_disconnect or (outage is not None and outage.connection_invalidated)
    return outage


def prerequisite(engine: Engine) -> Prerequisite:
    """Return the database as a prerequisite for which a process waits at start."""

    def check() -> str | None:
        with engine.connect() as connection:
            return check_schema(connection)

    return Prerequisite("Postgres", check, outage_of)


def check_schema(connection: Connection) -> str | None:
    """Raise an error if the schema does not support this release; return a warning if the schema is newer."""
    refuse_old_server(connection)
    revision = current_revision(connection)
    if revision is None:
        raise SchemaError(no_tables(namespace_of(connection)))
    if revision < REVISION:
        raise SchemaError(
            f"The database is at revision {revision}; this release needs {REVISION}. Run `orchestrator db upgrade`."
        )
    if namespace_of(connection).endswith(ALL) and not has_views(connection):
        raise SchemaError(
            "The database has one shard, and setting shards is larger. Set ORCHESTRATOR_SHARDS=1 for every process. "
            "Only to make more shards, run `orchestrator db upgrade`."
        )
    if revision == REVISION:
        return None
    newer = f"The database is at revision {revision}, newer than this release knows ({REVISION})."
    oldest = oldest_supported(connection)
    if oldest is None or oldest > REVISION:
        raise SchemaError(
            f"{newer} It supports releases of revision {oldest or revision} and later: use one of those, or restore a "
            f"backup from before the upgrade."
        )
    return f"{newer} It supports this release too."


def current_revision(connection: Connection) -> str | None:
    """Return the database's revision; None if the tables do not exist."""
    exists = connection.execute(text(f"SELECT to_regclass('{SCHEMA}.alembic_version')")).scalar()
    if exists is None:
        return None
    value: str | None = connection.execute(text(f"SELECT version_num FROM {SCHEMA}.alembic_version")).scalar()
    return value


def upgrade(url: str, *, namespace: str = DEFAULT_NAMESPACE) -> str | None:
    """Upgrade a namespace to the newest revision. A concurrent upgrade waits for this one.

    An empty namespace is created in one transaction. For a newer revision, return `check_schema`'s warning.
    """
    from alembic import command

    from orchestrator.store.tables.all_tables import metadata

    with _migrating(url, namespace) as (connection, config):
        connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{namespace}"'))
        connection.commit()
        if not (revision := current_revision(connection) or ""):
            metadata.create_all(connection, checkfirst=False)
            command.stamp(config, REVISION)
        elif revision > REVISION:
            return check_schema(connection)
        refuse_early(revision)
        command.upgrade(config, "head")
    return None


def downgrade(url: str, revision: str | None, *, namespace: str = DEFAULT_NAMESPACE) -> str:
    """Downgrade a namespace to a revision, by default the previous one, if no data is lost; return the new revision."""
    from alembic import command
    from alembic.script import ScriptDirectory

    with _migrating(url, namespace) as (connection, config):
        if (current := current_revision(connection)) is None:
            raise SchemaError(no_tables(namespace))
        if current > REVISION:
            raise SchemaError(
                "Only the release that upgraded the database can undo the upgrade: run the command there."
            )
        if connection.execute(text(f"SELECT to_regnamespace('\"{namespace}/all\"')")).scalar():
            raise SchemaError(
                "A downgrade needs a database with one shard: set shards to 1, and run `orchestrator db upgrade`."
            )
        leader = connection.execute(text(f"SELECT address FROM {SCHEMA}.leases WHERE expires_at > now()")).scalar()
        if leader:
            raise SchemaError(f"The scheduler {leader} leads. Stop all processes of this release, then try again.")
        all_revisions = (script.revision for script in ScriptDirectory.from_config(config).walk_revisions())
        earlier = sorted(known for known in all_revisions if known < current)
        if not earlier:
            raise SchemaError(f"The database is at revision {current}, the oldest to which it can be downgraded.")
        revision = revision or earlier[-1]
        if revision not in earlier:
            raise SchemaError(f"Expected a revision from {earlier[0]} to {earlier[-1]}, found {revision!r:.100}.")
        connection.commit()
        command.downgrade(config, revision)
        return revision


def lock_upgrades(connection: Connection) -> None:
    """Lock schema changes until the transaction ends."""
    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _UPGRADE_LOCK})
    connection.execute(text("SET LOCAL lock_timeout = '10s'"))


@contextmanager
def _migrating(url: str, namespace: str) -> Iterator[tuple[Connection, Config]]:
    """Yield a connection that holds the upgrade lock, and Alembic's configuration."""
    from alembic.config import Config

    engine = engine_for(url, name="orchestrator db")
    use_namespace(engine, namespace, NOT_SHARED)
    try:
        with engine.connect() as connection:
            refuse_old_server(connection)
            connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": _UPGRADE_LOCK})
            connection.execute(text("SET lock_timeout = '10s'"))
            connection.commit()
            config = Config()
            config.set_main_option("script_location", str(_MIGRATIONS))
            config.attributes["connection"] = connection
            config.attributes["namespace"] = namespace
            yield connection, config
            connection.commit()
    finally:
        engine.dispose()  # closing the connection releases the lock
