"""Starts the keepers of commands, and detects their end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from orchestrator.domain.executors.builtin import Process
from orchestrator.workers.executors.protocol import Unequipped, Unreachable
from orchestrator.workers.executors.spool import Keeper, Spool

_KEEPER = str(Path(__file__).with_name("keeper.sh"))
_SHELL = "/bin/sh"
_DEFAULT_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGTERM", "SIGPIPE", "SIGXFSZ", "SIGCHLD")]
_START_TIMEOUT = 10.0
"""Seconds within which a keeper must begin."""
KILLED = 10.0
"""Seconds within which killed processes must be gone."""
_POLL_INTERVAL = 0.05
_NOT_STARTED = f"the command has not begun within {_START_TIMEOUT:g} s; this machine may be too busy"
_EXHAUSTED = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT})
"""Errors of a system without room for more processes, descriptors or data."""


async def begin(spool: Spool, options: Process, command: list[str], environment: dict[str, str]) -> Keeper:
    """Start a keeper, and return it. If another keeper was faster, return that one."""
    try:
        reader, writer = os.pipe()
    except OSError as error:
        raise as_unreachable(error) from error
    try:
        try:
            pid = _spawn(spool, options, command, environment, writer)
        except OSError as error:
            raise as_unreachable(error) from error
        finally:
            os.close(writer)
        async with asyncio.timeout(_START_TIMEOUT):
            await _readable(reader)
        keeper = await keeper_of(spool)
    except TimeoutError:
        raise Unreachable(_NOT_STARTED) from None
    finally:
        os.close(reader)
    if keeper.pid != pid:  # another keeper was faster, and this one ends at once
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return keeper


async def keeper_of(spool: Spool) -> Keeper:
    """Wait until the keeper file is written, and return its process."""
    try:
        async with asyncio.timeout(_START_TIMEOUT):
            while (keeper := spool.keeper()) is None:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise Unreachable(_NOT_STARTED) from None
    return keeper


@contextmanager
def on_keeper_end(keeper: Keeper, call: Callable[[], None]) -> Iterator[None]:
    """Return a context in which `call` is called on the event loop when a keeper ends; at once if it has ended."""
    try:
        descriptor = os.pidfd_open(keeper.pid) if keeper.is_alive() else None
    except ProcessLookupError:
        descriptor = None
    except OSError as error:
        raise as_unreachable(error) from error
    if descriptor is None:
        call()
        _reap(keeper)
        yield
        return
    loop = asyncio.get_running_loop()
    try:
        if not keeper.is_alive():
            call()
        else:
            loop.add_reader(descriptor, call)
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        _reap(keeper)


def _reap(keeper: Keeper) -> None:
    """Reap an ended keeper, which may not be a child of this process."""
    if keeper.pid:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(keeper.pid, os.WNOHANG)


async def has_ended(keeper: Keeper, timeout: float) -> bool:
    """Wait for a keeper to end, for at most `timeout` seconds. Return whether it has ended."""
    ended = asyncio.Event()
    with on_keeper_end(keeper, ended.set), contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), timeout)
    return ended.is_set()


async def end_all(
    keeper: Keeper, grace: float, call: Callable[[Callable[[], list[int]]], Awaitable[list[int]]]
) -> bool:
    """End the processes left by a killed keeper: SIGTERM, then SIGKILL after `grace`. Return whether they ended."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, KILLED)):
        give_up_at = time.monotonic() + seconds
        for pid in (remaining := await call(keeper.left_behind)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        while remaining and time.monotonic() < give_up_at:
            await asyncio.sleep(_POLL_INTERVAL)
            remaining = await call(keeper.left_behind)
        if not remaining:
            return True
    return False


async def _readable(descriptor: int) -> None:
    """Wait until a descriptor is readable or closed."""
    loop, is_ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, is_ready.set)
    try:
        await is_ready.wait()
    finally:
        loop.remove_reader(descriptor)


def _spawn(spool: Spool, options: Process, command: list[str], environment: dict[str, str], writer: int) -> int:
    """Start a keeper with `posix_spawn` and return its pid. The keeper closes `writer` when it has begun."""
    limits = (options.cpu, None if options.memory is None else max(1, options.memory // 1024), options.files)
    folder = options.cwd or str(spool.folder / "work")
    arguments = [_SHELL, _KEEPER, str(spool.folder), folder, *("-" if size is None else str(size) for size in limits)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        _SHELL,
        [*arguments, *command],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, str(spool.folder / "input"), os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull if options.output == "none" else str(spool.stdout), flags, 0o600),
            (os.POSIX_SPAWN_OPEN, 2, str(spool.folder / "stderr"), flags, 0o600),
            (os.POSIX_SPAWN_DUP2, writer, 3),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=_DEFAULT_SIGNALS,
    )


@contextmanager
def needing_disk() -> Iterator[None]:
    """Return a context in which a full or read-only disk hands the task back, because it has not begun."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise Unequipped(
            f"Executor process: the command cannot be prepared below {tempfile.gettempdir()}: {error.strerror}. Make "
            f"room there, or set TMPDIR to a folder with room, and restart the worker."
        ) from error


def as_unreachable(error: OSError) -> Exception:
    """Return an error as Unreachable if it is a temporary lack of resources."""
    return Unreachable(f"this machine has no room for it now: {error.strerror}") if error.errno in _EXHAUSTED else error


# -- notification of writes to files (inotify), instead of polling
#
# Python has no function for that, so this calls the C library. If a limit of the user is reached, the caller polls.

_MODIFIED = 0x2
_EVENT = struct.Struct("iIII")
_READ_SIZE = 65_536


class FileWatcher:
    """Watches files for writes. Belongs to one event loop."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._waiting: dict[int, asyncio.Event] = {}

    @contextmanager
    def notifying(self, path: Path, tick: asyncio.Event) -> Iterator[bool]:
        """Set `tick` whenever the file is written. Yield False if that does not work, so that the caller must poll."""
        watch = self._add_watch(path)
        if watch < 0:
            yield False
            return
        self._waiting[watch] = tick
        try:
            yield True
        finally:
            if self._waiting.get(watch) is tick:
                del self._waiting[watch]
                if self._descriptor >= 0:
                    _libc().inotify_rm_watch(self._descriptor, watch)

    def close(self) -> None:
        """Stop all notifications."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _add_watch(self, path: Path) -> int:
        if self._descriptor < 0:
            self._descriptor = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._descriptor < 0:
                return -1
            asyncio.get_running_loop().add_reader(self._descriptor, self._dispatch)
        return int(_libc().inotify_add_watch(self._descriptor, os.fsencode(path), _MODIFIED))

    def _dispatch(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data, offset = os.read(self._descriptor, _READ_SIZE), 0
            while offset < len(data):
                watch, _, _, length = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size + length
                if watch < 0:  # the kernel's queue has overflowed
                    for tick in self._waiting.values():
                        tick.set()
                elif (waiter := self._waiting.get(watch)) is not None:
                    waiter.set()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
