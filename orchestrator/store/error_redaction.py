"""Errors of Postgres without the contents of rows: arguments and results have no place in a log."""

from __future__ import annotations

from sqlalchemy import exc

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
