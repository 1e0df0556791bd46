"""Postgres errors: which of them are outages that pass, and what to do about them."""

from __future__ import annotations

import re

from sqlalchemy import exc

from orchestrator.settings import DEFAULT_NAMESPACE
from orchestrator.store.dialing import code_of
from orchestrator.terminal_safe import sentence

UNAVAILABLE = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError)
"""Errors that may pass: an outage of Postgres, or a lock or statement timeout. Wait and try again."""

_FORBIDDEN = "42501"
_READ_ONLY = "25006"
_UNUSABLE = frozenset({_READ_ONLY, "26000", "42P05"})
"""SQLSTATEs after which a connection is closed: it is read-only, or has another client's prepared statements."""
_REFUSED_TO_ALL = _UNUSABLE | {"25P03", "25P04", _FORBIDDEN}
"""SQLSTATEs of outages that the driver does not call outages. The statement is not at fault: Postgres is read-only or
has ended a transaction that took too long, a pooler has mixed up prepared statements, or the role lacks a privilege."""
_MISSING = frozenset({"42P01", "3F000", "42P10"})
"""SQLSTATEs of a missing table, schema or unique index: a dump restores rows before indexes."""
_LIMIT_EXCEEDED = "54"
_QUERY_CANCELLED = "57014"
_MISTAKE = re.compile(
    r"authentication failed|no password supplied|(?:role|database) \".*\" does not exist|no pg_hba\.conf entry"
    r"|is not permitted to log in|permission denied|does not support SSL|certificate verify failed"
)
"""Messages about a wrong user, password, privilege, database or certificate. A failed connection attempt has no
SQLSTATE; in languages other than English such an error counts as an outage."""
_ADVICE = (
    ("No space left on device", "The disk of Postgres is full: free some space. Stored data is not lost."),
    ("no unique or exclusion constraint", "Its indexes are missing: wait until the dump is restored."),
    ('relation "', "The tables are missing: wait until the dump is restored, or run `orchestrator db upgrade`."),
    ("authentication failed", "Check the user and the password in the setting database_url."),
    ("no password supplied", "Put the password into the setting database_url, or into ~/.pgpass."),
    ("does not exist", "Create it, or check the setting database_url."),
    ("no pg_hba.conf entry", "Allow this user from this machine (pg_hba.conf), or check the setting database_url."),
    ("too many clients|remaining connection slots", "Close some of them, or raise max_connections."),
    ("too many connections for", "Close some of them, or raise the limit of the role or the database."),
    ("QueuePool limit", "This process uses all connections that it may open: make fewer calls at the same time."),
    (
        "prepared statement",
        "There is a pooler in transaction mode in between: connect schedulers to Postgres directly.",
    ),
    ("read-only", "Postgres is read-only: a standby, or an administrator's setting. Check the setting database_url."),
    (
        "no answer within",
        "Postgres hangs, is overloaded, or a transaction holds a lock: `orchestrator status` shows which.",
    ),
    (
        "(lock|statement) timeout",
        "The database is busy, or a transaction holds a lock: `orchestrator status` shows which.",
    ),
)
"""Patterns of error messages, each with advice."""


def as_outage(error: exc.DBAPIError, *, is_broken: bool) -> exc.OperationalError | None:
    """Return an outage as an `OperationalError` if the driver raises another class, as after a crash.

    A read-only connection stays read-only although another server may be primary now, so it is not used again.
    """
    if isinstance(error, UNAVAILABLE) or not (is_broken or code_of(error) in _REFUSED_TO_ALL):
        return None
    is_broken = is_broken or code_of(error) in _UNUSABLE
    return exc.OperationalError(
        error.statement, error.params, error.orig or error, hide_parameters=True, connection_invalidated=is_broken
    )


def error_line(error: BaseException) -> str:
    """Return an error's message in one line; for Postgres errors, without the statement and SQLAlchemy's link."""
    return str(getattr(error, "orig", None) or error).strip().split("\n", 1)[0]


def explain(error: BaseException, namespace: str = DEFAULT_NAMESPACE) -> str:
    """Return the problem with Postgres and advice, in one line."""
    message = " ".join(str(getattr(error, "orig", None) or error).split())
    advice = next(
        (advice for known, advice in _ADVICE if re.search(known, message)), "Check that it runs and can be reached."
    )
    if is_forbidden(error):
        advice = (
            f"Grant that to the role of the setting database_url, or let the role own the schema {namespace!r} and "
            f"its tables."
        )
    return f"{sentence(message)} {advice}"


def is_broken_off(error: BaseException) -> bool:
    """Return whether a connection ended without a message from Postgres: the statement may or may not have run."""
    lost = isinstance(error, exc.DBAPIError) and error.connection_invalidated
    return lost and not code_of(error)


def is_outage(error: BaseException) -> bool:
    """Return whether waiting helps. A value too large for an index is no outage, although drivers say so."""
    code = code_of(error)
    return code in _REFUSED_TO_ALL or (isinstance(error, UNAVAILABLE) and not code.startswith(_LIMIT_EXCEEDED))


def is_exhausted(error: BaseException) -> bool:
    """Return whether Postgres or the pool of this process has no connection left."""
    exhausted = r"too many (clients|connections for)|remaining connection slots|QueuePool limit"
    return re.search(exhausted, error_line(error.__cause__ or error)) is not None


def is_forbidden(error: BaseException) -> bool:
    """Return whether the role lacks a privilege."""
    return code_of(error) == _FORBIDDEN


def is_being_restored(error: BaseException) -> bool:
    """Return whether a table, an index or the schema is missing, as while a dump is restored."""
    return code_of(error) in _MISSING


def is_timeout(error: BaseException) -> bool:
    """Return whether Postgres ended a statement because of a timeout."""
    return code_of(error) == _QUERY_CANCELLED


def is_out_of_time(error: BaseException) -> bool:
    """Return whether Postgres ended a statement, a transaction or a session because of a timeout."""
    return is_timeout(error) or re.search(r"due to [a-z -]*timeout", error_line(error.__cause__ or error)) is not None


def outage_of(error: Exception) -> str | None:
    """Return the message of an outage; None if someone must correct a setting or the schema first."""
    return explain(error) if is_outage(error) and not _MISTAKE.search(str(error)) else None
