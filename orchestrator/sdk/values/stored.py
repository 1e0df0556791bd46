"""A value that a task may open rather than be given: it stands in the payload store, or is small and here."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Any, get_args, get_origin

from orchestrator.errors import PayloadError
from orchestrator.payloads.keeping import open_bytes, read_encoded
from orchestrator.references import BYTES, Reference

Decode = Callable[[bytes], Any]


class Payload:
    """A value that was not read yet. Annotate a parameter with it to get large data unread.

    Callers of such a task pass the value itself, or `Payload(value)`, which type checkers prefer.
    """

    __slots__ = ("_decode", "_reference", "_value")

    def __init__(self, value: Any = None, *, reference: Reference | None = None, decode: Decode | None = None) -> None:
        self._value = value
        self._reference = reference
        self._decode = decode

    def __repr__(self) -> str:
        return f"<Payload {'here' if self._reference is None else self._reference}>"

    @property
    def is_here(self) -> bool:
        """Say whether the value is in this program, and not in the store."""
        return self._reference is None

    @property
    def size(self) -> int:
        """How many bytes it has."""
        if self._reference is not None:
            return self._reference.size
        return len(self._value) if isinstance(self._value, (bytes, str)) else 0

    def open(self) -> IO[bytes]:
        """Return its bytes as a file, of which about a megabyte is in memory at a time."""
        if self._reference is not None and self._reference.form == BYTES and self._reference.item is None:
            return open_bytes(self._reference)
        value = self.load()
        if not isinstance(value, (bytes, bytearray)):
            raise PayloadError(
                f"A payload can be opened as a file if it is bytes, such as ctx.open_output() writes, found a value of "
                f"type {type(value).__name__}. Call load(), or leave the annotation Payload out."
            )
        return io.BytesIO(value)

    def load(self) -> Any:
        """Return the whole value."""
        if self._reference is None or self._decode is None:
            return self._value
        return self._decode(read_encoded(self._reference))


def is_payload(kind: Any) -> bool:
    """Say whether an annotation asks for a value that is not read: plainly, or as one that may be None."""
    return kind is Payload or (get_origin(kind) is not None and Payload in get_args(kind))


def loaded(value: Any) -> Any:
    """Return a value in which everything has been read."""
    if isinstance(value, Payload):
        return value.load()
    if isinstance(value, list):
        return [loaded(item) for item in value]
    if isinstance(value, dict):
        return {key: loaded(item) for key, item in value.items()}
    return value
