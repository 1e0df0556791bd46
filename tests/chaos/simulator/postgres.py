"""A database for simulations: its clock is the world's, and every change of a task's state is written down.

The product's statements say `now()`. Here that name is found first in a schema of the simulator's own, where it reads
the time from a table. So leases expire, retries fall due and tasks grow old in virtual time, and always alike.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, create_engine, text

from orchestrator.store.database import engine_for

EPOCH = "2030-01-01 00:00:00+00"

_PREPARE = f"""
CREATE SCHEMA simulated;
CREATE UNLOGGED TABLE simulated.clock (seconds double precision NOT NULL);
INSERT INTO simulated.clock VALUES (0);
CREATE FUNCTION simulated.now() RETURNS timestamptz LANGUAGE sql STABLE AS
    $$ SELECT timestamptz '{EPOCH}' + seconds * interval '1 second' FROM simulated.clock $$;
CREATE FUNCTION simulated.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS $$ SELECT simulated.now() $$;

CREATE UNLOGGED TABLE simulated.audit (
    number bigint GENERATED ALWAYS AS IDENTITY, operation text, id uuid, before text, after text,
    attempt int, attempt_before int, run_id uuid, step text);
CREATE UNLOGGED TABLE simulated.ledger (id uuid, attempt int);
CREATE FUNCTION simulated.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO simulated.audit (operation, id, before, attempt_before, run_id, step)
        VALUES ('leave ' || TG_TABLE_NAME, OLD.id, OLD.status, OLD.attempt, OLD.run_id, OLD.step);
    ELSIF TG_OP = 'INSERT' THEN
        INSERT INTO simulated.audit (operation, id, after, attempt, run_id, step)
        VALUES ('enter ' || TG_TABLE_NAME, NEW.id, NEW.status, NEW.attempt, NEW.run_id, NEW.step);
    ELSIF OLD.status <> NEW.status OR OLD.attempt <> NEW.attempt THEN
        INSERT INTO simulated.audit (operation, id, before, after, attempt, attempt_before, run_id, step)
        VALUES ('change', NEW.id, OLD.status, NEW.status, NEW.attempt, OLD.attempt, NEW.run_id, NEW.step);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON orchestrator.tasks
    FOR EACH ROW EXECUTE FUNCTION simulated.note();
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON orchestrator.ended_tasks
    FOR EACH ROW EXECUTE FUNCTION simulated.note();
"""
_USED = """
SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'orchestrator'::regnamespace AND relkind = 'r'
   AND relname NOT IN ('workflows', 'flows', 'alembic_version') AND pg_relation_size(oid) > 0
"""


class SimulatedDatabase:
    """The one database that all simulations of a session use, one after the other."""

    def __init__(self, url: str) -> None:
        self.url = url
        setup = create_engine(url.replace("postgresql:", "postgresql+psycopg2:"), isolation_level="AUTOCOMMIT")
        with setup.connect() as connection:
            connection.exec_driver_sql(_PREPARE)
            for table, column in (("tasks", "created_at"), ("runs", "created_at"), ("inbox", "created_at")):
                connection.exec_driver_sql(
                    f"ALTER TABLE orchestrator.{table} ALTER COLUMN {column} SET DEFAULT simulated.now()"
                )
            name = connection.exec_driver_sql("SELECT current_database()").scalar_one()
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET search_path = simulated, pg_catalog")
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET synchronous_commit = off")
        setup.dispose()
        self.engine: Engine = engine_for(url, pool_size=8, name="simulated scheduler")
        self._outside = engine_for(url, autocommit=True, name="simulator")
        self._connection = self._outside.connect()
        self._set_to: float | None = None

    def close(self) -> None:
        self._connection.close()
        self._outside.dispose()
        self.engine.dispose()

    def clear(self) -> None:
        """Forget everything but the definitions of workflows."""
        used = self._connection.exec_driver_sql(_USED).scalars()
        names = ", ".join([*used, "simulated.audit", "simulated.ledger"])
        self._connection.exec_driver_sql(f"TRUNCATE {names} RESTART IDENTITY")  # also what was deleted has a place
        self._set_to = None

    def set_clock(self, seconds: float) -> None:
        """Make it this late, for everybody who asks Postgres."""
        if seconds != self._set_to:
            self._connection.exec_driver_sql("UPDATE simulated.clock SET seconds = %(at)s", {"at": seconds})
            self._set_to = seconds

    def time(self) -> datetime:
        return datetime.fromisoformat(EPOCH) + timedelta(seconds=self._set_to or 0.0)

    def sql(self, statement: str, **parameters: Any) -> list[Any]:
        """Run a statement of the simulator's own, on a connection of its own."""
        result = self._connection.execute(text(statement), parameters)
        return list(result.mappings()) if result.returns_rows else []

    @property
    def connection(self) -> Any:
        """The simulator's own connection; every statement commits."""
        return self._connection
