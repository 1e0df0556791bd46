"""Stores for payload objects: the interface, and the store in a folder. Plugins add others.

An object appears completely or not at all, never changes, and is named by `references.ObjectName`.
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
"""The name of the marker file in a store's folder."""


class Notes(Protocol):
    """Remembers, outside the stores, which stores are in use."""

    def has(self, place: str) -> bool:
        """Return whether a store is noted as in use. Raises `Unavailable` if that cannot be checked now."""

    def note(self, place: str) -> None:
        """Note a store as in use, if possible now."""


class InUseMarker:
    """The marker file of a folder, with which a missing mount is detected."""

    def __init__(self, root: Path, notes: Notes | None) -> None:
        self._root = root
        self._notes = notes
        self._seen = False

    def expect(self) -> None:
        """Check that the folder may be written to, and create the marker in a new one. Raises `Unavailable`."""
        if self._exists():
            return
        if self._seen or self._is_noted():
            raise self.away()
        self._create()
        self._exists()

    def is_missing(self) -> bool:
        """Return whether the folder is probably not mounted, after an object was not found in it."""
        if self._exists():
            return False
        return self._seen or not any(self._root.iterdir()) or self._is_noted()

    def away(self) -> Unavailable:
        """Return the error that the folder is not mounted."""
        return Unavailable(
            f"The payload store {self._root} cannot be used: it was in use before, but its file {MARK} is missing, so "
            f"it is probably not mounted. Mount it. If its data is lost and it should start empty, create that file."
        )

    def _exists(self) -> bool:
        if not (self._root / MARK).exists():
            return False
        if not self._seen:
            self._seen = True
            if self._notes is not None:
                self._notes.note(str(self._root))
        return True

    def _is_noted(self) -> bool:
        return self._notes is not None and self._notes.has(str(self._root))

    def _create(self) -> None:
        """Create the marker durably before it is noted, so that a crash in between locks nobody out."""
        self._root.mkdir(parents=True, exist_ok=True)
        for path in (self._root / MARK, self._root):
            descriptor = os.open(path, os.O_RDONLY | (os.O_CREAT if path.name == MARK else 0), 0o644)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


SHARDS = tuple(f"{number:02x}" for number in range(256))
_FALLBACK = "fsspec"
"""The plugin for all schemes without a plugin of their own."""
_PART = ".part-"
"""The infix in the names of incomplete files, before a random suffix."""


Patiently = Callable[[Callable[[], None]], None]
"""Calls a function, and repeats it while it raises `Unavailable`."""


def at_once(call: Callable[[], None]) -> None:
    """Call a function without retries."""
    call()


class Absent(Exception):
    """An object does not exist."""


class Found(NamedTuple):
    """An object in a store."""

    name: ObjectName
    age: float
    """Seconds since it was written."""


class Sink(Protocol):
    """An object that is being written."""

    def write(self, data: bytes) -> None:
        """Append data. After `Unavailable`, the next call first writes the unwritten rest."""

    def commit(self) -> None:
        """Make the object appear, durably. May be repeated after `Unavailable`."""

    def abandon(self) -> None:
        """Discard the object."""


class Creator(Protocol):
    """Starts objects."""

    def create(self, name: ObjectName) -> Sink:
        """Start an object."""


class Store(Creator, Protocol):
    """A store of objects."""

    place: str
    """The location, for messages."""

    def open(self, name: ObjectName) -> IO[bytes]:
        """Open an object for reading. Raises `Absent` if it does not exist."""

    def listed(self, shard: str) -> Iterator[Found]:
        """Yield the objects in one of the 256 parts of the store."""

    def delete(self, names: Iterable[ObjectName]) -> None:
        """Delete objects. Missing objects are ignored."""

    def folders(self, part: str) -> Iterator[tuple[str, float]]:
        """Yield the name of each folder in a part of the store, and the seconds since its last write."""

    def delete_folder(self, path: str) -> None:
        """Delete a folder with its content, if it exists."""


