"""Where objects are: a folder, or what a plugin reaches. All that is asked of it is written here.

An object appears whole or not at all, is never changed, and is called by the numbers of `references.ObjectName` alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from orchestrator.entry_points import PAYLOAD_STORES, load, plugins
from orchestrator.errors import ConfigurationError, Unavailable
from orchestrator.references import ObjectName

MARK = ".in-use"
"""The file."""


class Notes(Protocol):
    """Remembers, outside the stores, which are in use."""

    def has(self, place: str) -> bool:
        """Say whether a store was noted; raise `Unavailable` where that cannot be known now."""

    def note(self, place: str) -> None:
        """Note that a store is in use, if that can be done now."""


class InUseMarker:
    """The mark of one folder."""

    def __init__(self, root: Path, notes: Notes | None) -> None:
        self._root = root
        self._notes = notes
        self._seen = False

    def expect(self) -> None:
        """Return if the folder may be written to; leave the mark in one that is new. Raise `Unavailable` otherwise."""
        if self._is_there():
            return
        if self._seen or self._is_noted():
            raise self.away()
        self._leave()
        self._is_there()

    def is_missing(self) -> bool:
        """Say whether a folder in which something was not found is one that is not mounted."""
        if self._is_there():
            return False
        return self._seen or not any(self._root.iterdir()) or self._is_noted()

    def away(self) -> Unavailable:
        """Return why it cannot be used."""
        return Unavailable(
            f"The payload store {self._root} cannot be used: it was in use, and its file {MARK} is not there, so it is "
            f"probably not mounted. Mount it. If what it held is lost, and it is to begin anew, make that file."
        )

    def _is_there(self) -> bool:
        if not (self._root / MARK).exists():
            return False
        if not self._seen:
            self._seen = True
            if self._notes is not None:
                self._notes.note(str(self._root))
        return True

    def _is_noted(self) -> bool:
        return self._notes is not None and self._notes.has(str(self._root))

    def _leave(self) -> None:
        """Leave the mark, durably, before it is noted: a process that dies in between locks nobody out."""
        self._root.mkdir(parents=True, exist_ok=True)
        for path in (self._root / MARK, self._root):
            descriptor = os.open(path, os.O_RDONLY | (os.O_CREAT if path.name == MARK else 0), 0o644)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


SHARDS = tuple(f"{number:02x}" for number in range(256))
_ANY = "fsspec"
"""The plugin for all schemes that no other is for."""
_PART = ".part-"
"""Between the name of a file and what keeps two writers apart, while it is being written."""


Patiently = Callable[[Callable[[], None]], None]
"""Calls something, again and again while it raises `Unavailable`."""


def at_once(call: Callable[[], None]) -> None:
    """Call something, and wait for no store."""
    call()


class Absent(Exception):
    """There is no such object."""


class Found(NamedTuple):
    """An object that stands in a store."""

    name: ObjectName
    age: float
    """Seconds since it was written."""


class Sink(Protocol):
    """An object that is being written."""

    def write(self, data: bytes) -> None:
        """Append to it. What was left when it raised `Unavailable` is written by the next call, before all else."""

    def commit(self) -> None:
        """Let it appear, durably; may be called again where that raised `Unavailable`."""

    def abandon(self) -> None:
        """Leave nothing of it."""


class Creator(Protocol):
    """What begins objects."""

    def create(self, name: ObjectName) -> Sink:
        """Begin an object."""


class Store(Creator, Protocol):
    """What keeps objects."""

    place: str
    """Where it is, for people."""

    def open(self, name: ObjectName) -> IO[bytes]:
        """Open an object to read it; raise `Absent` if there is none."""

    def listed(self, shard: str) -> Iterator[Found]:
        """Yield the objects of one part of the store."""

    def delete(self, names: Iterable[ObjectName]) -> None:
        """Delete objects, those that are gone already too."""

    def folders(self, part: str) -> Iterator[tuple[str, float]]:
        """Yield what the folders in a part of the store are called, and how many seconds ago each was written to."""

    def delete_folder(self, path: str) -> None:
        """Delete a folder with all that is in it, if it is there."""


class answering:  # noqa: N801  # it is used like a function
    """Turn what a store raises when it cannot be used into what a caller can act on; what is not there is `Absent`.

    It is no generator, so that no frame but ours stands in what is raised: a worker recognises a task's own errors by
    that.
    """

    def __init__(self, place: str, *, writing: bool = False) -> None:
        self._place = place
        self._writing = writing

    def __enter__(self) -> None:
        """Begin to ask the store."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raise what came of it."""
        if not isinstance(error, Exception) or isinstance(error, (Absent, Unavailable, ConfigurationError)):
            return
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not self._writing:
            raise Absent from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unavailable(f"The payload store {self._place} cannot be used: {reason}") from error


class Patient:
    """A store that is waited for while an object is written there."""

    def __init__(self, store: Store, patiently: Patiently) -> None:
        self._store = store
        self._patiently = patiently

    def create(self, name: ObjectName) -> Sink:
        """Begin an object."""
        sinks: list[Sink] = []
        self._patiently(lambda: sinks.append(self._store.create(name)))
        return _PatientSink(sinks[0], self._patiently)


