"""Runs one task to its end, and writes its status where the executor can read it.

    status.json   running, since when, and a heartbeat every ten seconds; then success or failed
    output.json   the result; it is there before the status says success

A process that is killed leaves `running` behind, with a heartbeat that grows old.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.domain.plain import unstorable
from orchestrator.errors import GiveUp
from orchestrator.telemetry import get_logger
from orchestrator.workers.container.folders import Folder

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
        """Say what it failed of."""
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
