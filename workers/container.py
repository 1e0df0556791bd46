"""Runs one task to its end, and writes its status where the executor can read it.

    status.json   running, since when, and a heartbeat every ten seconds; then success or failed
    output.json   the result; it is there before the status says success

A process that is killed leaves `running` behind, with a heartbeat that grows old.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from orchestrator.domain.plain import unstorable
from orchestrator.errors import ConfigurationError, GiveUp
from orchestrator.telemetry import get_logger
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


log = get_logger("run-task")

FAILED, TEMPORARY, UNUSABLE, TERMINATED = 1, 75, 78, 143
"""Exit codes: it failed; an address cannot be reached; it never will; SIGTERM."""
_HEARTBEAT = 10.0
_TRIES = 5
_PAUSE = 1.0
_LONGEST = 4_000


class Specification(msgspec.Struct, frozen=True, kw_only=True):
    """The specification that an executor wrote."""

    task: str = ""
    task_id: str = ""
    attempt: int = 1
    arguments: list[Any] = []
    input: dict[str, Any] = {}


class Terminated(BaseException):
    """This process received SIGTERM."""


class Board:
    """Where it is written how a task goes; nowhere if there is no place."""

    def __init__(self, place: Folder | None, specification: Specification, every: float = _HEARTBEAT) -> None:
        self._place = place
        self._said: dict[str, Any] = {
            "task_id": specification.task_id,
            "attempt": specification.attempt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": time.time(),
        }
        self._every = every
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def begin(self) -> None:
        """Say that it runs, and go on saying so."""
        self._write("running")
        self._beating.start()

    def succeed(self, output: bytes) -> None:
        """Leave the result, and then say that it is there."""
        self._over.set()
        with self._turn:
            self._put("output.json", output)
            self._put("status.json", self._status("success"))

    def fail(self, error: dict[str, Any]) -> None:
        self._over.set()
        with self._turn:
            self._put("status.json", self._status("failed", error=error))

    def _beat(self) -> None:
        while not self._over.wait(self._every):
            try:
                self._write("running")
            except Exception as error:  # noqa: BLE001  # whatever a place raises; the work goes on
                log.warning("container.heartbeat_failed error=%s: it is tried again", error)

    def _write(self, status: str) -> None:
        with self._turn:
            if not self._over.is_set() and self._place is not None:
                self._place.write("status.json", self._status(status))

    def _status(self, status: str, **more: Any) -> bytes:
        return msgspec.json.encode({"status": status, "heartbeat": time.time(), **self._said, **more})

    def _put(self, file: str, data: bytes) -> None:
        """Write what must not be lost, again where the place is away for a moment."""
        for number in range(1, _TRIES + 1):
            try:
                if self._place is not None:
                    self._place.write(file, data)
                return
            except Exception as error:
                if number == _TRIES:
                    raise
                log.warning("container.write_failed file=%s error=%s: it is tried again", file, error)
                time.sleep(_PAUSE * number)


def run(call: Callable[[], Any], board: Board) -> int:
    """Call a function, leave its end on the board and, as the last line, on standard output; return the exit code."""
    board.begin()  # or else nothing is begun
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if main else None
    try:
        output = _output(call)
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end is written
        board.succeed(output)
    except BaseException as error:  # noqa: BLE001  # whatever ends the function is its end
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        board.fail(_described(error))
        traceback.print_exception(error)
        return TERMINATED if isinstance(error, Terminated) else FAILED
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + output + b"\n")
    sys.stdout.buffer.flush()
    return 0


def _output(call: Callable[[], Any]) -> bytes:
    value = call()
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    plain = msgspec.to_builtins(value, str_keys=True)
    if (reason := unstorable(plain)) is not None:
        raise GiveUp(f"The work is done, but its result is no plain data: {reason}.")
    return msgspec.json.encode(plain)


def _described(error: BaseException) -> dict[str, Any]:
    detail = "".join(traceback.format_exception(error))[-_LONGEST:]
    message = "It was told to end (SIGTERM)." if isinstance(error, Terminated) else str(error)
    is_final = isinstance(error, GiveUp)
    return {"kind": type(error).__name__, "message": message[:_LONGEST], "retryable": not is_final, "detail": detail}


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated
