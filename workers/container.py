"""Runs one task to its end, and writes its status where the executor can read it.

    status.json   running, since when, and a heartbeat every ten seconds; then success or failed
    output.json   the result, written before the status becomes success

A killed process leaves the status `running`, with a heartbeat that grows old.
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
    """A local or remote folder, whose files are written atomically."""

    name: str
    """Name of the folder for logs and errors."""

    def read(self, file: str) -> bytes:
        """Return the content of a file."""

    def size(self, file: str) -> int:
        """Return the size of a file in bytes."""

    def write(self, file: str, data: bytes) -> None:
        """Replace a file durably."""

    def delete(self) -> None:
        """Delete the folder with all its files, if it exists."""


class LocalFolder:
    """A folder of this machine, or one mounted into it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)

    def read(self, file: str) -> bytes:
        return (self._path / file).read_bytes()

    def size(self, file: str) -> int:
        """Return the size of a file in bytes."""
        return (self._path / file).stat().st_size

    def delete(self) -> None:
        """Delete the folder with all its files, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._path)

    def write(self, file: str, data: bytes) -> None:
        """Write a temporary file and rename it, so that a reader sees the old content or the new."""
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
    """A folder that fsspec reaches. Object stores make an object visible when it is complete."""

    def __init__(self, url: str) -> None:
        self.name = without_password(url)
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = _open_filesystem(url_to_fs, url)
        except ImportError as error:
            raise ConfigurationError(
                f"{self.name} needs a package that is not installed: {error}. Install it: pip install "
                f"'durable-orchestrator[payloads]', and the fsspec package for it: s3fs for s3://, gcsfs for gs://"
            ) from error

    def read(self, file: str) -> bytes:
        """Return the content of an object."""
        return bytes(self._files.cat_file(f"{self._root}/{file}"))

    def size(self, file: str) -> int:
        """Return the size of an object in bytes."""
        return int(self._files.size(f"{self._root}/{file}"))

    def delete(self) -> None:
        """Delete all objects of the folder, if there are any."""
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._root, recursive=True)

    def write(self, file: str, data: bytes) -> None:
        """Write an object in one request."""
        self._files.pipe_file(f"{self._root}/{file}", data)


def _open_filesystem(url_to_fs: Any, url: str) -> tuple[Any, str]:
    try:
        files, root = url_to_fs(url)
    except ValueError as error:
        raise ConfigurationError(f"{without_password(url)}: {error}.") from error
    return files, str(root).rstrip("/")


def folder_of(path: str) -> Folder:
    """Return the folder for a path or a URL."""
    return RemoteFolder(path) if "://" in path else LocalFolder(Path(path))


def split(path: str) -> tuple[str, str]:
    """Split the path of a file into its folder and its name."""
    folder, _, file = path.rpartition("/")
    return folder or (path[:1] if path.startswith("/") else "."), file


log = get_logger("run-task")

FAILED, TEMPORARY, UNUSABLE, TERMINATED = 1, 75, 78, 143
"""Exit codes: the task failed; an address cannot be reached; the task can never run; SIGTERM was received."""
_HEARTBEAT = 10.0
_MAX_TRIES = 5
_PAUSE = 1.0
_MAX_TEXT = 4_000


class Specification(msgspec.Struct, frozen=True, kw_only=True):
    """The task that an executor has specified for this process."""

    task: str = ""
    task_id: str = ""
    attempt: int = 1
    arguments: list[Any] = []
    input: dict[str, Any] = {}


class Terminated(BaseException):
    """This process received SIGTERM."""


class Board:
    """Writes the status of a task to a folder, or nowhere if `folder` is None."""

    def __init__(self, folder: Folder | None, specification: Specification, interval: float = _HEARTBEAT) -> None:
        self._folder = folder
        self._common_fields: dict[str, Any] = {
            "task_id": specification.task_id,
            "attempt": specification.attempt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": time.time(),
        }
        self._interval = interval
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def begin(self) -> None:
        """Write the status `running`, and refresh its heartbeat in a thread."""
        self._write("running")
        self._heartbeat_thread.start()

    def succeed(self, output: bytes) -> None:
        """Write the result, then the status `success`."""
        self._has_ended.set()
        with self._lock:
            self._write_with_retries("output.json", output)
            self._write_with_retries("status.json", self._status("success"))

    def fail(self, error: dict[str, Any]) -> None:
        self._has_ended.set()
        with self._lock:
            self._write_with_retries("status.json", self._status("failed", error=error))

    def _beat(self) -> None:
        while not self._has_ended.wait(self._interval):
            try:
                self._write("running")
            except Exception as error:  # noqa: BLE001  # any error of the folder; the task goes on
                log.warning("container.heartbeat_failed error=%s: it is retried", error)

    def _write(self, status: str) -> None:
        with self._lock:
            if not self._has_ended.is_set() and self._folder is not None:
                self._folder.write("status.json", self._status(status))

    def _status(self, status: str, **more: Any) -> bytes:
        return msgspec.json.encode({"status": status, "heartbeat": time.time(), **self._common_fields, **more})

    def _write_with_retries(self, file: str, data: bytes) -> None:
        """Write a file that must not be lost, with retries."""
        for number in range(1, _MAX_TRIES + 1):
            try:
                if self._folder is not None:
                    self._folder.write(file, data)
                return
            except Exception as error:
                if number == _MAX_TRIES:
                    raise
                log.warning("container.write_failed file=%s error=%s: it is retried", file, error)
                time.sleep(_PAUSE * number)


def run(call: Callable[[], Any], board: Board) -> int:
    """Call a function, write its end to the board, and print its result as the last line. Return the exit code."""
    board.begin()  # if the first status cannot be written, the function is not called
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if main else None
    try:
        output = _encoded_result(call)
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end is being written
        board.succeed(output)
    except BaseException as error:  # noqa: BLE001  # whatever ends the function is its failure
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        board.fail(_error_fields(error))
        traceback.print_exception(error)
        return TERMINATED if isinstance(error, Terminated) else FAILED
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + output + b"\n")
    sys.stdout.buffer.flush()
    return 0


def _encoded_result(call: Callable[[], Any]) -> bytes:
    value = call()
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    data = msgspec.to_builtins(value, str_keys=True)
    if (reason := unstorable(data)) is not None:
        raise GiveUp(f"The work is done, but its result is not plain data: {reason}.")
    return msgspec.json.encode(data)


def _error_fields(error: BaseException) -> dict[str, Any]:
    detail = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
    message = "It was terminated (SIGTERM)." if isinstance(error, Terminated) else str(error)
    is_final = isinstance(error, GiveUp)
    return {"kind": type(error).__name__, "message": message[:_MAX_TEXT], "retryable": not is_final, "detail": detail}


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated
