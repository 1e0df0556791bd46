"""Where the specification of a task stands, and its status and output go: a folder, or whatever fsspec reaches."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from orchestrator.errors import ConfigurationError
from orchestrator.terminal_safe import without_password


class Folder(Protocol):
    """A folder, here or elsewhere, whose files appear whole or not at all."""

    name: str
    """For people."""

    def read(self, file: str) -> bytes:
        """Return what a file holds."""

    def size(self, file: str) -> int:
        """Return how many bytes a file holds."""

    def write(self, file: str, data: bytes) -> None:
        """Replace a file, durably."""

    def delete(self) -> None:
        """Delete the folder with all its files, if it is there."""


class LocalFolder:
    """A folder of this machine, or one that is mounted here."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)

    def read(self, file: str) -> bytes:
        """Return what a file holds."""
        return (self._path / file).read_bytes()

    def size(self, file: str) -> int:
        """Return how many bytes a file holds."""
        return (self._path / file).stat().st_size

    def delete(self) -> None:
        """Delete the folder with all its files, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._path)

    def write(self, file: str, data: bytes) -> None:
        """Write beside it, and move it there: a reader sees the old one or the new one."""
        self._path.mkdir(parents=True, exist_ok=True)
        part = self._path / f".{file}.{uuid4().hex}"
        try:
            with part.open("xb") as written:
                written.write(data)
                written.flush()
                os.fsync(written.fileno())
            part.replace(self._path / file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class RemoteFolder:
    """A place that fsspec reaches; object stores let an object appear when it is complete."""

    def __init__(self, url: str) -> None:
        self.name = without_password(url)
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = _opened(url_to_fs, url)
        except ImportError as error:
            raise ConfigurationError(
                f"{self.name} needs a package that is not installed: {error}. Install it: pip install "
                f"'durable-orchestrator[payloads]', and what fsspec wants for it: s3fs for s3://, gcsfs for gs://"
            ) from error

    def read(self, file: str) -> bytes:
        """Return what an object holds."""
        return bytes(self._files.cat_file(f"{self._root}/{file}"))

    def size(self, file: str) -> int:
        """Return how many bytes an object holds."""
        return int(self._files.size(f"{self._root}/{file}"))

    def delete(self) -> None:
        """Delete all objects of the folder, if there are any."""
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._root, recursive=True)

    def write(self, file: str, data: bytes) -> None:
        """Put an object, at once."""
        self._files.pipe_file(f"{self._root}/{file}", data)


def _opened(url_to_fs: Any, url: str) -> tuple[Any, str]:
    try:
        files, root = url_to_fs(url)
    except ValueError as error:
        raise ConfigurationError(f"{without_password(url)}: {error}.") from error
    return files, str(root).rstrip("/")


def folder_of(path: str) -> Folder:
    """Return the folder that a path or an address names."""
    return RemoteFolder(path) if "://" in path else LocalFolder(Path(path))


def split(path: str) -> tuple[str, str]:
    """Return the folder of a file, and the file in it."""
    folder, _, file = path.rpartition("/")
    return folder or (path[:1] if path.startswith("/") else "."), file
