"""Pass Postgres notifications on.

A task that was enqueued in a user's own transaction is announced by that transaction's commit, and becomes a nudge. A
leader that gives its lease up announces that, and the standbys of this moment try for it. Without this (or behind a
pooler that does not carry LISTEN) either is found out by looking, a second later at most.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from typing import Any

import psycopg2
from sqlalchemy import exc

from orchestrator.settings import Settings
from orchestrator.store.database import engine_for
from orchestrator.store.leases import RELEASED
from orchestrator.telemetry import get_logger
from orchestrator.transport.client import nudge
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys

log = get_logger("scheduler")


def listen(settings: Settings, keys: Keys, lease_released: Callable[[], None]) -> None:
    """Listen for ever; reconnect after every outage."""
    redis = connect(settings.require_redis())
    engine = engine_for(settings.require_database(), autocommit=True, pool_size=1, name="orchestrator notifications")
    pause = threading.Event()
    while True:
        try:
            with engine.connect() as connection:
                raw: Any = connection.connection.dbapi_connection  # the driver's own, which can be waited for
                connection.exec_driver_sql(f'LISTEN "{settings.namespace}"')
                while True:
                    select.select([raw], [], [])
                    raw.poll()
                    said = {notification.payload for notification in raw.notifies}
                    raw.notifies.clear()
                    if RELEASED in said:
                        lease_released()
                    if said - {RELEASED}:
                        nudge(redis, keys)
        except (exc.SQLAlchemyError, psycopg2.Error, OSError) as error:
            log.debug("postgres.notifications_interrupted error=%s", error)
            pause.wait(1.0)
