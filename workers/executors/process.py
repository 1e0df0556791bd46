"""Runs commands on the worker's machine, which outlive the worker that started them.

A small shell process (`keeper.sh`), in a session of its own, starts the command and writes its exit code to a file
(`spool.py`). A watcher waits for the end of the keeper by pidfd, and for output of the command by inotify. If the
worker dies, a later worker finds the keeper by its pid and start time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from orchestrator.domain.executors.builtin import Process
from orchestrator.domain.executors.options import Broken, Execution, ExecutorOptions, Finished, Outcome, strict_json
from orchestrator.domain.executors.record import matches_program
from orchestrator.domain.plain import MAX_LEVELS, is_too_deep
from orchestrator.environment import INHERITED_VARIABLES
from orchestrator.errors import ConfigurationError, GiveUp
from orchestrator.workers.executors.keeping import (
    KILLED,
    FileWatcher,
    as_unreachable,
    begin,
    end_all,
    has_ended,
    keeper_of,
    needing_disk,
    on_keeper_end,
)
from orchestrator.workers.executors.protocol import Gone, Setup, Unequipped, Unreachable, Watcher
from orchestrator.workers.executors.spool import Keeper, Spool, open_root, root_of, sweep
from orchestrator.workers.reporting.lines import BY_LINE

T = TypeVar("T")

_READ_INTERVAL = 0.2
"""Seconds between two reads of a command's output while it writes."""
_MAX_PARTS = 16
"""Parts of the output that are read at once."""
_PATH = "/usr/local/bin:/usr/bin:/bin"
_THREADS = 4
_SWEEP_INTERVAL = 3_600.0
"""Seconds between two cleanups of folders that dead workers have left."""
_MARGIN = 1_000
"""Bytes that the JSON text may exceed the result by."""


