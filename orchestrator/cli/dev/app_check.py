"""Checks of `orchestrator dev`: whether the application loads, and warnings while it runs."""

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


def load_problem(app_path: str, *, retryable: bool) -> str | None:
    """Load an application in a forked process; return why it fails, or None.

    This process imports nothing, and the application's output is discarded: the processes that load it next print it
    again. With `retryable`, a module that raises is not reported: a file change may repair it.
    """
    read_end, write_end = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(read_end)
            _silence()
            os.write(write_end, _problem(app_path, retryable).encode(errors="replace")[:60_000])  # a pipe holds 64 kB
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8", errors="replace") as answer:
        problem = answer.read()
    os.waitpid(process, 0)
    return problem or None


def _silence() -> None:
    """Discard all output, and restore the default signal handlers so that Ctrl-C ends the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)


def _problem(app_path: str, retryable: bool) -> str:
    with suppress(Exception, SystemExit):  # the processes that load the application next report all other errors
        try:
            load_app(app_path)
        except ConfigurationError as error:
            return "" if retryable and isinstance(error, ImportFailed) else str(error)
    return ""


_INTERVAL = 2.0
"""Seconds between two checks; a problem that two checks in a row find is logged."""
_LEADER_GRACE = 30.0
"""Seconds that the scheduler may take to start before "no leader" is reported."""
_PAUSE_FACTOR = 20
"""The least pause after a check, as a multiple of the check's duration."""
_REPORTED = frozenset(
    {"no leader", "leader in trouble", "no worker", "no database", "no data key", "no executor", "unknown task"}
)


class WarningWatch:
    """Finds problems in the database every few seconds."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._next = time.monotonic() + _INTERVAL
        self._leader_deadline = time.monotonic() + _LEADER_GRACE
        self._seen: dict[tuple[str, str], str] = {}
        self._reported: set[tuple[str, str]] = set()
        self._unserved_before: set[str] = set()
        self.unserved: set[str] = set()
        """Queues that applied workflows name and that no live worker served during the last two checks."""

    def new_warnings(self) -> Iterator[str]:
        """Yield the warnings that are new, if it is time for a check."""
        now = time.monotonic()
        if now < self._next:
            return
        try:
            with reading(self._settings) as connection:
                warnings = self._find_warnings(connection)
        except (OrchestratorError, SQLAlchemyError):
            return  # the scheduler reports these errors itself
        finally:
            elapsed = time.monotonic() - now
            self._next = now + max(_INTERVAL, _PAUSE_FACTOR * elapsed)
        lasting = warnings.keys() & self._seen.keys()
        yield from (warnings[key] for key in sorted(lasting - self._reported))
        self._seen, self._reported = warnings, lasting

    def _find_warnings(self, connection: Connection) -> dict[tuple[str, str], str]:
        live = (worker for worker in insights.list_workers(connection) if worker.state == "live")
        unserved = queues.of_workflows(connection) - {queue for worker in live for queue in worker.queues}
        self.unserved = unserved & self._unserved_before
        self._unserved_before = unserved
        overview = insights.overview(connection)
        if overview.leader is not None:
            self._leader_deadline = 0.0
        reported = _REPORTED if time.monotonic() > self._leader_deadline else _REPORTED - {"no leader"}
        problems = trouble.of_the_system(overview, self._settings.lease)
        return {(problem.kind, problem.about): problem.message for problem in problems if problem.kind in reported}


def is_ready(settings: Settings, *, workers: int) -> bool:
    """Return whether a scheduler leads and at least `workers` worker processes are live."""
    try:
        with reading(settings) as connection:
            overview = insights.overview(connection)
    except (OrchestratorError, SQLAlchemyError):
        return False  # the scheduler reports the error itself
    return overview.leader is not None and overview.workers >= workers
