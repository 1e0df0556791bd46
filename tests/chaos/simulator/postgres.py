"""A database for simulations: it has the simulated clock, and records every change of a task's state.

The product's statements call `now()`. Here a function in the simulator's schema precedes it in the search path, and
reads the time from a sequence. So leases expire and retries fall due in virtual time, deterministically.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from psycopg2 import extensions
from sqlalchemy import Connection, Engine, create_engine, event

from orchestrator.settings import Settings
from orchestrator.store import shards
from orchestrator.store.database import engine_for
from orchestrator.store.namespaces import in_namespace

EPOCH = "2030-01-01 00:00:00+00"

_PREPARE = f"""
CREATE SCHEMA simulated;
CREATE UNLOGGED SEQUENCE simulated.clock MINVALUE 0;
SELECT setval('simulated.clock', 0);
CREATE FUNCTION simulated.last_value(regclass) RETURNS bigint LANGUAGE internal STABLE STRICT
    AS 'pg_sequence_last_value';
CREATE FUNCTION simulated.now() RETURNS timestamptz LANGUAGE sql STABLE AS
    $$ SELECT timestamptz '{EPOCH}' + simulated.last_value('simulated.clock') * interval '1 microsecond' $$;
CREATE FUNCTION simulated.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS $$ SELECT simulated.now() $$;

CREATE UNLOGGED TABLE simulated.audit (
    number bigint GENERATED ALWAYS AS IDENTITY, operation text, id uuid, before text, after text,
    attempt int, attempt_before int, run_id uuid, step text, name text, key text,
    lane text, queue text, at timestamptz DEFAULT simulated.now());
CREATE UNLOGGED TABLE simulated.scarce (
    number bigint GENERATED ALWAYS AS IDENTITY, transaction xid8 DEFAULT pg_current_xact_id(), id uuid, status text);
CREATE FUNCTION simulated.note_run() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO simulated.scarce (id, status) VALUES (NEW.id, NEW.status);
    RETURN NULL;
END $$;
CREATE UNLOGGED TABLE simulated.ledger (id uuid, attempt int);
CREATE FUNCTION simulated.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO simulated.audit (operation, id, before, attempt_before, run_id, step)
        VALUES ('leave ' || TG_TABLE_NAME, OLD.id, OLD.status, OLD.attempt, OLD.run_id, OLD.step);
    ELSIF TG_OP = 'INSERT' THEN
        INSERT INTO simulated.audit (operation, id, after, attempt, run_id, step, name, key, lane, queue)
        VALUES ('enter ' || TG_TABLE_NAME, NEW.id, NEW.status, NEW.attempt, NEW.run_id, NEW.step, NEW.name,
                NEW.unique_key, NEW.lane, NEW.queue);
    ELSIF OLD.status <> NEW.status OR OLD.attempt <> NEW.attempt THEN
        INSERT INTO simulated.audit (operation, id, before, after, attempt, attempt_before, run_id, step, name,
                                     key, lane, queue)
        VALUES ('change', NEW.id, OLD.status, NEW.status, NEW.attempt, OLD.attempt, NEW.run_id, NEW.step, NEW.name,
                NEW.unique_key, NEW.lane, NEW.queue);
    END IF;
    RETURN NULL;
END $$;
"""
_WATCH = """
CREATE OR REPLACE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON "{0}".tasks
    FOR EACH ROW EXECUTE FUNCTION simulated.note();
CREATE OR REPLACE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON "{0}".ended_tasks
    FOR EACH ROW EXECUTE FUNCTION simulated.note();
CREATE OR REPLACE TRIGGER note AFTER INSERT OR UPDATE OF status ON "{0}".runs
    FOR EACH ROW WHEN (NEW.workflow = 'scarce') EXECUTE FUNCTION simulated.note_run();
"""
_NONEMPTY_TABLES = """
SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
 WHERE nspname ~ '^orchestrator(/[0-9]+)?$' AND relkind = 'r'
   AND relname NOT IN ('workflows', 'flows', 'alembic_version') AND pg_relation_size(c.oid) > 0