class ProcessExecutor:
    """Starts, watches and ends commands."""

    options: ClassVar[type[ExecutorOptions]] = Process

    def __init__(self, setup: Setup) -> None:
        self._commands = setup.commands
        self._max_output = setup.settings.max_payload + _MARGIN
        self._host = socket.gethostname()
        self._namespace = re.sub(r"\W", "-", setup.settings.namespace)
        with needing_disk():
            self._root = open_root(self._namespace)
        self._file_watcher = FileWatcher()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="process")
        self._swept = time.monotonic()

    async def submit(self, execution: Execution) -> str:
        """Start the command, unless that was done."""
        if time.monotonic() - self._swept > _SWEEP_INTERVAL:
            self._swept = time.monotonic()
            await self._call(partial(sweep, self._root))
        spool = self._spool(execution)
        keeper = await self._call(spool.keeper)
        if keeper is None:
            options = _options(execution)
            program = self._program(options.command[0])
            account = None if options.user is None else account_of(options.user)
            input = (
                b""
                if options.input != "stdin"
                else strict_json(_input(execution), f"The input of task {execution.task!r}")
            )
            await self._call(partial(_prepare, spool, input, execution.specification))
            environment, command = _environment(execution, options, spool), [program, *options.command[1:]]
            if account is not None:
                await self._call(partial(spool.grant_access, account.uid, account.gid))
                environment, command = {**environment, "HOME": account.home, **options.env}, [*account.prefix, *command]
            keeper = await begin(spool, options, command, environment)
        return f"{self._host} {keeper.pid} {keeper.started or '-'} {spool.folder}"

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Wait for the command to end, and return its outcome."""
        host = external_id.partition(" ")[0]
        if host != self._host:
            raise Gone(f"it was on the machine {host}, which has no worker now")
        spool, options = self._spool(execution, external_id), _options(execution)
        keeper = await self._call(spool.keeper)
        if keeper is None:
            if (other := _keeper(external_id)) is not None and other.is_alive():
                raise Unreachable(
                    f"process {other.pid} keeps the command, but its folder {spool.folder} cannot be reached from here"
                )
            raise Gone(f"there is no trace of it in {spool.folder}")
        is_too_large = await self._follow_output(keeper, spool, watcher)
        if is_too_large:
            keeper.signal_group(signal.SIGKILL)  # at once: it fills the disk
            await has_ended(keeper, KILLED)
        elif await self._call(spool.exit_code) is None and not await end_all(keeper, options.grace, self._call):
            raise Unreachable(f"process {keeper.pid}, which kept the command, was killed, but the command does not end")
        watcher.ended()
        await self._read_rest(spool, watcher)
        if is_too_large:
            return self._too_large()
        text, outcome = await self._call(partial(self._collect, options, spool))
        if text:
            await self._call(partial(watcher.log, text))
        return outcome

    async def cancel(self, execution: Execution, external_id: str) -> None:
        """End all processes of the command: SIGTERM, and SIGKILL after its grace period."""
        spool = self._spool(execution, external_id)
        if not external_id and await self._call(spool.forbid):
            return  # a keeper that is just starting finds that it must not begin
        keeper = await keeper_of(spool) if not external_id else await self._call(spool.keeper) or _keeper(external_id)
        if keeper is None:
            return
        if not keeper.is_alive():
            await end_all(keeper, _options(execution).grace, self._call)  # the keeper may have been killed alone
            return
        keeper.signal_group(signal.SIGTERM)
        if not await has_ended(keeper, _options(execution).grace):
            keeper.signal_group(signal.SIGKILL)
            await has_ended(keeper, KILLED)
        else:
            keeper.signal_group(signal.SIGKILL)  # processes that the command has left behind

    async def drain_output(self, execution: Execution, external_id: str, watcher: Watcher) -> None:
        """Log the remaining output of a command that was cancelled or timed out."""
        if external_id.partition(" ")[0] == self._host:
            await self._read_rest(self._spool(execution, external_id), watcher)

    async def release(self, execution: Execution, external_id: str) -> None:
        """Remove the folder."""
        await self._call(self._spool(execution, external_id).remove)

    async def close(self) -> None:
        """Stop watching files, and close the threads."""
        self._file_watcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, call: Callable[[], T]) -> T:
        """Call a function that uses the disk, in a thread."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except OSError as error:
            raise as_unreachable(error) from error

    async def _follow_output(self, keeper: Keeper, spool: Spool, watcher: Watcher) -> bool:
        """Log the output of a command until it ends. Return whether the command has written too much before that."""
        ended, tick = asyncio.Event(), asyncio.Event()

        def end() -> None:
            ended.set()
            tick.set()

        with (
            on_keeper_end(keeper, end),
            self._file_watcher.notifying(spool.stderr, tick) as watches_stderr,
            self._file_watcher.notifying(spool.stdout, tick) as watches_stdout,
        ):
            is_notified = watches_stderr and watches_stdout
            tick.set()  # output from before the watch
            while not ended.is_set():
                await tick.wait()
                if is_notified:
                    tick.clear()
                for _ in range(_MAX_PARTS):
                    if ended.is_set() or not await self._read_part(spool, watcher):
                        break
                else:
                    tick.set()  # there may be more output without another notification
                if spool.needs_truncation():
                    await self._call(spool.truncate)
                if spool.has_written_more_than(self._max_output) and not ended.is_set():
                    return True
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _READ_INTERVAL)
        return False

    async def _read_part(self, spool: Spool, watcher: Watcher, end: int | None = None) -> bool:
        """Log a part of the command's output, up to offset `end` if it has ended. Return False if none is left."""
        if not spool.has_more(end):
            return False
        reading = asyncio.ensure_future(self._call(partial(_read_part, spool, watcher, end is not None)))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait([reading], timeout=_READ_INTERVAL)  # so that no other watcher logs the same part
            raise

    async def _read_rest(self, spool: Spool, watcher: Watcher) -> None:
        """Log the remaining output of a command. Another process may still write to the file."""
        end = spool.stderr_size()
        for _ in range(_MAX_PARTS):
            if not await self._read_part(spool, watcher, end):
                break
        await self._call(partial(spool.skip, end))
        while await self._read_part(spool, watcher, end):
            pass
        if dropped := await self._call(spool.dropped_bytes):
            watcher.log(f"at least {dropped:,} bytes of stderr were dropped: they came too fast", level="warning")

    def _spool(self, execution: Execution, external_id: str = "") -> Spool:
        """Return the folder of an execution, from the external id if possible: TMPDIR may differ between workers."""
        _, _, folder = external_id.partition(" /")
        return Spool(root_of(f"/{folder}", execution.name, self._namespace) or self._root, execution.name)

    def _program(self, program: str) -> str:
        """Return the path of a program, if the program is allowed and exists."""
        patterns = (
            [] if ".." in program.split("/") else [name for name in self._commands if matches_program(program, name)]
        )
        if not patterns:
            allowed = ", ".join(self._commands) or "no program"
            raise GiveUp(
                f"Executor process: this worker may not run {program!r}; it allows {allowed}. Start it with "
                f"--allow-command {program}."
            )
        path = shutil.which(program, path=os.environ.get("PATH", _PATH))
        if path is None:
            raise Unequipped(f"Executor process: there is no program {program!r} on {self._host} that can be run.")
        real = os.path.realpath(path)
        if not any(_is_inside(program, real, pattern) for pattern in patterns):
            raise GiveUp(
                f"Executor process: this worker may not run {program!r}, which leads to {real}; it allows "
                f"{', '.join(patterns)}. If that is intended, start it with --allow-command {program}."
            )
        return path

    def _collect(self, options: Process, spool: Spool) -> tuple[str, Outcome]:
        """Return the output to log, and the outcome of the command."""
        code = spool.exit_code()
        if not code and spool.has_written_more_than(self._max_output):
            return "", self._too_large()
        if code is None:
            raise Gone("the process that kept it was killed, or its machine was restarted")
        if code != 0:
            return "", _failure(options, spool, code)
        data = spool.output(self._max_output)
        text = b""
        if options.output == "text":
            return "", Finished(data.decode(errors="replace"))
        if options.output == "none" or not data.strip():
            return "", Finished(None)
        if options.output == "last_line":
            text, _, data = data.rstrip().rpartition(b"\n")
        return text.decode(errors="replace"), _parse_output(data)

    def _too_large(self) -> Broken:
        return Broken(
            "OutputTooLarge",
            f"The command wrote more than {self._max_output:,} bytes to stdout, and at most "
            f"{self._max_output - _MARGIN:,} are allowed (setting max_payload).",
            retryable=False,
        )


