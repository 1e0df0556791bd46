"""Commands of ours without the second that Python needs to load them: forked from a process that has.

As a program, it is that process. It is sent what to start, with a socket for each: there it says the id of the new
process, and how that has ended.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_LOADED = ("cli.fleet.scheduler", "cli.fleet.worker", "cli.system.api", "api.app")
_START_MATTERS = ("--max-memory",)
_ONLY_AT_THE_START = ("PYTHON", "OTEL_", "LD_", "PLANTED")
"""What Python and libraries read when they are loaded, and what no other process may read."""


class Forked:
    """A process that was forked: what there is of `subprocess.Popen` here."""

    def __init__(self, said: socket.socket) -> None:
        self._said = said
        self._rest = b""
        self._code: int | None = None
        self.pid = self._next_number(None)

    def poll(self) -> int | None:
        if self._code is None:
            try:
                self._end(0.0)
            except BlockingIOError:
                return None
        return self._code

    def wait(self, timeout: float) -> int:
        if self._code is None:
            try:
                self._end(timeout)
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from None
        assert self._code is not None
        return self._code

    def _end(self, timeout: float) -> None:
        self._code = self._next_number(timeout)
        self._said.close()

    def _next_number(self, timeout: float | None) -> int:
        self._said.settimeout(timeout)
        while b"\n" not in self._rest:
            more = self._said.recv(100)
            assert more, "the process that forks has ended"
            self._rest += more
        number, _, self._rest = self._rest.partition(b"\n")
        return int(number)


class Forking:
    """The process that forks, once it is needed."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None

    def can_start(self, arguments: list[str], environment: Mapping[str, str]) -> bool:
        """Say whether what is started would not notice."""
        others = {name for name, value in environment.items() if os.environ.get(name) != value} - {"PYTHONUNBUFFERED"}
        return not any(name.startswith(_ONLY_AT_THE_START) for name in others) and not (
            set(arguments) & set(_START_MATTERS)
        )

    def start(self, arguments: list[str], environment: Mapping[str, str], log: Path, folder: Path) -> Forked:
        if self._orders is None:
            self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
            theirs.close()
            atexit.register(process.wait)
            atexit.register(self._orders.close)
        ours, theirs = socket.socketpair()
        with theirs:
            order = json.dumps([arguments, dict(environment), str(log), str(folder)]).encode()
            socket.send_fds(self._orders, [order], [theirs.fileno()])
        return Forked(ours)


FORKING = Forking()


def _main(orders: socket.socket) -> None:
    for module in _LOADED:
        importlib.import_module(f"orchestrator.{module}")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 1_000_000, 1)
        if not order:
            return  # those who ask are gone
        if os.fork() == 0:
            break
        os.close(descriptors[0])
    orders.close()
    (descriptor,) = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        try:
            os.write(descriptor, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        finally:
            os._exit(0)
    os.setsid()
    os.write(descriptor, f"{os.getpid()}\n".encode())
    os.close(descriptor)
    _become(*json.loads(order))


def _become(arguments: list[str], environment: dict[str, str], log: str, folder: str) -> None:
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.path[0] = folder
    sys.argv = ["orchestrator", *arguments]
    importlib.import_module("orchestrator.cli").main(prog_name="orchestrator")


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
