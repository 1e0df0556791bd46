"""Values as Postgres reads them: lists as array literals, which are one string whatever their length."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any


def _uuids(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join("NULL" if value is None else value.hex() for value in values) + "}"


def _numbers(values: Iterable[float | int | bool | None]) -> str:
    return "{" + ",".join("NULL" if value is None else str(value) for value in values) + "}"


def _blobs(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join("NULL" if value is None else f'"\\\\x{value.hex()}"' for value in values) + "}"


def array_of(values: Iterable[str | None]) -> str:
    """Return an array of texts as Postgres reads it."""
    return "{" + ",".join("NULL" if value is None else _quoted(value) for value in values) + "}"


def _quoted(word: str) -> str:
    if "\\" in word or '"' in word:
        word = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{word}"'


def _times(values: Iterable[datetime | str | None]) -> str:
    written: dict[datetime | str | None, str] = {None: "NULL"}  # many rows of a batch have the same time
    return "{" + ",".join(written.get(value) or written.setdefault(value, f'"{value}"') for value in values) + "}"


def _uuid(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.hex()


ENCODERS: dict[str, Callable[[Any], str]] = {
    "::uuid": _uuid,
    "::uuid[]": _uuids,
    "::bytea[]": _blobs,
    "::text[]": array_of,
    "::jsonb[]": array_of,
    "::tid[]": array_of,
    "::timestamptz[]": _times,
    **{f"::{kind}[]": _numbers for kind in ("smallint", "int", "integer", "bigint", "boolean", "double precision")},
}
"""By cast, how a value is written."""
