"""Commands on the machine of the worker, which outlive the worker that started them.

A small shell process (`keeper.sh`), in a session of its own, starts the command and writes down how it ended
(`spool.py`). Whoever watches waits for the end of the keeper, which the kernel tells (pidfd); a worker that is started
after the first has died finds the keeper by its number and the time at which it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from orchestrator.domain.executors.execution import Broken, Execution, Finished, Outcome
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.process import Process
from orchestrator.errors import GiveUp
from orchestrator.workers.executors.protocol import Gone, Setup, Watcher
from orchestrator.workers.executors.spool import Keeper, Spool, open_root

_LOOK = 0.5
"""Seconds between two looks at what a command says."""
_KEEPER = str(Path(__file__).with_name("keeper.sh"))
_SHELL = "/bin/sh"
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_DEFAULT = [getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGTERM", "SIGPIPE", "SIGXFSZ", "SIGCHLD")]
_START = 10.0
"""Seconds in which a keeper has begun."""
_MARGIN = 1_000
"""Bytes that JSON may have beyond the result that it holds."""


class ProcessExecutor:
    """Starts, watches and ends commands."""

    options: ClassVar[type[ExecutorOptions]] = Process

    def __init__(self, setup: Setup) -> None:
        self._commands = setup.commands
        self._largest = setup.settings.max_payload + _MARGIN
        self._host = socket.gethostname()
        self._root = open_root(re.sub(r"\W", "-", setup.settings.namespace))

    async def submit(self, execution: Execution) -> str:
        """Start the command, unless that was done."""
        spool = self._spool(execution)
        keeper = spool.keeper()
        if keeper is None:
            options = _options(execution)
            program = self._program(options.command[0])
            input = b"" if options.input != "stdin" else msgspec.json.encode(_input(execution))
            spool.prepare(input, execution.specification)
            pid = _spawn(spool, options, program, _environment(execution, options, spool))
            keeper = await self._begun(spool, pid)
        return f"{self._host} {keeper.pid} {keeper.started}"

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Return how the command ended, once it has."""
        host = external_id.partition(" ")[0]
        if host != self._host:
            raise Gone(f"it was on the machine {host}, of which no worker is left")
        spool, options = self._spool(execution), _options(execution)
        keeper = spool.keeper()
        if keeper is None:
            raise Gone(f"there is nothing of it in {spool.folder}")
        while not await _ended(keeper, _LOOK):
            for line in spool.new_lines():
                watcher.log(line, level="warning" if "error" in line.lower() else "info")
        while lines := spool.new_lines(is_last=True):
            for line in lines:
                watcher.log(line)
        code = spool.exit_code()
        if code is None:
            raise Gone("the process that kept it was killed, or its machine was started again")
        return self._result(options, spool, watcher) if code == 0 else _failure(options, spool, code)

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002  # it has a name
        """End all processes of the command: SIGTERM, and SIGKILL after its grace."""
        keeper = self._spool(execution).keeper()
        if keeper is None or not keeper.is_alive():
            return
        keeper.signal_group(signal.SIGTERM)
        if not await _ended(keeper, _options(execution).grace):
            keeper.signal_group(signal.SIGKILL)
            await _ended(keeper, _START)
        else:
            keeper.signal_group(signal.SIGKILL)  # those whom the command has left behind

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Remove the folder."""
        self._spool(execution).remove()

    async def close(self) -> None:
        """Nothing is open."""

    def _spool(self, execution: Execution) -> Spool:
        return Spool(self._root, execution.name)

    def _program(self, program: str) -> str:
        """Return where a program is, if it may be run and is there."""
        if ".." in program.split("/") or not any(fnmatchcase(program, allowed) for allowed in self._commands):
            allowed = ", ".join(self._commands) or "no program"
            raise GiveUp(
                f"Executor process: this worker may not run {program!r}; it allows {allowed}. Start it with "
                f"--allow-command {program}."
            )
        found = shutil.which(program, path=os.environ.get("PATH", _PATH))
        if found is None:
            raise GiveUp(f"Executor process: there is no program {program!r} on {self._host} that can be run.")
        return found

    async def _begun(self, spool: Spool, pid: int) -> Keeper:
        async with asyncio.timeout(_START):
            while (keeper := spool.keeper()) is None:
                await asyncio.sleep(0.002)
        if keeper.pid != pid:  # another was faster, and this one ends at once
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        return keeper

    def _result(self, options: Process, spool: Spool, watcher: Watcher) -> Outcome:
        data = spool.output(self._largest)
        if data is None:
            return Broken(
                "OutputTooLarge",
                f"The command wrote more than {self._largest:,} bytes to stdout, and at most "
                f"{self._largest - _MARGIN:,} are allowed (setting max_payload).",
                retryable=False,
            )
        if options.output == "none" or not data.strip():
            return Finished(None)
        if options.output == "text":
            return Finished(data.decode(errors="replace"))
        if options.output == "last_line":
            *said, data = data.rstrip().split(b"\n")
            for line in said:
                watcher.log(line.decode(errors="replace"))
        try:
            return Finished(msgspec.json.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            shown = data[:200].decode(errors="replace")
            return Broken("InvalidOutput", f"What the command wrote to stdout is no JSON: {error}. It begins: {shown}")


def _options(execution: Execution) -> Process:
    assert isinstance(execution.options, Process)
    return execution.options


def _input(execution: Execution) -> Any:
    return {**execution.input, "arguments": execution.arguments} if execution.arguments else execution.input


def _environment(execution: Execution, options: Process, spool: Spool) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    known = {
        "TASK_SPEC_PATH": str(spool.folder / "spec.json"),
        "TASK_EXECUTION": execution.name,
        "TASK_ID": execution.task_id,
        "TASK_NAME": execution.task,
        "TASK_ATTEMPT": str(execution.attempt),
        "TASK_RUN_ID": execution.run_id or "",
        "TASK_STEP": execution.step or "",
    }
    return {"PATH": _PATH, **passed, **options.env, **{name: value for name, value in known.items() if value}}


def _spawn(spool: Spool, options: Process, program: str, environment: dict[str, str]) -> int:
    """Start a keeper, without a copy of this process; return its number."""
    limits = (options.cpu, None if options.memory is None else max(1, options.memory // 1024), options.files)
    place = options.cwd or str(spool.folder / "work")
    arguments = [_SHELL, _KEEPER, str(spool.folder), place, *("-" if one is None else str(one) for one in limits)]
    written = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        _SHELL,
        [*arguments, program, *options.command[1:]],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, str(spool.folder / "input"), os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(spool.folder / "stdout"), written, 0o600),
            (os.POSIX_SPAWN_OPEN, 2, str(spool.folder / "stderr"), written, 0o600),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=_DEFAULT,
    )


async def _ended(keeper: Keeper, timeout: float) -> bool:
    """Wait until a keeper has ended, for so many seconds at most; say whether it has."""
    try:
        descriptor = os.pidfd_open(keeper.pid)
    except (ProcessLookupError, OSError):
        return not keeper.is_alive()
    loop = asyncio.get_running_loop()
    try:
        if not keeper.is_alive():
            return True
        ended = asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), timeout)
        return ended.is_set()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(keeper.pid, os.WNOHANG)


def _failure(options: Process, spool: Spool, code: int) -> Broken:
    retryable = options.retry_on is None or code in options.retry_on
    if code > 128:
        with contextlib.suppress(ValueError):
            name = signal.Signals(code - 128).name
            return Broken("Killed", f"The command was ended by {name}.", retryable, spool.last_words())
    return Broken("ExitCode", f"The command ended with exit code {code}.", retryable, spool.last_words())
