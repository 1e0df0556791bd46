"""Payload stores supported by fsspec (extra `payloads`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import IO, Any

from orchestrator.errors import ConfigurationError
from orchestrator.payloads.stores import Found, Sink, answering
from orchestrator.references import ObjectName
from orchestrator.terminal_safe import without_password


class Bucket:
    """Payloads in S3 and compatible stores, Google Cloud Storage, Azure and others, by fsspec."""

    def __init__(self, url: str) -> None:
        self.place = without_password(url)
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ConfigurationError(
                f"Setting payload_store: {self.place} needs the package fsspec. Install it: pip install "
                f"'durable-orchestrator[payloads]', and the fsspec package for it: s3fs for s3://, gcsfs for gs://"
            ) from error
        try:
            self._files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"Setting payload_store: {self.place}: {error}.") from error
        self._root = str(root).rstrip("/")

    def create(self, name: ObjectName) -> Sink:
        with answering(self.place, writing=True):
            return _Upload(self._files, f"{self._root}/{name.path}", self.place)

    def open(self, name: ObjectName) -> IO[bytes]:
        with answering(self.place):
            file: IO[bytes] = self._files.open(f"{self._root}/{name.path}", "rb", cache_type="readahead")
            return file

    def listed(self, shard: str) -> Iterator[Found]:
        with answering(self.place, writing=True), contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()
            now = time.time()
            objects = self._files.find(f"{self._root}/{shard}", detail=True)
            for path, info in objects.items():
                name = ObjectName.parse("/".join(path.split("/")[-3:]))
                written = _written(info)
                if name is not None and written is not None:
                    yield Found(name, now - written)

    def delete(self, names: Iterable[ObjectName]) -> None:
        paths = [f"{self._root}/{name.path}" for name in names]
        with answering(self.place, writing=True), contextlib.suppress(FileNotFoundError):
            if paths:
                self._files.rm(paths)

    def folders(self, part: str) -> Iterator[tuple[str, float]]:
        newest: dict[str, float] = {}
        with answering(self.place, writing=True), contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()
            now = time.time()
            for path, info in self._files.find(f"{self._root}/{part}", detail=True).items():
                name, written = path.split("/")[-2], _written(info)
                newest[name] = max(newest.get(name, 0.0), now if written is None else written)
            yield from ((name, now - written) for name, written in newest.items())

    def delete_folder(self, path: str) -> None:
        with answering(self.place, writing=True), contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{path}", recursive=True)


def _written(info: Mapping[str, Any]) -> float | None:
    """Return when an object was written, as Unix time; None if the store does not tell."""
    moment: Any = info.get("LastModified") or info.get("mtime") or info.get("created") or info.get("updated")
    if moment is None:
        return None
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    return float(moment.timestamp()) if hasattr(moment, "timestamp") else float(moment)


class _Upload:
    def __init__(self, files: Any, path: str, place: str) -> None:
        self._files = files
        self._path = path
        self._place = place
        self._file = files.open(path, "wb")

    def write(self, data: bytes) -> None:
        with answering(self._place, writing=True):
            self._file.write(data)

    def commit(self) -> None:
        with answering(self._place, writing=True):
            self._file.close()

    def abandon(self) -> None:
        """Discard the upload. If the store cannot, the object is collected later, because no row refers to it."""
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # so that no later close completes the upload
        with contextlib.suppress(Exception):
            self._files.rm_file(self._path)


PLUGIN = Bucket
