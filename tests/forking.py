"""Start programs quickly: fork them from a process that has imported the product, which takes a second.

Run as a program, this file is that process. For each program it receives the arguments, the standard files and a
socket, on which it reports the process id and then the exit code.
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

_PRELOADED = (
    *("api.app", "cli.dev.command", "cli.fleet.scheduler", "cli.fleet.worker", "cli.runs.commands", "cli.system.api"),
    *("cli.system.status", "cli.tasks.commands", "cli.tasks.enqueue", "sdk.app"),
)
_UNFORKABLE_OPTIONS = frozenset(("--max-memory",))
_UNFORKABLE_VARIABLES = ("PYTHON", "OTEL_", "LD_", "PLANTED")
"""Prefixes of variables that Python or libraries read at import, or that no other process may read."""


class Forked:
    """A forked process, with the part of `subprocess.Popen` that tests use."""

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
    """The forking process, started on first use. `python` may belong to another environment with the product."""

    def __init__(self, python: Path | str = sys.executable) -> None:
        self._python = python
        self._requests: socket.socket | None = None

    def begin(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | str = ".",
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.DEVNULL,
    ) -> Program:
        """Run Python with these arguments in a new session. Fork unless options or variables need a new process."""
        variables = os.environ if environment is None else environment
        changed = {name for name, value in variables.items() if os.environ.get(name) != value} - {"PYTHONUNBUFFERED"}
        if any(name.startswith(_UNFORKABLE_VARIABLES) for name in changed) or _UNFORKABLE_OPTIONS & set(arguments):
            return subprocess.Popen(
                [self._python, *arguments],
                cwd=folder,
                env=variables,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        with ExitStack() as cleanup:
            pipes: list[IO[str] | None] = []
            files: list[int] = []
            for number, file in enumerate((stdin, stdout, stderr)):
                pipe = None
                if file == subprocess.PIPE:
                    ours, theirs = os.pipe()
                    cleanup.callback(os.close, theirs)
                    pipe, file = os.fdopen(ours, encoding="utf-8"), theirs
                elif file == subprocess.DEVNULL:
                    file = cleanup.enter_context(Path(os.devnull).open("r+b"))
                elif file == subprocess.STDOUT:
                    file = files[1]
                if number:
                    pipes.append(pipe)
                files.append(file if isinstance(file, int) else file.fileno())
            reports, theirs_ = socket.socketpair()
            request = json.dumps([arguments, dict(variables), str(Path(folder).absolute())]).encode()
            with theirs_:
                socket.send_fds(self._connected(), [request], [theirs_.fileno(), *files])
        return Forked(reports, *pipes)

    def run(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | str = ".",
        input: str = "",
        timeout: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments; return its exit code and output."""
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as stdin,
            tempfile.TemporaryFile("w+", encoding="utf-8") as stdout,
            tempfile.TemporaryFile("w+", encoding="utf-8") as stderr,
        ):
            stdin.write(input)
            stdin.seek(0)
            program = self.begin(
                *arguments, environment=environment, folder=folder, stdin=stdin, stdout=stdout, stderr=stderr
            )
            try:
                code = program.wait(timeout)
            except BaseException:
                program.kill()
                raise
            for file in (stdout, stderr):
                file.seek(0)
            return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())

    def _connected(self) -> socket.socket:
        if self._requests is None:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process = subprocess.Popen(
                [self._python, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
            theirs.close()
            atexit.register(process.wait)
            atexit.register(self._requests.close)
        return self._requests


FORKING = Forking()


def begin(*arguments: str, **options: Any) -> Program:
    """Start an `orchestrator` command; the options are those of `Forking.begin`."""
    return FORKING.begin("-m", "orchestrator", *arguments, **options)


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run an `orchestrator` command to its end; the options are those of `Forking.run`."""
    return FORKING.run("-m", "orchestrator", *arguments, **options)


def _main(requests: socket.socket) -> None:
    for module in _PRELOADED:
        importlib.import_module(f"orchestrator.{module}")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1_000_000, 4)
        if not request:
            return  # the test process has ended
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    requests.close()
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
        _reopen(name, number)
    if os.isatty(0):
        ioctl(0, TIOCSCTTY, 0)
    try:
        _run_program(*json.loads(request))
    except SystemExit as exit:
        if exit.code is not None and not isinstance(exit.code, int):
            raise
        _end(exit.code or 0)
    _end(0)


def _end(code: int) -> NoReturn:
    """Exit without tearing down modules: that would copy all shared memory pages, in 0.1 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _reopen(name: str, number: int) -> None:
    """Replace a standard stream, because it remembers the type of file it was opened on."""
    old: io.TextIOWrapper = getattr(sys, name)
    raw: Any = open(number, "wb" if number else "rb", buffering=0 if number else -1, closefd=False)  # noqa: SIM115
    new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=bool(number))
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)


def _run_program(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.path[0] = folder
    first, *rest = arguments
    if first == "-m" and rest[0] == "orchestrator":
        sys.argv = rest
        importlib.import_module("orchestrator.cli").main(prog_name="orchestrator")
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(folder, first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
