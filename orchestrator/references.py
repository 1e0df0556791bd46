"""References to payloads that are stored outside Postgres: what travels in place of a large value.

A reference is an extension of MessagePack, as a sealed value is, so it stands wherever a value stands, and the
scheduler copies it into others without reading the payload. It holds nothing secret: where the payload is, how large,
and the hash of its directory, by which a reader sees that nothing was altered.

The name of an object is made of the numbers here, and of nothing else that anyone could have written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.msgpack import Ext

CODE = 3
"""Of the extension."""
MARK = b"\x93payload"
"""With which the data of each begins; where it does not stand, there is no reference."""
SHORTEST = 100
"""Bytes; what is shorter holds none."""
_SIZES = {b"\xc7": 3, b"\xc8": 4, b"\xc9": 6}

ARGUMENTS, RESULT = "c", "r"
"""What it is of its task: the arguments of the call, or what an attempt of it came to."""
WHOLE, ITEMS, BYTES = "v", "l", "b"
"""How it is written: one value, a list whose items can be read one by one, or bytes."""


class Reference(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where a stored payload is, and what it must be."""

    owner: bytes
    """The run, or the task without a run, with which it goes."""
    task: bytes
    attempt: int
    """Which has written it; 0 for arguments."""
    what: Literal["c", "r"]
    key: bytes
    """Sixteen random bytes: nobody can guess the name of an object."""
    size: int
    """Bytes of the value."""
    directory: int
    """Where the directory begins."""
    length: int
    """Bytes of the directory."""
    digest: bytes
    """SHA-256 of the directory, which has those of all chunks."""
    form: Literal["v", "l", "b"] = "v"
    count: int = 0
    """Items of a list."""
    item: int | None = None
    """One item of it, which this is about."""

    @property
    def name(self) -> ObjectName:
        """What the object is called."""
        return ObjectName(self.owner, self.task, self.attempt, self.what, self.key)

    def at(self, item: int) -> Reference:
        """Return a reference to one item of a list."""
        return msgspec.structs.replace(self, item=item)

    def extension(self) -> Ext:
        """Return it as a part of a value."""
        return Ext(CODE, MARK + _encode(self))

    def encoded(self) -> bytes:
        """Return it as encoded data."""
        return _encode(self.extension())

    def __str__(self) -> str:
        which = "" if self.item is None else f"item {self.item:,} of "
        return f"({which}{self.size:,} bytes in the payload store)"


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reference).decode


class ObjectName(NamedTuple):
    """What an object is called in any store: its folder is that of its owner."""

    owner: bytes
    task: bytes
    attempt: int
    what: str
    key: bytes

    @property
    def shard(self) -> str:
        """One of 256 parts of a store, which are listed one after the other."""
        return self.owner[-1:].hex()

    @property
    def path(self) -> str:
        """Where it is below the store, with / between."""
        return f"{self.shard}/{self.owner.hex()}/{self.task.hex()}.{self.attempt}.{self.what}.{self.key.hex()}"

    @classmethod
    def parse(cls, path: str) -> ObjectName | None:
        """Return what an object of that path is called; None if it is none of ours."""
        found = _PATH.fullmatch(path)
        if found is None:
            return None
        owner, task, attempt, what, key = found.groups()
        name = cls(bytes.fromhex(owner), bytes.fromhex(task), int(attempt), what, bytes.fromhex(key))
        return name if name.path == path else None


_PATH = re.compile(r"[0-9a-f]{2}/([0-9a-f]{32})/([0-9a-f]{32})\.(\d{1,10})\.([cr])\.([0-9a-f]{32})")


def is_reference(data: bytes) -> bool:
    """Say whether encoded data is one reference as a whole."""
    head = _SIZES.get(data[:1])
    return head is not None and data[head - 1 : head + len(MARK)] == bytes([CODE]) + MARK


def whole_reference(data: bytes) -> Reference | None:
    """Return the reference that encoded data is; None if it is something else."""
    return read_reference(data[_SIZES[data[:1]] :]) if is_reference(data) else None


def read_reference(data: bytes) -> Reference:
    """Return the reference that the data of an extension is."""
    if not data.startswith(MARK):
        raise ValueError("a reference to a stored payload was expected")
    try:
        found = _decode(data[len(MARK) :])
    except msgspec.MsgspecError as error:
        raise ValueError(f"a reference to a stored payload cannot be read: {error}") from error
    lengths = [len(part) for part in (found.owner, found.task, found.key, found.digest)]
    if lengths != [16, 16, 16, 32] or min(found.attempt, found.size, found.directory, found.length, found.count) < 0:
        raise ValueError("a reference to a stored payload is damaged")
    return found


def may_hold_references(data: bytes) -> bool:
    """Say whether there may be a reference in encoded data that is not sealed."""
    return len(data) >= SHORTEST and MARK in data


def owners_in(data: bytes) -> set[bytes]:
    """Return the owners of the stored payloads that encoded data names."""
    found: set[bytes] = set()
    place = data.find(MARK) if len(data) >= SHORTEST else -1
    while place >= 0:
        owner = data[place + len(MARK) + 3 : place + len(MARK) + 19]  # [owner, …]: the array, then bytes of 16
        if len(owner) == 16:
            found.add(owner)
        place = data.find(MARK, place + 1)
    return found


def as_reference(value: Any) -> Reference | None:
    """Return the reference that a decoded value is, where its decoder reads none."""
    return read_reference(bytes(value.data)) if isinstance(value, Ext) and value.code == CODE else None


class StoredItems(Sequence[Any]):
    """The items of a stored list, each of which is a reference."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def __len__(self) -> int:
        return self._reference.count

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < self._reference.count:
            raise IndexError(place)
        return self._reference.at(place).extension()


def stored_items(value: Any) -> StoredItems | None:
    """Return the items of a stored list; None if a value is none."""
    found = as_reference(value)
    return StoredItems(found) if found is not None and found.form == ITEMS and found.item is None else None
