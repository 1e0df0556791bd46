"""Opens connections for calls with a deadline.

While the driver connects to a server that hangs, only the driver's own timeout ends that; it is the same for all calls
and counts whole seconds. So for a call with a deadline (`time_limits.py`), a thread connects and the caller waits until
the deadline. The next caller takes over an abandoned attempt, so there are never more attempts than concurrent callers.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any
from urllib.parse import unquote

from sqlalchemy import Dialect, Engine, event, exc

from orchestrator import time_limits

_MAX_WAIT = 3_600.0
"""Seconds; far above the driver's own timeout."""

Attempt = Future[Any]
"""A connection of the driver, or the error."""


class Dialing:
    """Opens connections for one engine."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may run while the lock is held
        self._abandoned: deque[Attempt] = deque()
        """Attempts for which no caller waits. At most one of them has a connection."""
        self._is_closed = False

    def connect(self, dialect: Dialect, dial: Callable[[], Any]) -> Any | None:
        """Return a connection; None if the call has no deadline, so SQLAlchemy may connect without a thread."""
        attempt = self._take_over()
        if attempt is None and time_limits.give_up_at() is None:
            return None
        attempt = attempt or self._begin(dial)
        wait([attempt], time_limits.remaining(_MAX_WAIT))
        if attempt.done():
            return attempt.result()
        self._abandon(attempt)
        raise dialect.loaded_dbapi.OperationalError("no answer within the timeout of the call")

    def close(self) -> None:
        """Close unused connections now, and those of pending attempts when they are established."""
        self._is_closed = True
        for attempt in list(self._abandoned):
            if attempt.done():
                self._settle_abandoned(attempt)

    def _take_over(self) -> Attempt | None:
        """Return an abandoned attempt that has not failed."""
        while True:
            with self._lock:
                if not self._abandoned:
                    return None
                attempt = self._abandoned.popleft()
            if not attempt.done() or attempt.exception() is None:
                return attempt

    def _begin(self, dial: Callable[[], Any]) -> Attempt:
        attempt: Attempt = Future()

        def run() -> None:
            try:
                attempt.set_result(dial())
            except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
                attempt.set_exception(error)

        threading.Thread(target=run, name="orchestrator-connecting", daemon=True).start()
        return attempt

    def _abandon(self, attempt: Attempt) -> None:
        with self._lock:
            self._abandoned.append(attempt)
        attempt.add_done_callback(self._settle_abandoned)

    def _settle_abandoned(self, attempt: Attempt) -> None:
        """Keep one connection of an abandoned attempt for the next caller; close others."""
        with self._lock:
            if attempt not in self._abandoned:
                return  # another call waits for this attempt
            connected = (other for other in self._abandoned if other is not attempt and other.done())
            if attempt.exception() is None and not self._is_closed and not any(connected):
                return
            self._abandoned.remove(attempt)
        _hang_up(attempt)


def use_dialing(engine: Engine) -> None:
    """Limit the wait for new connections of an engine to the deadline of the call."""
    dialing = Dialing()

    def connect(dialect: Dialect, record: object, args: Any, options: Any) -> Any | None:
        del record
        return dialing.connect(dialect, lambda: dialect.connect(*args, **options))

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "engine_disposed", lambda _: dialing.close())


def _hang_up(attempt: Attempt) -> None:
    with contextlib.suppress(Exception):  # the attempt failed, or the connection is closed already
        attempt.result().close()


_HOST = re.compile(r"(?P<host>\[[^\]]*\]|[^:,]*)(?::(?P<port>\d*))?")


def several_hosts(url: str) -> tuple[str, dict[str, str]]:
    """Split several hosts in libpq's notation (`host1:5432,host2:5432`) from a URL: they become driver options."""
    scheme, separator, rest = url.partition("://")
    authority = re.split("[/?]", rest, maxsplit=1)[0]
    user, at, addresses = authority.rpartition("@")
    if "," not in addresses:
        return url, {}
    matches = [_HOST.fullmatch(address) for address in addresses.split(",")]
    if not all(matches):
        raise ValueError(f"{addresses!r} are not hosts with ports")
    hosts = {
        "host": ",".join(unquote(match["host"]).strip("[]") for match in matches if match),
        "port": ",".join(match["port"] or "" for match in matches if match),
    }
    return f"{scheme}{separator}{user}{at}{rest[len(authority) :]}", hosts


# -- Postgres errors without the contents of rows: arguments and results must not appear in logs

_CLASSES_WITHOUT_ROWS = frozenset({"08", "25", "28", "40", "53", "55", "57", "58"})
"""Classes of SQLSTATEs about connections, transactions, locks and the server. These errors never contain a row."""


def code_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error from either driver; empty if there is none."""
    cause = getattr(error, "orig", None)
    return getattr(cause, "pgcode", None) or getattr(cause, "sqlstate", None) or ""


def hide_rows(error: exc.DBAPIError) -> None:
    """Remove row contents from an error and from the driver's error below it; the message and the hint stay.

    The message names the table and the constraint. Postgres appends the failed row (`DETAIL`), parts of the statement's
    values (`LINE 1`) and a line of a file (`CONTEXT`). A traceback shows both errors, so both are changed; the driver's
    other data (`diag`) stays.
    """
    code, cause = code_of(error), error.orig
    primary = getattr(getattr(cause, "diag", None), "message_primary", None)
    if cause is None or not code or not primary or code[:2] in _CLASSES_WITHOUT_ROWS:
        return
    hint = cause.diag.message_hint  # type: ignore[attr-defined]  # only errors of a driver have one
    kept = f"{primary}\nHINT:  {hint}" if hint else primary
    error.args = tuple(part.replace(str(cause), kept) for part in error.args)
    cause.args = (kept,)