def _prepare(spool: Spool, input: bytes, specification: bytes) -> None:
    """Prepare the folder of a command. If the disk is full, leave no folder behind."""
    with needing_disk():
        try:
            spool.prepare(input, specification)
        except OSError:
            if spool.keeper() is None:
                spool.remove()
            raise


def _read_part(spool: Spool, watcher: Watcher, is_last: bool) -> bool:
    text = spool.new_lines(is_last=is_last)
    if text is not None:
        watcher.log(text, level=BY_LINE)
    return text is not None


def _is_inside(program: str, real: str, pattern: str) -> bool:
    """Return whether a program lies in the pattern's folder after following links, or is named in full."""
    folder, slash, names = pattern.rpartition("/")
    return (
        program == pattern
        or not slash
        or matches_program(real, f"{os.path.realpath(folder or slash).rstrip(slash)}/{names}")
    )


def _keeper(external_id: str) -> Keeper | None:
    """Return the keeper of a command from the external id."""
    _, pid, started, *_ = [*external_id.split(" "), "", ""]
    return Keeper(int(pid), started) if pid.isdigit() and int(pid) else None


def _parse_output(data: bytes) -> Outcome:
    try:
        output = msgspec.json.decode(data)
        if is_too_deep(output):
            raise RecursionError
        return Finished(output)
    except RecursionError:
        reason = f"The JSON that the command wrote to stdout is nested more than {MAX_LEVELS} levels deep."
        return Broken("UnreadableOutput", reason, retryable=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        excerpt = data[:200].decode(errors="replace")
        return Broken("InvalidOutput", f"The command's stdout is not valid JSON: {error}. It begins: {excerpt}")


def _options(execution: Execution) -> Process:
    assert isinstance(execution.options, Process)
    return execution.options


def _input(execution: Execution) -> Any:
    return {**execution.input, "arguments": execution.arguments} if execution.arguments else execution.input


def _environment(execution: Execution, options: Process, spool: Spool) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    variables = {
        "TASK_SPEC_PATH": str(spool.folder / "spec.json"),
        "TASK_EXECUTION": execution.name,
        "TASK_ID": execution.task_id,
        "TASK_NAME": execution.task,
        "TASK_ATTEMPT": str(execution.attempt),
        "TASK_RUN_ID": execution.run_id or "",
        "TASK_STEP": execution.step or "",
    }
    return {"PATH": _PATH, **inherited, **options.env, **{name: value for name, value in variables.items() if value}}


def _failure(options: Process, spool: Spool, code: int) -> Broken:
    retryable = options.retry_on is None or code in options.retry_on
    if code > 128:
        with contextlib.suppress(ValueError):
            name, reason = signal.Signals(code - 128).name, ""
            if options.cpu is not None and code - 128 == signal.SIGXCPU:
                reason = f": it used up its processor time, of which each process gets {options.cpu:,} s (option cpu)"
            return Broken("Killed", f"The command was ended by {name}{reason}.", retryable, spool.stderr_tail())
    return Broken("ExitCode", f"The command ended with exit code {code}.", retryable, spool.stderr_tail())


class Account(NamedTuple):
    """A user account, and the command prefix that switches to it."""

    uid: int
    gid: int
    home: str
    prefix: tuple[str, ...]
    """The arguments before the command."""


def account_of(user: str) -> Account:
    """Return an account of this machine. If commands cannot run as this user, the attempt fails.

    It is not handed back: a worker that hands a command back gets no more tasks with its program, for any user.
    """
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        machine = socket.gethostname()
        raise ConfigurationError(f"Executor process: there is no user {user!r} on machine {machine}.") from None
    program = shutil.which("setpriv")
    if os.geteuid() != 0 or program is None:
        lack = "the program setpriv (package util-linux)" if os.geteuid() == 0 else "to run as root"
        raise ConfigurationError(f"Executor process: to run commands as user {user!r}, this worker needs {lack}.")
    options = (f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups", "--no-new-privs", "--")
    return Account(entry.pw_uid, entry.pw_gid, entry.pw_dir, (program, *options))
