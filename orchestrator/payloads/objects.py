"""The format of a payload in an object: chunks, followed by a directory.

    chunk, chunk, …, directory

With data keys, each chunk is sealed separately. The directory has the SHA-256 of each chunk, and the reference has the
SHA-256 of the directory. So a gigabyte is written and read with one chunk in memory, a single list item can be read
alone, and altered, truncated or swapped data is detected.

The chunks of a value or of bytes are consecutive pieces. The chunks of a list are consecutive sublists.
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
"""Bytes of a chunk of a value or of bytes."""
_ITEMS_CHUNK = 262_144
"""Bytes of list items in one chunk, about."""
_MAX_DIRECTORY = 64_000_000
_MAX_OBJECT = 2**50
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Damaged(PayloadError):
    """A stored payload does not match its reference."""


class Gone(PayloadError):
    """A stored payload does not exist."""


class Directory(msgspec.Struct, array_like=True):
    """The sizes and hashes of an object's chunks."""

    sizes: list[int] = []
    hashes: list[bytes] = []
    firsts: list[int] = []
    """For a list, the index of the first item of each chunk."""
    is_sealed: bool = False
    """The chunks are sealed separately."""


class Writing:
    """Writes an object chunk by chunk."""

    def __init__(self, store: Creator, name: ObjectName, vault: Vault | None) -> None:
        self._name = name
        self._vault = vault
        self._kind = CALL if name.what == ARGUMENTS else VALUE
        self._sink: Sink = store.create(name)
        self._directory = Directory(is_sealed=vault is not None)
        self._offset = 0
        self.size = 0

    def add(self, chunk: bytes, first: int | None = None) -> None:
        """Append a chunk."""
        self.size += len(chunk)
        data = chunk if self._vault is None else self._vault.seal(self._kind, chunk)
        self._sink.write(data)
        self._offset += len(data)
        self._directory.sizes.append(len(data))
        self._directory.hashes.append(hashlib.sha256(data).digest())
        if first is not None:
            self._directory.firsts.append(first)

    def finish(self, form: Any, count: int = 0) -> Reference:
        """Commit the object and return its reference."""
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
        """Discard the object."""
        self._sink.abandon()


def object_name(owner: bytes, task: bytes, attempt: int, what: str) -> ObjectName:
    """Return a new, unguessable object name."""
    return ObjectName(owner, task, attempt, what, os.urandom(16))


def write(store: Store, name: ObjectName, data: bytes, vault: Vault | None) -> Reference:
    """Store encoded data and return its reference. Data that is sealed already is stored as it is."""
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
    """Return the items of an encoded list, or None if the data is not a list."""
    if data[0] & 0xF0 != 0x90 and data[0] not in (0xDC, 0xDD):
        return None
    return _raws.decode(data)


def _gathered(items: Iterable[msgspec.Raw]) -> Iterator[tuple[int, bytes]]:
    """Yield chunks of list items, each with the index of its first item."""
    first = size = 0
    items_of_chunk: list[bytes] = []
    for item in items:
        items_of_chunk.append(bytes(item))
        size += len(items_of_chunk[-1])
        if size >= _ITEMS_CHUNK:
            yield first, _list(items_of_chunk)
            first, size, items_of_chunk = first + len(items_of_chunk), 0, []
    if items_of_chunk or not first:
        yield first, _list(items_of_chunk)


def _list(items: Sequence[bytes]) -> bytes:
    return _array(len(items)) + b"".join(items)


def _array(length: int) -> bytes:
    return b"\xdd" + struct.pack(">I", length)


