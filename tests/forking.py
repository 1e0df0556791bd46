"""Programs without the second that Python needs to load the product: forked from a process that has loaded it.

As a program, this file is that process. It is sent what to start, with the files of the new process and a socket for
each: there it reports the id of the new process, and then its exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSCTTY
from types import ModuleType
from typing import IO, Any, NoReturn

_LOADED = (
    *("api.app", "cli.dev.command", "cli.fleet.scheduler", "cli.fleet.worker", "cli.runs.commands", "cli.system.api"),
    *("cli.system.status", "cli.tasks.commands", "cli.tasks.enqueue", "sdk.app"),
)
_START_MATTERS = frozenset(("--max-memory",))
_ONLY_AT_THE_START = ("PYTHON", "OTEL_", "LD_", "PLANTED")
"""Variables that Python and libraries read when they are loaded, and those that no other process may read."""


class Forked:
    """A process that was forked: the part of `subprocess.Popen` that tests use."""

    def __init__(self, reports: socket.socket, stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self._reports = reports
        self._rest = b""
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self.pid = self._next_number(None)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self._end(0.0)
            except BlockingIOError:
                return None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            try:
                self._end(timeout)
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()

    def _end(self, timeout: float | None) -> None:
        self.returncode = self._next_number(timeout)
        self._reports.close()

    def _next_number(self, timeout: float | None) -> int:
        self._reports.settimeout(timeout)
        while b"\n" not in self._rest:
            more = self._reports.recv(100)
            assert more, "the process that forks has ended"
            self._rest += more
        number, _, self._rest = self._rest.partition(b"\n")
        return int(number)


Program = subprocess.Popen[str] | Forked


class Forking:
    """The process that forks, once it is needed; of this Python, or of another that has the product too."""

    def __init__(self, python: Path | str = sys.executable) -> None:
        self._python = python
        self._orders: socket.socket | None = None

    def begin(
        self,
        *words: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | str = ".",
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.DEVNULL,
    ) -> Program:
        """Start Python with these words, in a session of its own: forked, unless the program would notice."""
        given = os.environ if environment is None else environment
        others = {name for name, value in given.items() if os.environ.get(name) != value} - {"PYTHONUNBUFFERED"}
        if any(name.startswith(_ONLY_AT_THE_START) for name in others) or _START_MATTERS & set(words):
            return subprocess.Popen(
                [self._python, *words],
                cwd=folder,
                env=given,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        with ExitStack() as opened:
            pipes: list[IO[str] | None] = []
            files: list[int] = []
            for number, file in enumerate((stdin, stdout, stderr)):
                pipe = None
                if file == subprocess.PIPE:
                    ours, theirs = os.pipe()
                    opened.callback(os.close, theirs)
                    pipe, file = os.fdopen(ours, encoding="utf-8"), theirs
                elif file == subprocess.DEVNULL:
                    file = opened.enter_context(Path(os.devnull).open("r+b"))
                elif file == subprocess.STDOUT:
                    file = files[1]
                if number:
                    pipes.append(pipe)
                files.append(file if isinstance(file, int) else file.fileno())
            reports, theirs_ = socket.socketpair()
            order = json.dumps([words, dict(given), str(Path(folder).absolute())]).encode()
            with theirs_:
                socket.send_fds(self._started(), [order], [theirs_.fileno(), *files])
        return Forked(reports, *pipes)

    def run(
        self,
        *words: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | str = ".",
        input: str = "",
        timeout: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these words to its end; return what it prints, and its exit code."""
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as stdin,
            tempfile.TemporaryFile("w+", encoding="utf-8") as stdout,
            tempfile.TemporaryFile("w+", encoding="utf-8") as stderr,
        ):
            stdin.write(input)
            stdin.seek(0)
            program = self.begin(
                *words, environment=environment, folder=folder, stdin=stdin, stdout=stdout, stderr=stderr
            )
            try:
                code = program.wait(timeout)
            except BaseException:
                program.kill()
                raise
            for file in (stdout, stderr):
                file.seek(0)
            return subprocess.CompletedProcess(words, code, stdout.read(), stderr.read())

    def _started(self) -> socket.socket:
        if self._orders is None:
            self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process = subprocess.Popen(
                [self._python, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
            theirs.close()
            atexit.register(process.wait)
            atexit.register(self._orders.close)
        return self._orders


FORKING = Forking()


def begin(*words: str, **options: Any) -> Program:
    """Start a command of ours; the options are those of `Forking.begin`."""
    return FORKING.begin("-m", "orchestrator", *words, **options)


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of ours to its end; the options are those of `Forking.run`."""
    return FORKING.run("-m", "orchestrator", *words, **options)


def _main(orders: socket.socket) -> None:
    for module in _LOADED:
        importlib.import_module(f"orchestrator.{module}")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 1_000_000, 4)
        if not order:
            return  # those who ask are gone
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    orders.close()
    reports, *files = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        for descriptor in files:
            os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        try:
            os.write(reports, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        finally:
            os._exit(0)
    os.setsid()
    os.write(reports, f"{os.getpid()}\n".encode())
    os.close(reports)
    for number, (name, descriptor) in enumerate(zip(("stdin", "stdout", "stderr"), files, strict=True)):
        os.dup2(descriptor, number)
        os.close(descriptor)
        _open_again(name, number)
    if os.isatty(0):
        ioctl(0, TIOCSCTTY, 0)
    try:
        _become(*json.loads(order))
    except SystemExit as exit:
        if exit.code is not None and not isinstance(exit.code, int):
            raise
        _end(exit.code or 0)
    _end(0)


def _end(code: int) -> NoReturn:
    """End as Python does, but do not tidy modules away one by one: it would copy all that is shared, in 0.1 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _open_again(name: str, number: int) -> None:
    """Replace a stream that remembers what kind of file it was opened on."""
    old: io.TextIOWrapper = getattr(sys, name)
    raw: Any = open(number, "wb" if number else "rb", buffering=0 if number else -1, closefd=False)  # noqa: SIM115
    new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=bool(number))
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)


def _become(words: list[str], environment: dict[str, str], folder: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.path[0] = folder
    kind, *rest = words
    if kind == "-m" and rest[0] == "orchestrator":
        sys.argv = rest
        importlib.import_module("orchestrator.cli").main(prog_name="orchestrator")
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path[0] = str(Path(folder, kind).parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
