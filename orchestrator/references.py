"""References: they replace large values that are stored outside Postgres.

A reference is a MessagePack extension, like a sealed value. So it can take the place of any value, and the scheduler
can copy it without reading the payload. It contains no secrets: the location, the size, and the hash of the payload's
directory, with which a reader detects changes.

The name of an object consists only of the numbers in the reference, and never of text that somebody else wrote.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.msgpack import Ext

CODE = 3
"""The code of the MessagePack extension."""
MARK = b"\x93payload"
"""The first bytes of the data of each reference. Data without them contains no references."""
MIN_SIZE = 100
"""The minimum size of data with a reference, in bytes."""
_SIZES = {b"\xc7": 3, b"\xc8": 4, b"\xc9": 6}

ARGUMENTS, RESULT = "c", "r"
"""The content: arguments of a call, or the result of an attempt."""
WHOLE, ITEMS, BYTES = "v", "l", "b"
"""The format: a single value, a list whose items can be read separately, or bytes."""


class Reference(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The location and the expected content of a stored payload."""

    owner: bytes
    """The run, or the task if it has no run, with which the payload is deleted."""
    task: bytes
    attempt: int
    """The attempt that wrote it. 0 for arguments."""
    what: Literal["c", "r"]
    key: bytes
    """Sixteen random bytes, so that nobody can guess the name of an object."""
    size: int
    """The size of the value in bytes."""
    directory: int
    """The offset of the directory."""
    length: int
    """The size of the directory in bytes."""
    digest: bytes
    """The SHA-256 of the directory, which contains the hashes of all chunks."""
    form: Literal["v", "l", "b"] = "v"
    count: int = 0
    """The number of items of a list."""
    item: int | None = None
    """The index of a list item, if the reference is for a single item."""

    @property
    def name(self) -> ObjectName:
        """The name of the object."""
        return ObjectName(self.owner, self.task, self.attempt, self.what, self.key)

    def at(self, item: int) -> Reference:
        """Return a reference to one item of the list."""
        return msgspec.structs.replace(self, item=item)

    def extension(self) -> Ext:
        """Return the reference as part of a value."""
        return Ext(CODE, MARK + _encode(self))

    def encoded(self) -> bytes:
        """Return the reference as encoded data."""
        return _encode(self.extension())

    def __str__(self) -> str:
        which = "" if self.item is None else f"item {self.item:,} of "
        return f"({which}{self.size:,} bytes in the payload store)"


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reference).decode


class ObjectName(NamedTuple):
    """The name of an object in any store. Objects of one owner share a folder."""

    owner: bytes
    task: bytes
    attempt: int
    what: str
    key: bytes

    @property
    def shard(self) -> str:
        """The part of the store, one of 256 that are listed separately."""
        return self.owner[-1:].hex()

    @property
    def path(self) -> str:
        """The path within the store, separated by slashes."""
        return f"{self.shard}/{self.owner.hex()}/{self.task.hex()}.{self.attempt}.{self.what}.{self.key.hex()}"

    @classmethod
    def parse(cls, path: str) -> ObjectName | None:
        """Return the name of the object with this path, or None if the path is not one of ours."""
        match = _PATH.fullmatch(path)
        if match is None:
            return None
        owner, task, attempt, what, key = match.groups()
        name = cls(bytes.fromhex(owner), bytes.fromhex(task), int(attempt), what, bytes.fromhex(key))
        return name if name.path == path else None


_PATH = re.compile(r"[0-9a-f]{2}/([0-9a-f]{32})/([0-9a-f]{32})\.(\d{1,10})\.([cr])\.([0-9a-f]{32})")


def is_reference(data: bytes) -> bool:
    """Return whether encoded data is a reference as a whole."""
    head = _SIZES.get(data[:1])
    return head is not None and data[head - 1 : head + len(MARK)] == bytes([CODE]) + MARK


def whole_reference(data: bytes) -> Reference | None:
    """Return the reference if encoded data is one, else None."""
    return read_reference(data[_SIZES[data[:1]] :]) if is_reference(data) else None


def read_reference(data: bytes) -> Reference:
    """Decode a reference from the data of an extension."""
    if not data.startswith(MARK):
        raise ValueError("expected a reference to a stored payload")
    try:
        ref = _decode(data[len(MARK) :])
    except msgspec.MsgspecError as error:
        raise ValueError(f"a reference to a stored payload cannot be read: {error}") from error
    lengths = [len(part) for part in (ref.owner, ref.task, ref.key, ref.digest)]
    if lengths != [16, 16, 16, 32] or min(ref.attempt, ref.size, ref.directory, ref.length, ref.count) < 0:
        raise ValueError("a reference to a stored payload is damaged")
    return ref


def may_hold_references(data: bytes) -> bool:
    """Return whether unsealed encoded data may contain a reference."""
    return len(data) >= MIN_SIZE and MARK in data


def owners_in(data: bytes) -> set[bytes]:
    """Return the owners of all payloads that encoded data references."""
    owners: set[bytes] = set()
    offset = data.find(MARK) if len(data) >= MIN_SIZE else -1
    while offset >= 0:
        owner = data[offset + len(MARK) + 3 : offset + len(MARK) + 19]  # [owner, …]: the array, then bytes of 16
        if len(owner) == 16:
            owners.add(owner)
        offset = data.find(MARK, offset + 1)
    return owners


def as_reference(value: Any) -> Reference | None:
    """Return the reference that a decoded value is, or None."""
    return read_reference(bytes(value.data)) if isinstance(value, Ext) and value.code == CODE else None


class StoredItems(Sequence[Any]):
    """The items of a stored list, each as a reference."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def __len__(self) -> int:
        return self._reference.count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._reference.count:
            raise IndexError(index)
        return self._reference.at(index).extension()


def stored_items(value: Any) -> StoredItems | None:
    """Return the items of a stored list, or None for any other value."""
    ref = as_reference(value)
    return StoredItems(ref) if ref is not None and ref.form == ITEMS and ref.item is None else None
