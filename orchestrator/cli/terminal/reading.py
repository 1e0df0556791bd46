"""Access of commands to Postgres, Redis or the HTTP API, and waiting with explanations."""

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
"""Writes an audit log entry: the action, the type and the name of its target, and details as keywords."""


@contextmanager
def writing() -> Iterator[tuple[Connection, Record]]:
    """Open a transaction and an audit log for it; both are committed together."""
    settings = load_settings()
    with _connected(settings, autocommit=False) as connection:

        def record(act: str, kind: str, target: str, **detail: object) -> None:
            who, origin = acting.current(settings.audit_as)
            audit.add(connection, who=who, origin=origin, act=act, kind=kind, target=target, detail=detail)

        yield connection, record
        connection.commit()


@contextmanager
def reading(settings: Settings | None = None) -> Iterator[Connection]:
    """Open an autocommit connection to a database whose schema is checked; times are in UTC."""
    settings = settings or load_settings()
    with _connected(settings.of_shard("all") if settings.shards > 1 else settings, autocommit=True) as connection:
        yield connection


@contextmanager
def _connected(settings: Settings, *, autocommit: bool) -> Iterator[Connection]:
    vault_of(settings)  # so that encrypted values can be decrypted
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
def open_calls() -> Iterator[Calls]:
    """Yield the client calls, through the HTTP API or directly as the settings say. They cover all shards."""
    settings = load_settings()
    if settings.api_url:
        from orchestrator.sdk.remote import RemoteBackend

        with closing(RemoteBackend(settings)) as remote:
            yield remote
        return
    from orchestrator.sdk.backend import backend_of
    from orchestrator.sdk.backend.insights import InsightBackend
    from orchestrator.store import shards

    os.environ.setdefault("PGTZ", "UTC")  # libpq tells Postgres to report times in UTC
    with ExitStack() as opened:
        connection = opened.enter_context(reading(settings))
        if (number := shards.count(connection, settings.root)) > settings.shards:  # closing shards are read too
            settings = replace(settings, shards=number)
            connection = opened.enter_context(reading(settings))
        backend = opened.enter_context(closing(backend_of(settings)))
        backend.__dict__["insights"] = InsightBackend(backend.shared, lambda: nullcontext(connection))
        yield backend


T = TypeVar("T")


def open_app() -> closing[Orchestrator]:
    """Return an application without tasks, for a `with` block that closes its connections."""
    return closing(Orchestrator(load_settings()))


def ask_each(targets: Iterable[T], ask: Callable[[Orchestrator, T], object], message: str) -> None:
    """Send the same request for each target, and print `message` formatted with the target."""
    with open_app() as app:
        for target in targets:
            ask(app, target)
            echo(message.format(target))


_INTERVAL = 3.0
"""Seconds between two queries for obstacles during a wait."""


class ObstacleNotices:
    """Prints what delays the end of a task or run, each obstacle once, if the wait takes longer than a few seconds."""

    def __init__(self, obstacles: Callable[[], list[str]], say: Callable[[str], None] | None = None) -> None:
        self._obstacles = obstacles
        self._say = say or (lambda text: echo(text, colour="yellow", err=True))
        self._ask_at = time.monotonic() + _INTERVAL
        self._printed: set[str] = set()

    def check(self) -> None:
        """Query the obstacles if the interval has passed, and print the new ones."""
        if time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + _INTERVAL
        try:
            obstacles = self._obstacles()
        except Unavailable:
            return  # the wait itself reports the outage
        for obstacle in obstacles:
            if obstacle not in self._printed:
                self._printed.add(obstacle)
                self._say(f"! {obstacle}")


def wait_with_notices(wait: Callable[[float], T], obstacles: Callable[[], list[str]]) -> T:
    """Wait for a result, printing meanwhile what delays it."""
    notices = ObstacleNotices(obstacles)
    while True:
        try:
            return wait(_INTERVAL)
        except ResultTimeout:
            notices.check()