"""
_ALL_SHARDS = "orchestrator/all"


def _namespace(shard: int) -> str:
    return f"orchestrator/{shard}" if shard else "orchestrator"


class SimulatedDatabase:
    """The database of all simulations of a session, which run one after another."""

    def __init__(self, url: str) -> None:
        self.url = url
        setup = create_engine(url.replace("postgresql:", "postgresql+psycopg2:"), isolation_level="AUTOCOMMIT")
        with setup.connect() as connection:
            is_old = (connection.dialect.server_version_info or ()) < (15,)  # without unlogged sequences
            connection.exec_driver_sql(_PREPARE.replace("UNLOGGED SEQUENCE", "SEQUENCE") if is_old else _PREPARE)
            connection.exec_driver_sql(_WATCH.format("orchestrator"))
            for table, column in (("tasks", "created_at"), ("runs", "created_at"), ("inbox", "created_at")):
                connection.exec_driver_sql(
                    f"ALTER TABLE orchestrator.{table} ALTER COLUMN {column} SET DEFAULT simulated.now()"
                )
            name = connection.exec_driver_sql("SELECT current_database()").scalar_one()
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET search_path = simulated, pg_catalog")
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET synchronous_commit = off")
        setup.dispose()
        self.settings = Settings(database_url=url)
        self._engines: dict[str, Engine] = {}
        self._connections: dict[str, Connection] = {}
        self._time = 0.0
        self._set_clock: bytes | None = None
        """SQL that sets the clock, sent with the next statement; None if the clock is right."""
        self._connection = self._connected("orchestrator")
        self.existing = 1
        """Number of shards in the database, including closing shards."""

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for engine in self._engines.values():
            engine.dispose()

    # -- shards

    def _has_shards(self) -> bool:
        return shards.are_there(self._connection)

    def reshard(self, number: int) -> list[str]:
        """Change the number of shards as `orchestrator db upgrade` does; return its messages."""
        if number == self.existing == self.settings.shards:
            return []
        self.settings = dataclasses.replace(self.settings, shards=number)
        for namespace in [name for name in self._connections if "/" in name]:  # its schema may be dropped
            self._connections.pop(namespace).close()
        for name in [name for name in self._engines if "/" in name]:
            self._engines.pop(name).dispose()
        self._connection.exec_driver_sql("SELECT")  # send the clock: the upgrade uses other connections
        notes = shards.upgrade(self.settings)
        self.existing = max(number, len(shards.list_shards(self._connection))) if self._has_shards() else 1
        for shard in range(1, number):
            self._connection.exec_driver_sql(_WATCH.format(f"orchestrator/{shard}"))
        return notes

    def engine_of(self, shard: int) -> Engine:
        """Return the connection pool of a shard's server processes."""
        return self._engine("scheduler", _namespace(shard))

    def connection_of(self, shard: int) -> Connection:
        """Return the autocommit connection of clients to a shard."""
        return self._connected(_namespace(shard))

    def locate(self, ids: Sequence[bytes]) -> dict[bytes, int]:
        """Return the shards of tasks and runs, as clients locate them."""
        return {} if self.existing == 1 else shards.locate(self._connection, ids)

    def _engine(self, name: str, namespace: str) -> Engine:
        key = f"{namespace} {name}"
        if key not in self._engines:
            engine = self._engines[key] = engine_for(
                self.url, pool_size=8, name=f"simulated {name}", autocommit=name == "outside", namespace=namespace
            )
            event.listen(engine, "connect", self._keep_time)
        return self._engines[key]

    def _connected(self, namespace: str) -> Connection:
        if namespace not in self._connections:
            self._connections[namespace] = self._engine("outside", namespace).connect()
        return self._connections[namespace]

    def clear(self) -> None:
        """Delete everything except the definitions of workflows."""
        used = self._connection.exec_driver_sql(_NONEMPTY_TABLES).scalars()
        names = ", ".join([*used, "simulated.audit", "simulated.scarce", "simulated.ledger"])
        self._connection.exec_driver_sql(f"TRUNCATE {names} RESTART IDENTITY")  # also resets space used by deleted rows

    def set_clock(self, seconds: float) -> None:
        """Set the clock of the database."""
        if seconds != self._time:
            self._time = seconds
            self._set_clock = b"SELECT setval('simulated.clock', %d);" % round(seconds * 1e6)

    def _keep_time(self, connection: Any, record: Any) -> None:
        """Prepend a pending change of the clock to a connection's next statement; count the connection's statements."""
        database, info = self, record.info
        info["sent"] = 0

        class Cursor(extensions.cursor):
            def execute(self, query: Any, parameters: Any = None) -> None:
                info["sent"] = info.get("sent", 0) + 1
                clock_statement = database._set_clock
                if (
                    clock_statement is None
                    or self.connection.info.transaction_status == extensions.TRANSACTION_STATUS_INERROR
                ):
                    super().execute(query, parameters)
                else:
                    text = self.mogrify(query, parameters)
                    super().execute(clock_statement + (text if isinstance(text, bytes) else text.encode()))
                    database._set_clock = None

            def copy_expert(self, *arguments: Any) -> None:
                self.execute("SELECT")
                super().copy_expert(*arguments)

        connection.cursor_factory = Cursor

    def sql(self, statement: str, **parameters: Any) -> list[Any]:
        """Run a statement of the simulator over all shards, on the simulator's connection."""
        namespace = _ALL_SHARDS if self.existing > 1 else "orchestrator"
        driver_connection = self._connected(namespace).connection
        cursor: Any = driver_connection.cursor()
        if parameters:
            cursor.execute(in_namespace(statement, namespace), parameters)
        else:
            prepared = driver_connection.info.setdefault("prepared", {})
            if statement not in prepared:
                prepared[statement] = f"EXECUTE simulated_{len(prepared)}"
                cursor.execute(f"PREPARE simulated_{len(prepared) - 1} AS {in_namespace(statement, namespace)}")
            cursor.execute(prepared[statement])
        names = [column.name for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
