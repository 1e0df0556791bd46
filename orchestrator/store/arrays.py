"""Batches as Postgres array literals: one string per column, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterable


def uuids(values: Iterable[bytes | None]) -> str:
    """Return ids of 16 bytes as a `uuid[]` literal."""
    return "{" + ",".join("NULL" if value is None else value.hex() for value in values) + "}"


def numbers(values: Iterable[float | int | bool | None]) -> str:
    """Return numbers or booleans as an array literal."""
    return "{" + ",".join("NULL" if value is None else str(value) for value in values) + "}"


def blobs(values: Iterable[bytes | None]) -> str:
    """Return byte strings as a `bytea[]` literal."""
    return "{" + ",".join("NULL" if value is None else f'"\\\\x{value.hex()}"' for value in values) + "}"


def words(values: Iterable[str | None]) -> str:
    """Return short texts (states, lanes, worker ids) as a `text[]` literal."""
    return "{" + ",".join("NULL" if value is None else _quoted(value) for value in values) + "}"


def _quoted(word: str) -> str:
    if "\\" in word or '"' in word:
        word = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{word}"'
