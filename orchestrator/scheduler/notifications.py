"""Pass Postgres notifications on as nudges.

A task that was enqueued in a user's own transaction is announced by that transaction's commit. Without this (or
behind a pooler that does not carry LISTEN) such a task is found by the safety scan, a second later at most.
"""

from __future__ import annotations

import select
import threading
from typing import Any

import psycopg2
from sqlalchemy import exc

from orchestrator.settings import Settings
from orchestrator.store.database import engine_for
from orchestrator.telemetry import get_logger
from orchestrator.transport.client import nudge
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys

log = get_logger("scheduler")


def listen(settings: Settings, keys: Keys) -> None:
    """Listen for ever; reconnect after every outage."""
    redis = connect(settings.require_redis())
    engine = engine_for(settings.require_database(), autocommit=True, pool_size=1, name="orchestrator notifications")
    pause = threading.Event()
    while True:
        try:
            with engine.connect() as connection:
                raw: Any = connection.connection.dbapi_connection  # the driver's own, which can be waited for
                connection.exec_driver_sql("LISTEN orchestrator")
                while True:
                    select.select([raw], [], [])
                    raw.poll()
                    if raw.notifies:
                        raw.notifies.clear()
                        nudge(redis, keys)
        except (exc.SQLAlchemyError, psycopg2.Error, OSError) as error:
            log.debug("notifications interrupted: %s", error)
            pause.wait(1.0)
