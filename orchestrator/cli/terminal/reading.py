"""How commands ask: reading, sending, and waiting for an end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

from sqlalchemy import Connection

from orchestrator.cli.terminal.output import echo
from orchestrator.errors import ResultTimeout, Unavailable
from orchestrator.sdk import acting
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.calls.interface import Calls
from orchestrator.sealing import vault_of
from orchestrator.settings import Settings, load_settings
from orchestrator.store import audit, database

Record = Callable[..., None]
"""Writes into the audit log: what was done, to what kind of thing, to which, and details by name."""


@contextmanager
def writing() -> Iterator[tuple[Connection, Record]]:
    """Open a transaction, and an audit log for it; both are committed together."""
    settings = load_settings()
    with _connected(settings, autocommit=False) as connection:

        def record(act: str, kind: str, target: str, **detail: object) -> None:
            who, origin = acting.current(settings.audit_as)
            audit.add(connection, who=who, origin=origin, act=act, kind=kind, target=target, detail=detail)

        yield connection, record
        connection.commit()


@contextmanager
def reading(settings: Settings | None = None) -> Iterator[Connection]:
    """Open a connection to a database that is at the right revision; times come in UTC."""
    settings = settings or load_settings()
    with _connected(settings.of_shard("all") if settings.shards > 1 else settings, autocommit=True) as connection:
        yield connection


@contextmanager
def _connected(settings: Settings, *, autocommit: bool) -> Iterator[Connection]:
    vault_of(settings)  # so that what is sealed can be opened
    engine = database.engine_for(
        settings.require_database(),
        autocommit=autocommit,
        pool_size=1,
        name="orchestrator command",
        namespace=settings.namespace,
    )
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("SET timezone = 'UTC'")
            database.check_schema(connection)
            yield connection
    finally:
        engine.dispose()


@contextmanager
def looking() -> Iterator[Calls]:
    """Yield what can be asked, over the way that the settings name; of all shards that there are."""
    settings = load_settings()
    if settings.api_url:
        from orchestrator.sdk.remote import RemoteBackend

        with closing(RemoteBackend(settings)) as remote:
            yield remote
        return
    from orchestrator.sdk.backend import backend_of
    from orchestrator.sdk.backend.insights import InsightBackend
    from orchestrator.store import shards

    os.environ.setdefault("PGTZ", "UTC")  # in which libpq has Postgres tell the time
    with ExitStack() as opened:
        connection = opened.enter_context(reading(settings))
        if (number := shards.count(connection, settings.root)) > settings.shards:  # the others may be closing
            settings = replace(settings, shards=number)
            connection = opened.enter_context(reading(settings))
        backend = opened.enter_context(closing(backend_of(settings)))
        backend.__dict__["insights"] = InsightBackend(backend.shared, lambda: nullcontext(connection))
        yield backend


T = TypeVar("T")


def sending() -> closing[Orchestrator]:
    """Return an application without tasks, for a `with` block that closes its connections."""
    return closing(Orchestrator(load_settings()))


def ask_each(things: Iterable[T], ask: Callable[[Orchestrator, T], object], said: str) -> None:
    """Ask for the same about several things, and say so of each."""
    with sending() as app:
        for thing in things:
            ask(app, thing)
            echo(said.format(thing))


_INTERVAL = 3.0
"""Seconds after which a waiter asks why, and asks again."""


class ObstacleNotices:
    """Says what keeps an end from coming, when that has been waited for a while; each only once."""

    def __init__(self, obstacles: Callable[[], list[str]], say: Callable[[str], None] | None = None) -> None:
        self._obstacles = obstacles
        self._say = say or (lambda text: echo(text, colour="yellow", err=True))
        self._ask_at = time.monotonic() + _INTERVAL
        self._told: set[str] = set()

    def goes_on(self) -> None:
        """Ask what is in the way, if it is time."""
        if time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + _INTERVAL
        try:
            found = self._obstacles()
        except Unavailable:
            return  # the wait goes on, and says so itself
        for obstacle in found:
            if obstacle not in self._told:
                self._told.add(obstacle)
                self._say(f"! {obstacle}")


def wait_with_notices(wait: Callable[[float], T], obstacles: Callable[[], list[str]]) -> T:
    """Wait for an end, and say meanwhile what keeps it from coming."""
    notices = ObstacleNotices(obstacles)
    while True:
        try:
            return wait(_INTERVAL)
        except ResultTimeout:
            notices.goes_on()
