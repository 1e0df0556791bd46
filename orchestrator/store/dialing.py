"""Connections for calls that cannot wait until the driver gives up.

While the driver connects to a server that hangs, nothing ends it but its own limit, which is the same for all and
counts in whole seconds. So where the call has a limit (`time_limits.py`), a thread connects, and the caller waits no
longer than it can. The next caller that needs a connection takes over an attempt that was left behind, so there are
never more attempts than there were callers at a time.
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

_LONGEST = 3_600.0
"""Seconds; the driver's own limit is much less."""

Attempt = Future[Any]
"""A connection of the driver's, or why there is none."""


class Dialing:
    """Connects for one engine."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in between
        self._left: deque[Attempt] = deque()
        """Attempts that nothing waits for. At most one of them has come to a connection."""
        self._is_closed = False

    def connect(self, dialect: Dialect, dial: Callable[[], Any]) -> Any | None:
        """Return a connection; None if there is no deadline, and the driver may take its time."""
        attempt = self._take()
        if attempt is None and time_limits.give_up_at() is None:
            return None
        attempt = attempt or self._begin(dial)
        wait([attempt], time_limits.left(_LONGEST))
        if attempt.done():
            return attempt.result()
        self._leave(attempt)
        raise dialect.loaded_dbapi.OperationalError("no answer within the timeout of the call")

    def close(self) -> None:
        """Close unused connections, now or when they come."""
        self._is_closed = True
        for attempt in list(self._left):
            if attempt.done():
                self._ended(attempt)

    def _take(self) -> Attempt | None:
        """Return an attempt that was left behind, and may still come to something."""
        while True:
            with self._lock:
                if not self._left:
                    return None
                attempt = self._left.popleft()
            if not attempt.done() or attempt.exception() is None:
                return attempt

    def _begin(self, dial: Callable[[], Any]) -> Attempt:
        attempt: Attempt = Future()

        def run() -> None:
            try:
                attempt.set_result(dial())
            except BaseException as error:  # noqa: BLE001  # it is raised where it was asked for
                attempt.set_exception(error)

        threading.Thread(target=run, name="orchestrator-connecting", daemon=True).start()
        return attempt

    def _leave(self, attempt: Attempt) -> None:
        with self._lock:
            self._left.append(attempt)
        attempt.add_done_callback(self._ended)

    def _ended(self, attempt: Attempt) -> None:
        """Keep a connection that nobody waits for any more for the next caller."""
        with self._lock:
            if attempt not in self._left:
                return  # another call waits for it
            others = (other for other in self._left if other is not attempt and other.done())
            if attempt.exception() is None and not self._is_closed and not any(others):
                return
            self._left.remove(attempt)
        _hang_up(attempt)


def use_dialing(engine: Engine) -> None:
    """Let calls wait for a connection of an engine no longer than their deadlines."""
    dialing = Dialing()

    def connect(dialect: Dialect, record: object, args: Any, options: Any) -> Any | None:
        del record
        return dialing.connect(dialect, lambda: dialect.connect(*args, **options))

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "engine_disposed", lambda _: dialing.close())


def _hang_up(attempt: Attempt) -> None:
    with contextlib.suppress(Exception):  # it has failed, or is closed already
        attempt.result().close()


_HOST = re.compile(r"(?P<host>\[[^\]]*\]|[^:,]*)(?::(?P<port>\d*))?")


def several_hosts(url: str) -> tuple[str, dict[str, str]]:
    """Take several hosts, as libpq writes them (`host1:5432,host2:5432`), out of a URL: the driver wants them apart."""
    scheme, separator, rest = url.partition("://")
    authority = re.split("[/?]", rest, maxsplit=1)[0]
    user, at, places = authority.rpartition("@")
    if "," not in places:
        return url, {}
    found = [_HOST.fullmatch(place) for place in places.split(",")]
    if not all(found):
        raise ValueError(f"{places!r} are no hosts with ports")
    hosts = {
        "host": ",".join(unquote(match["host"]).strip("[]") for match in found if match),
        "port": ",".join(match["port"] or "" for match in found if match),
    }
    return f"{scheme}{separator}{user}{at}{rest[len(authority) :]}", hosts


# -- errors of Postgres without the contents of rows: arguments and results have no place in a log

_OF_THE_SERVER = frozenset({"08", "25", "28", "40", "53", "55", "57", "58"})
"""Classes of SQLSTATEs that are about connections, transactions, locks and the server, and never about a row."""


def code_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error, in the words of either driver; empty where Postgres has said none."""
    cause = getattr(error, "orig", None)
    return getattr(cause, "pgcode", None) or getattr(cause, "sqlstate", None) or ""


def hide_rows(error: exc.DBAPIError) -> None:
    """Take from an error, and from the driver's below it, all that Postgres adds to its message but the hint.

    The message names the table and the constraint. Behind it come the row that failed (`DETAIL`), the values of the
    statement around the place that is at fault (`LINE 1`), and the line of a file (`CONTEXT`). A traceback shows both
    errors, and so both are changed; what the driver knows besides (`diag`) stays.
    """
    code, cause = code_of(error), error.orig
    primary = getattr(getattr(cause, "diag", None), "message_primary", None)
    if cause is None or not code or not primary or code[:2] in _OF_THE_SERVER:
        return
    hint = cause.diag.message_hint  # type: ignore[attr-defined]  # only errors of a driver have one
    kept = f"{primary}\nHINT:  {hint}" if hint else primary
    error.args = tuple(part.replace(str(cause), kept) for part in error.args)
    cause.args = (kept,)