class Reading:
    """Reads an object chunk by chunk."""

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
                f"{reference.name.path}. It was deleted, or written to a different store (setting payload_store)."
            ) from error
        self._offsets = [0]
        for size in self._directory.sizes:
            self._offsets.append(self._offsets[-1] + size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_directory(self) -> Directory:
        reference = self.reference
        if reference.length > _MAX_DIRECTORY:
            raise self._damaged()
        data = self._bytes(reference.directory, reference.length)
        if hashlib.sha256(data).digest() != reference.digest:
            raise self._damaged()
        try:
            return msgspec.msgpack.decode(data, type=Directory)
        except msgspec.MsgspecError:  # a forged reference to other data
            raise self._damaged() from None

    def _bytes(self, offset: int, length: int) -> bytes:
        if max(offset, length) > _MAX_OBJECT:
            raise self._damaged()
        with answering(self._place):
            self._file.seek(offset)
            return self._file.read(length)

    def _damaged(self) -> Damaged:
        return Damaged(
            f"A payload of {self.reference.size:,} bytes was changed or truncated in the payload store {self._place}: "
            f"{self.reference.name.path}. Its SHA-256 does not match. Restore the object from a backup, or run the "
            f"task that wrote it again."
        )

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self._directory.sizes)

    def chunk(self, number: int) -> bytes:
        """Return a chunk, or raise Damaged if its hash is wrong."""
        data = self._bytes(self._offsets[number], self._directory.sizes[number])
        if hashlib.sha256(data).digest() != self._directory.hashes[number]:
            raise self._damaged()
        return open_data(data, self._kind) if self._directory.is_sealed else data

    def each(self) -> Iterator[bytes]:
        """Yield all chunks."""
        for number in range(self.chunks):
            yield self.chunk(number)

    def encoded(self) -> bytes:
        """Return the value, or the single item of the reference, as encoded data."""
        reference = self.reference
        return assembled(reference, self.each()) if reference.item is None else self._item(reference.item)

    def _item(self, number: int) -> bytes:
        if self.reference.form != ITEMS or not 0 <= number < self.reference.count:
            raise self._damaged()
        chunk_index = bisect_right(self._directory.firsts, number) - 1
        if chunk_index < 0:
            raise self._damaged()
        items = _raws.decode(self.chunk(chunk_index))
        if number - self._directory.firsts[chunk_index] >= len(items):
            raise self._damaged()
        return bytes(items[number - self._directory.firsts[chunk_index]])


def assembled(reference: Reference, chunks: Iterable[bytes]) -> bytes:
    """Return a whole value as encoded data, from its chunks."""
    if reference.form == ITEMS:
        return _array(reference.count) + b"".join(chunk[5:] for chunk in chunks)  # without their headers
    data = b"".join(chunks)
    return msgspec.msgpack.encode(data) if reference.form == BYTES else data


class Chunks(Protocol):
    """A value that is read chunk by chunk."""

    @property
    def chunks(self) -> int:
        """The number of chunks."""

    def chunk(self, number: int) -> bytes:
        """Return a chunk."""

    def close(self) -> None:
        """Close the file."""


class Reader(io.RawIOBase):
    """Stored bytes as a file, with one chunk in memory."""

    def __init__(self, source: Chunks) -> None:
        self._reading = source
        self._next = 0
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the rest of the current chunk into a buffer, or as much as fits."""
        while not self._left and self._next < self._reading.chunks:
            self._left = memoryview(self._reading.chunk(self._next))
            self._next += 1
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._left))
        target[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._reading.close()
        super().close()


class Output(io.RawIOBase):
    """A file for a payload: a small one is kept in memory, a larger one is written to the store."""

    def __init__(self, begin: Callable[[], Writing] | None, inline: int, refuse: Callable[[int], PayloadError]) -> None:
        """`begin` starts an object in the store. Without it, at most `inline` bytes can be written."""
        self._begin = begin
        self._inline = inline
        self._refuse = refuse
        self._writing: Writing | None = None
        self._kept = bytearray()
        self.size = 0

    def writable(self) -> bool:
        """Return True."""
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
        """Return the payload as encoded data: a reference, or the bytes themselves if they are few."""
        if not self.closed:
            super().close()
        if self._writing is None and (self.size <= self._inline or self._begin is None):
            return msgspec.msgpack.encode(bytes(self._kept))
        self._add()
        assert self._writing is not None
        return self._writing.finish(BYTES).encoded()

    def abandon(self) -> None:
        """Discard the output."""
        if not self.closed:
            super().close()
        if self._writing is not None:
            self._writing.abandon()