class answering:  # noqa: N801  # used like a function
    """Convert errors of a store into `Unavailable`, and errors about missing files into `Absent`.

    This is a class instead of a generator, so that tracebacks contain only our own frames: workers distinguish errors
    of tasks by that.
    """

    def __init__(self, place: str, *, writing: bool = False) -> None:
        self._place = place
        self._writing = writing

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raise the converted error."""
        if not isinstance(error, Exception) or isinstance(error, (Absent, Unavailable, ConfigurationError)):
            return
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not self._writing:
            raise Absent from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unavailable(f"The payload store {self._place} cannot be used: {reason}") from error


class Patient:
    """Creates objects in a store, and retries while the store is unavailable."""

    def __init__(self, store: Store, patiently: Patiently) -> None:
        self._store = store
        self._patiently = patiently

    def create(self, name: ObjectName) -> Sink:
        """Start an object."""
        sinks: list[Sink] = []
        self._patiently(lambda: sinks.append(self._store.create(name)))
        return _PatientSink(sinks[0], self._patiently)


class _PatientSink:
    def __init__(self, sink: Sink, patiently: Patiently) -> None:
        self._sink = sink
        self._patiently = patiently

    def write(self, data: bytes) -> None:
        pending = [data]
        self._patiently(lambda: self._sink.write(pending.pop() if pending else b""))

    def commit(self) -> None:
        self._patiently(self._sink.commit)

    def abandon(self) -> None:
        self._sink.abandon()


class Folder:
    """A store in a folder, which all machines that use it mount."""

    def __init__(self, root: Path, notes: Notes | None = None) -> None:
        self._root = root
        self._marker = InUseMarker(root, notes)
        self.place = str(root)

    def create(self, name: ObjectName) -> Sink:
        with answering(self.place, writing=True):
            self._marker.expect()
            return _File(self._root / name.path, self.place)

    def open(self, name: ObjectName) -> IO[bytes]:
        with answering(self.place):
            if not self._root.is_dir():
                raise OSError("there is no such folder, or it is not mounted")
            try:
                return (self._root / name.path).open("rb")
            except FileNotFoundError:
                if self._marker.is_missing():
                    raise self._marker.away() from None
                raise

    def listed(self, shard: str) -> Iterator[Found]:
        now = time.time()
        with answering(self.place, writing=True), contextlib.suppress(FileNotFoundError):
            for owner in list(os.scandir(self._root / shard)):
                for file in list(os.scandir(owner.path)):
                    yield from self._found(shard, owner.name, file, now)
                with contextlib.suppress(OSError):  # not empty
                    if now - owner.stat().st_mtime > _ABANDONED_AFTER:
                        Path(owner.path).rmdir()

    def _found(self, shard: str, owner: str, file: os.DirEntry[str], now: float) -> Iterator[Found]:
        with contextlib.suppress(FileNotFoundError):  # deleted at this moment
            age = now - file.stat().st_mtime
            name = ObjectName.parse(f"{shard}/{owner}/{file.name}")
            if name is not None:
                yield Found(name, age)
            elif _PART in file.name and age > _ABANDONED_AFTER:
                Path(file.path).unlink()  # the writer has died

    def delete(self, names: Iterable[ObjectName]) -> None:
        with answering(self.place, writing=True):
            for name in names:
                path = self._root / name.path
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty
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


_FREE_SPACE_TIMEOUT = 2.0
"""Seconds to wait for a folder's free space."""
_ABANDONED_AFTER = 86_400.0
"""Seconds after which an incomplete file or an empty folder is deleted."""


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
        raise OSError(f"the folder {path.parent} is removed repeatedly")

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
    """Return the store for a setting. Each namespace has a folder of its own in it."""
    path = _path(url)
    if path is not None:
        return Folder(path / namespace, notes)
    available = plugins(PAYLOAD_STORES)
    plugin = available.get(urlsplit(url).scheme) or available[_FALLBACK]
    opened: Store = load(plugin, "Payload store", "a function that takes a URL and returns a store")(
        f"{url.rstrip('/')}/{namespace}"
    )
    return opened


def _path(url: str) -> Path | None:
    """Return the folder that a setting names, or None if the setting is another URL."""
    scheme = urlsplit(url).scheme
    if scheme not in ("", "file"):
        return None
    path = Path(url if not scheme else unquote(urlsplit(url).path)).expanduser()
    if not path.is_absolute():
        raise ConfigurationError(
            f"Setting payload_store: expected the absolute path of a folder, such as /var/lib/orchestrator/payloads, "
            f"or a URL, such as s3://bucket/payloads, found {url!r}."
        )
    return path


def free_bytes(url: str) -> int | None:
    """Return the free bytes in the folder of a setting. None for other stores, or if the folder does not respond."""
    path, free = _path(url) if url else None, list[int]()

    def measure() -> None:
        with contextlib.suppress(OSError):
            free.append(shutil.disk_usage(str(path)).free)

    if path is not None:
        thread = threading.Thread(target=measure, name="payload store", daemon=True)
        thread.start()
        thread.join(_FREE_SPACE_TIMEOUT)  # do not wait for a remote file system that hangs
    return free[0] if free else None