class _PatientSink:
    def __init__(self, sink: Sink, patiently: Patiently) -> None:
        self._sink = sink
        self._patiently = patiently

    def write(self, data: bytes) -> None:
        left = [data]
        self._patiently(lambda: self._sink.write(left.pop() if left else b""))

    def commit(self) -> None:
        self._patiently(self._sink.commit)

    def abandon(self) -> None:
        self._sink.abandon()


class Folder:
    """Objects as files of a folder, which all machines that use them mount."""

    def __init__(self, root: Path, notes: Notes | None = None) -> None:
        self._root = root
        self._mark = InUseMarker(root, notes)
        self.place = str(root)

    def create(self, name: ObjectName) -> Sink:
        with answering(self.place, writing=True):
            self._mark.expect()
            return _File(self._root / name.path, self.place)

    def open(self, name: ObjectName) -> IO[bytes]:
        with answering(self.place):
            if not self._root.is_dir():
                raise OSError("there is no such folder, or it is not mounted")
            try:
                return (self._root / name.path).open("rb")
            except FileNotFoundError:
                if self._mark.is_missing():
                    raise self._mark.away() from None
                raise

    def listed(self, shard: str) -> Iterator[Found]:
        now = time.time()
        with answering(self.place, writing=True), contextlib.suppress(FileNotFoundError):
            for owner in list(os.scandir(self._root / shard)):
                for file in list(os.scandir(owner.path)):
                    yield from self._found(shard, owner.name, file, now)
                with contextlib.suppress(OSError):  # it is not empty
                    if now - owner.stat().st_mtime > _LEFT:
                        Path(owner.path).rmdir()

    def _found(self, shard: str, owner: str, file: os.DirEntry[str], now: float) -> Iterator[Found]:
        with contextlib.suppress(FileNotFoundError):  # deleted at this moment
            age = now - file.stat().st_mtime
            name = ObjectName.parse(f"{shard}/{owner}/{file.name}")
            if name is not None:
                yield Found(name, age)
            elif _PART in file.name and age > _LEFT:
                Path(file.path).unlink()  # its writer has died

    def delete(self, names: Iterable[ObjectName]) -> None:
        with answering(self.place, writing=True):
            for name in names:
                path = self._root / name.path
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # others are there
                    path.parent.rmdir()

    def folders(self, part: str) -> Iterator[tuple[str, float]]:
        now = time.time()
        with answering(self.place, writing=True), contextlib.suppress(FileNotFoundError):
            for folder in list(os.scandir(self._root / part)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted at this moment, or a file
                    written = [folder.stat().st_mtime, *(file.stat().st_mtime for file in os.scandir(folder.path))]
                    yield folder.name, now - max(written)

    def delete_folder(self, path: str) -> None:
        with answering(self.place, writing=True), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root / path)


_ANSWERS = 2.0
"""Seconds that a folder has to say how much room it has."""
_LEFT = 86_400.0
"""Seconds after which a file that is not complete, or an empty folder, is nobody's any more."""


class _File:
    def __init__(self, path: Path, place: str) -> None:
        self._path = path
        self._place = place
        self._part = path.with_name(f"{path.name}{_PART}{uuid4().hex}")
        self._unwritten = bytearray()
        for _ in range(100):
            for folder in (path.parents[1], path.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                self._file = os.fdopen(descriptor, "wb", buffering=0)
                return
            except FileNotFoundError:
                continue  # an empty folder was removed in between
        raise OSError(f"the folder {path.parent} is removed again and again")

    def write(self, data: bytes) -> None:
        with answering(self._place, writing=True):
            self._unwritten += data
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]

    def commit(self) -> None:
        self.write(b"")
        with answering(self._place, writing=True):
            if not self._file.closed:
                os.fsync(self._file.fileno())
                self._file.close()
            if self._part.exists():
                self._part.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def abandon(self) -> None:
        self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)


def open_store(url: str, namespace: str, notes: Notes | None = None) -> Store:
    """Return the store of a setting, in which each namespace has a folder of its own."""
    path = _path(url)
    if path is not None:
        return Folder(path / namespace, notes)
    known = plugins(PAYLOAD_STORES)
    plugin = known.get(urlsplit(url).scheme) or known[_ANY]
    opened: Store = load(plugin, "Payload store", "what takes a URL and returns a store")(
        f"{url.rstrip('/')}/{namespace}"
    )
    return opened


def _path(url: str) -> Path | None:
    """Return the folder of a setting; None if it names no folder."""
    scheme = urlsplit(url).scheme
    if scheme not in ("", "file"):
        return None
    path = Path(url if not scheme else unquote(urlsplit(url).path)).expanduser()
    if not path.is_absolute():
        raise ConfigurationError(
            f"Setting payload_store: expected the whole path of a folder, such as /var/lib/orchestrator/payloads, "
            f"or a URL, such as s3://bucket/payloads, found {url!r}."
        )
    return path


def free_bytes(url: str) -> int | None:
    """Return how many bytes are free in the folder of a setting; None if it is none, or does not answer now."""
    path, found = _path(url) if url else None, list[int]()

    def look() -> None:
        with contextlib.suppress(OSError):
            found.append(shutil.disk_usage(str(path)).free)

    if path is not None:
        thread = threading.Thread(target=look, name="payload store", daemon=True)
        thread.start()
        thread.join(_ANSWERS)  # a remote file system that hangs holds up nobody
    return found[0] if found else None
