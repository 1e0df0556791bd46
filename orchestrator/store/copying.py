"""COPY: rows are made while Postgres stores those before them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from sqlalchemy import Connection

from orchestrator.store.deadlines import limited
from orchestrator.store.driver import as_known, flush
from orchestrator.store.namespaces import in_namespace, namespace_of

_LASTS = 1.0
"""Seconds after which a COPY ends and another begins: what is wrong with its rows is known then."""
_BLOCK = 65_536
"""Characters that the driver asks for; it takes more."""


def copy(connection: Connection, sql: str, texts: Iterable[str]) -> None:
    """Write rows, given as parts of a file, in the transaction that is open (needs psycopg2).

    An empty text ends the COPY that is open, so that the connection can be used to make the next one.
    """
    flush(connection)
    lent = connection.connection
    cursor: Any = lent.cursor()
    statement = in_namespace(sql, namespace_of(connection))
    file = _File(texts)
    while file.has_more():
        try:
            with limited(connection, sql) as file.limit:
                cursor.copy_expert(statement, file, _BLOCK)
        except connection.dialect.loaded_dbapi.Error as error:
            raise as_known(error, connection, connection.dialect, lent.dbapi_connection, sql) from error


def copied(value: object) -> str:
    """Return a value as it stands in a file of rows."""
    if value is None:
        return "\\N"
    return str(value).replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


class _File:
    """Texts as a file, which the driver reads while a COPY is open."""

    limit: limited
    """That of the COPY."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)
        self._first: str = ""
        """The text that a COPY begins with, made before it was open."""
        self._ends_at = 0.0
        self._error: BaseException | None = None
        """What was raised by the making of a text. The driver would replace it by an error of its own."""
        reading = self._reading()
        next(reading)
        self.read: Callable[[int], str] = reading.send
        """Return the next text, or an empty one to end the COPY."""

    def has_more(self) -> bool:
        """Say whether another COPY is to begin, while none is open."""
        if self._error is not None:
            raise self._error
        self._first = next(filter(None, self._texts), "")
        self._ends_at = time.monotonic() + _LASTS
        return bool(self._first)

    def _reading(self) -> Generator[str, int, None]:
        """Yield the answers to `read`. An interrupt comes as soon as Python goes on, and that is at the `yield`."""
        text: str | None = ""
        while True:
            try:
                yield text or ""
                text = None
                text = self._next()
            except BaseException as error:  # noqa: BLE001  # raised when no COPY is open
                if text is not None and isinstance(error, GeneratorExit):
                    return  # nobody reads any more
                self._error, text = error, ""

    def _next(self) -> str:
        if self._error is not None:
            return ""
        if self._first:
            text, self._first = self._first, ""
            return text
        if time.monotonic() > self._ends_at:
            return ""
        with self.limit.pause():  # Postgres waits for us
            return next(self._texts, "")
