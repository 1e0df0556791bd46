"""How a payload is written into an object: chunks, and a directory behind them.

    chunk, chunk, …, directory

Each chunk is sealed by itself where there are data keys, and its SHA-256 stands in the directory, whose own stands in
the reference. So a gigabyte is written and read by who holds one chunk of it, one item of a list is read without the
others, and nothing that was altered, cut off or put in another place is taken for what it should be.

The chunks of one value are pieces of it, those of bytes too. Those of a list are lists, which follow each other.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, Protocol

import msgspec

from orchestrator.errors import PayloadError
from orchestrator.payloads.stores import Absent, Creator, Sink, Store, answering
from orchestrator.references import ARGUMENTS, BYTES, ITEMS, WHOLE, ObjectName, Reference
from orchestrator.sealing import CALL, VALUE, Vault, is_sealed, open_data

CHUNK = 1_048_576
"""Bytes of a chunk of which no part is asked for alone."""
_ITEMS_CHUNK = 262_144
"""Bytes of the items that are read together."""
_LARGEST_DIRECTORY = 64_000_000
_LARGEST_OBJECT = 2**50
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Damaged(PayloadError):
    """A stored payload is not what its reference says."""


class Gone(PayloadError):
    """There is no such stored payload."""


class Directory(msgspec.Struct, array_like=True):
    """What the chunks of an object are."""

    sizes: list[int] = []
    hashes: list[bytes] = []
    firsts: list[int] = []
    """Of a list: the number of the first item of each chunk."""
    is_sealed: bool = False
    """Its writer seals its chunks."""


class Writing:
    """An object that is being written, chunk by chunk."""

    def __init__(self, store: Creator, name: ObjectName, vault: Vault | None) -> None:
        self._name = name
        self._vault = vault
        self._kind = CALL if name.what == ARGUMENTS else VALUE
        self._sink: Sink = store.create(name)
        self._directory = Directory(is_sealed=vault is not None)
        self._offset = 0
        self.size = 0

    def add(self, chunk: bytes, first: int | None = None) -> None:
        """Append one chunk."""
        self.size += len(chunk)
        data = chunk if self._vault is None else self._vault.seal(self._kind, chunk)
        self._sink.write(data)
        self._offset += len(data)
        self._directory.sizes.append(len(data))
        self._directory.hashes.append(hashlib.sha256(data).digest())
        if first is not None:
            self._directory.firsts.append(first)

    def finish(self, form: Any, count: int = 0) -> Reference:
        """Let the object appear; return what names it."""
        directory = msgspec.msgpack.encode(self._directory)
        self._sink.write(directory)
        self._sink.commit()
        return Reference(
            **self._name._asdict(),
            size=self.size,
            directory=self._offset,
            length=len(directory),
            digest=hashlib.sha256(directory).digest(),
            form=form,
            count=count,
        )

    def abandon(self) -> None:
        """Leave nothing of it."""
        self._sink.abandon()


def object_name(owner: bytes, task: bytes, attempt: int, what: str) -> ObjectName:
    """Return a name that nothing has had, and nobody guesses."""
    return ObjectName(owner, task, attempt, what, os.urandom(16))


def write(store: Store, name: ObjectName, data: bytes, vault: Vault | None) -> Reference:
    """Write encoded data; what is sealed already stays as it is."""
    writing = Writing(store, name, None if is_sealed(data) else vault)
    try:
        if name.what != ARGUMENTS and (items := _items(data)) is not None:
            for first, chunk in _gathered(items):
                writing.add(chunk, first)
            return writing.finish(ITEMS, len(items))
        for start in range(0, len(data), CHUNK):
            writing.add(data[start : start + CHUNK])
        return writing.finish(WHOLE)
    except BaseException:
        writing.abandon()
        raise


def _items(data: bytes) -> Sequence[msgspec.Raw] | None:
    """Return the items of an encoded list; None if it is none."""
    if data[0] & 0xF0 != 0x90 and data[0] not in (0xDC, 0xDD):
        return None
    return _raws.decode(data)


def _gathered(items: Iterable[msgspec.Raw]) -> Iterator[tuple[int, bytes]]:
    """Yield lists of so many items that they are worth reading together, with the number of the first."""
    first = size = 0
    some: list[bytes] = []
    for item in items:
        some.append(bytes(item))
        size += len(some[-1])
        if size >= _ITEMS_CHUNK:
            yield first, _list(some)
            first, size, some = first + len(some), 0, []
    if some or not first:
        yield first, _list(some)


def _list(items: Sequence[bytes]) -> bytes:
    return _array(len(items)) + b"".join(items)


def _array(length: int) -> bytes:
    return b"\xdd" + struct.pack(">I", length)


class Reading:
    """An object that is being read, chunk by chunk."""

    def __init__(self, store: Store, reference: Reference) -> None:
        self.reference = reference
        self._place = store.place
        self._kind = CALL if reference.what == ARGUMENTS else VALUE
        try:
            self._file: IO[bytes] = store.open(reference.name)
            try:
                self._directory = self._read_directory()
            except BaseException:
                self._file.close()
                raise
        except Absent as error:
            raise Gone(
                f"A payload of {reference.size:,} bytes is not in the payload store {store.place}: "
                f"{reference.name.path}. It was deleted there, or another store was set when it was written "
                f"(setting payload_store)."
            ) from error
        self._offsets = [0]
        for size in self._directory.sizes:
            self._offsets.append(self._offsets[-1] + size)

    def close(self) -> None:
        """Have it no longer open."""
        self._file.close()

    def _read_directory(self) -> Directory:
        reference = self.reference
        if reference.length > _LARGEST_DIRECTORY:
            raise self._damaged()
        data = self._bytes(reference.directory, reference.length)
        if hashlib.sha256(data).digest() != reference.digest:
            raise self._damaged()
        try:
            return msgspec.msgpack.decode(data, type=Directory)
        except msgspec.MsgspecError:  # a reference that was made up names something else
            raise self._damaged() from None

    def _bytes(self, offset: int, length: int) -> bytes:
        if max(offset, length) > _LARGEST_OBJECT:
            raise self._damaged()
        with answering(self._place):
            self._file.seek(offset)
            return self._file.read(length)

    def _damaged(self) -> Damaged:
        return Damaged(
            f"A payload of {self.reference.size:,} bytes was altered, or only a part of it is left, in the payload "
            f"store {self._place}: {self.reference.name.path}. Its SHA-256 is not that of what was written. Bring "
            f"the object back from a backup, or run the task again that has written it."
        )

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self._directory.sizes)

    def chunk(self, number: int) -> bytes:
        """Return one chunk as it was given, or say that it is not that."""
        data = self._bytes(self._offsets[number], self._directory.sizes[number])
        if hashlib.sha256(data).digest() != self._directory.hashes[number]:
            raise self._damaged()
        return open_data(data, self._kind) if self._directory.is_sealed else data

    def each(self) -> Iterator[bytes]:
        """Yield the chunks, one after the other."""
        for number in range(self.chunks):
            yield self.chunk(number)

    def encoded(self) -> bytes:
        """Return the value, or the one item, as encoded data."""
        reference = self.reference
        return assembled(reference, self.each()) if reference.item is None else self._item(reference.item)

    def _item(self, number: int) -> bytes:
        if self.reference.form != ITEMS or not 0 <= number < self.reference.count:
            raise self._damaged()
        place = bisect_right(self._directory.firsts, number) - 1
        if place < 0:
            raise self._damaged()
        items = _raws.decode(self.chunk(place))
        if number - self._directory.firsts[place] >= len(items):
            raise self._damaged()
        return bytes(items[number - self._directory.firsts[place]])


def assembled(reference: Reference, chunks: Iterable[bytes]) -> bytes:
    """Return a whole value as encoded data, from its chunks."""
    if reference.form == ITEMS:
        return _array(reference.count) + b"".join(chunk[5:] for chunk in chunks)  # behind what `_array` has written
    data = b"".join(chunks)
    return msgspec.msgpack.encode(data) if reference.form == BYTES else data


class Chunks(Protocol):
    """A value that is read chunk by chunk."""

    @property
    def chunks(self) -> int:
        """How many there are."""

    def chunk(self, number: int) -> bytes:
        """Return one chunk."""

    def close(self) -> None:
        """Have it no longer open."""


class Reader(io.RawIOBase):
    """Stored bytes as a file, of which one chunk is in memory."""

    def __init__(self, reading: Chunks) -> None:
        self._reading = reading
        self._next = 0
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer what is there of a chunk."""
        while not self._left and self._next < self._reading.chunks:
            self._left = memoryview(self._reading.chunk(self._next))
            self._next += 1
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._left))
        target[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def close(self) -> None:
        """Have it no longer open."""
        if not self.closed:
            self._reading.close()
        super().close()


class Output(io.RawIOBase):
    """Bytes that are written into a payload: the first in memory, and from so many on in the store."""

    def __init__(self, begin: Callable[[], Writing] | None, inline: int, refuse: Callable[[int], PayloadError]) -> None:
        """`begin` has an object begin; without it, no more than `inline` bytes can be written."""
        self._begin = begin
        self._inline = inline
        self._refuse = refuse
        self._writing: Writing | None = None
        self._kept = bytearray()
        self.size = 0

    def writable(self) -> bool:
        """It is there to be written."""
        return True

    def write(self, data: Any) -> int:
        """Append bytes."""
        if self.closed:
            raise ValueError("the output is closed")
        view = memoryview(data).cast("B")
        self.size += len(view)
        if self._begin is None and self.size > self._inline:
            raise self._refuse(self.size)
        for start in range(0, len(view), CHUNK):
            self._kept += view[start : start + CHUNK]
            if len(self._kept) >= CHUNK:
                self._add()
        return len(view)

    def _add(self) -> None:
        if self._begin is None:
            return
        if self._writing is None:
            self._writing = self._begin()
        while self._kept and (len(self._kept) >= CHUNK or self.closed):
            self._writing.add(bytes(self._kept[:CHUNK]))
            del self._kept[:CHUNK]

    def finish(self) -> bytes:
        """Return what was written as encoded data: a reference, or the bytes themselves where they are few."""
        if not self.closed:
            super().close()
        if self._writing is None and (self.size <= self._inline or self._begin is None):
            return msgspec.msgpack.encode(bytes(self._kept))
        self._add()
        assert self._writing is not None
        return self._writing.finish(BYTES).encoded()

    def abandon(self) -> None:
        """Leave nothing of it."""
        if not self.closed:
            super().close()
        if self._writing is not None:
            self._writing.abandon()
