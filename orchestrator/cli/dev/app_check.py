"""Whether an application can be loaded, and what of it will not work here: said before anything starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from orchestrator.cli.terminal.reading import reading
from orchestrator.errors import ConfigurationError, OrchestratorError
from orchestrator.monitoring import trouble
from orchestrator.sdk.modules import ImportFailed
from orchestrator.settings import Settings
from orchestrator.store import insights
from orchestrator.store.limits import queues
from orchestrator.workers.functions import load_app


def what_is_wrong(where: str, *, mendable: bool) -> str | None:
    """Load an application in a process of its own, and return why that cannot be done; None if it can.

    Nothing of it stays here, and its output is left to the processes that load it next. With `mendable`, a module that
    raises is left to them, too: a change of a file may help.
    """
    reads, writes = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reads)
            _be_quiet()
            os.write(writes, _refusal(where, mendable).encode(errors="replace")[:60_000])  # a pipe holds 64 kB
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8", errors="replace") as answer:
        said = answer.read()
    os.waitpid(process, 0)
    return said or None


def _be_quiet() -> None:
    """Print nowhere, and end where the user wants an end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)


def _refusal(where: str, mendable: bool) -> str:
    with suppress(Exception, SystemExit):  # the processes that load it next report all other errors
        try:
            load_app(where)
        except ConfigurationError as error:
            return "" if mendable and isinstance(error, ImportFailed) else str(error)
    return ""


_INTERVAL = 2.0
"""Seconds between two looks; a problem that is seen twice is logged."""
_TIME_TO_LEAD = 30.0
"""Seconds that the scheduler may take to start before it is said that none leads."""
_REST = 20
"""The time that a look takes is followed by so many times as much without one."""
_TOLD = frozenset(
    {"no leader", "leader in trouble", "no worker", "no database", "no data key", "no executor", "unknown task"}
)


class WarningWatch:
    """Looks into the database every few seconds."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._next = time.monotonic() + _INTERVAL
        self._led_by = time.monotonic() + _TIME_TO_LEAD
        self._seen: dict[tuple[str, str], str] = {}
        self._told: set[tuple[str, str]] = set()
        self._without_worker: set[str] = set()
        self.unserved: set[str] = set()
        """Queues that applied workflows name and no live worker has served in the last two looks."""

    def new_warnings(self) -> Iterator[str]:
        """Yield what is newly in the way, if it is time to look."""
        now = time.monotonic()
        if now < self._next:
            return
        try:
            with reading(self._settings) as connection:
                found = self._find_warnings(connection)
        except (OrchestratorError, SQLAlchemyError):
            return  # which the scheduler says itself
        finally:
            taken = time.monotonic() - now
            self._next = now + max(_INTERVAL, _REST * taken)
        lasting = found.keys() & self._seen.keys()
        yield from (found[key] for key in sorted(lasting - self._told))
        self._seen, self._told = found, lasting

    def _find_warnings(self, connection: Connection) -> dict[tuple[str, str], str]:
        live = (worker for worker in insights.list_workers(connection) if worker.state == "live")
        without = queues.of_workflows(connection) - {queue for worker in live for queue in worker.queues}
        self.unserved = without & self._without_worker
        self._without_worker = without
        overview = insights.overview(connection)
        if overview.leader is not None:
            self._led_by = 0.0
        told = _TOLD if time.monotonic() > self._led_by else _TOLD - {"no leader"}
        found = trouble.of_the_system(overview, self._settings.lease)
        return {(one.kind, one.about): one.message for one in found if one.kind in told}


def is_ready(settings: Settings, *, workers: int) -> bool:
    """Say whether a scheduler leads and at least so many worker processes are live."""
    try:
        with reading(settings) as connection:
            overview = insights.overview(connection)
    except (OrchestratorError, SQLAlchemyError):
        return False  # the scheduler says itself what is wrong
    return overview.leader is not None and overview.workers >= workers
