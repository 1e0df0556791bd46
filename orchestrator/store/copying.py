"""COPY: Postgres stores rows while the next rows are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from sqlalchemy import Connection

from orchestrator.store.deadlines import limited
from orchestrator.store.driver import flush, translate_error
from orchestrator.store.namespaces import in_namespace, namespace_of

_MAX_DURATION = 1.0
"""Seconds after which one COPY ends and the next begins. An error in a row surfaces when its COPY ends."""
_READ_SIZE = 65_536
"""Characters per read; the driver accepts more."""


def copy(connection: Connection, sql: str, texts: Iterable[str]) -> None:
    """Copy rows in the open transaction (needs psycopg2); `texts` are consecutive parts of a file.

    An empty text ends the open COPY, so that the connection can be used to make the next text.
    """
    flush(connection)
    pooled = connection.connection
    cursor: Any = pooled.cursor()
    statement = in_namespace(sql, namespace_of(connection))
    file = _File(texts)
    while file.has_more():
        try:
            with limited(connection, sql) as file.limit:
                cursor.copy_expert(statement, file, _READ_SIZE)
        except connection.dialect.loaded_dbapi.Error as error:
            raise translate_error(error, connection, connection.dialect, pooled.dbapi_connection, sql) from error


def encode_field(value: object) -> str:
    """Return a value in COPY's text format."""
    if value is None:
        return "\\N"
    return str(value).replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


class _File:
    """A file of texts that the driver reads during a COPY."""

    limit: limited
    """The deadline of the current COPY."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)
        self._first: str = ""
        """The first text of the next COPY, made before that COPY begins."""
        self._ends_at = 0.0
        self._error: BaseException | None = None
        """The error of making a text, kept because the driver would replace it with its own error."""
        reading = self._reading()
        next(reading)
        self.read: Callable[[int], str] = reading.send
        """Return the next text, or an empty one to end the COPY."""

    def has_more(self) -> bool:
        """Return whether there is text for another COPY; call it while no COPY is open."""
        if self._error is not None:
            raise self._error
        self._first = next(filter(None, self._texts), "")
        self._ends_at = time.monotonic() + _MAX_DURATION
        return bool(self._first)

    def _reading(self) -> Generator[str, int, None]:
        """Yield the answers to `read`. Python raises interrupts at the `yield`."""
        text: str | None = ""
        while True:
            try:
                yield text or ""
                text = None
                text = self._next()
            except BaseException as error:  # noqa: BLE001  # raised when no COPY is open
                if text is not None and isinstance(error, GeneratorExit):
                    return  # the reader is gone
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
