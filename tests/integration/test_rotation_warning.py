"""`orchestrator keys rotate-data` names live workers that lack the new key."""

from __future__ import annotations

import base64

from click.testing import CliRunner, Result
from sqlalchemy import Engine

from orchestrator.cli import main
from orchestrator.sealing import key_name
from tests.integration.api_client import empty_engine  # noqa: F401

NEW = f"new:{base64.b64encode(b'n' * 32).decode()}"


def add_worker(engine: Engine, id: str, state: str, *names: str) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.workers (id, host, pid, queues, names, slots, running, state, started_at,"
            " seen_at) VALUES (%s, %s, 7, '{default}', %s, 1, 0, %s, now(), now())",
            (id, f"host-{id}", list(names), state),
        )


def rotate(database_url: str, redis_url: str) -> Result:
    environment = {
        "ORCHESTRATOR_DATABASE_URL": database_url,
        "ORCHESTRATOR_REDIS_URL": redis_url,
        "ORCHESTRATOR_DATA_KEYS": NEW,
    }
    result = CliRunner().invoke(main, ["keys", "rotate-data"], env=environment)
    assert result.exit_code == 0, result.output
    return result


def test_live_workers_without_the_new_key_are_named(engine: Engine, database_url: str, redis_url: str) -> None:
    add_worker(engine, "a", "live", "t.a", key_name("new"))
    add_worker(engine, "b", "dead", "t.a")
    assert rotate(database_url, redis_url).stderr == ""
    add_worker(engine, "c", "live", "t.a", key_name("old"))
    told = rotate(database_url, redis_url).stderr
    assert told.startswith("Warning: 1 live worker without the key new: host-c pid 7. ")
    assert "host-a" not in told
    assert "restart them" in told
