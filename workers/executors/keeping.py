"""Keepers of commands: how they are started, and how one hears that they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from orchestrator.domain.executors.builtin import Process
from orchestrator.workers.executors.protocol import Unreachable
from orchestrator.workers.executors.spool import Keeper, Spool

_KEEPER = str(Path(__file__).with_name("keeper.sh"))
_SHELL = "/bin/sh"
_DEFAULT = [getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGTERM", "SIGPIPE", "SIGXFSZ", "SIGCHLD")]
_START = 10.0
"""Seconds in which a keeper has begun."""
KILLED = 10.0
"""Seconds in which processes that were killed are gone."""
_LOOK_AGAIN = 0.05
_TOO_BUSY = f"the command has not begun within {_START:g} s; this machine may be too busy"
_FULL = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a system without room for more processes or descriptors."""


async def begin(spool: Spool, options: Process, command: list[str], environment: dict[str, str]) -> Keeper:
    """Start a keeper, and return it, or the one that was faster."""
    try:
        heard, told = os.pipe()
    except OSError as error:
        raise no_room(error) from error
    try:
        try:
            pid = _spawn(spool, options, command, environment, told)
        except OSError as error:
            raise no_room(error) from error
        finally:
            os.close(told)
        async with asyncio.timeout(_START):
            await _readable(heard)
        keeper = await keeper_of(spool)
    except TimeoutError:
        raise Unreachable(_TOO_BUSY) from None
    finally:
        os.close(heard)
    if keeper.pid != pid:  # another was faster, and this one ends at once
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return keeper


async def keeper_of(spool: Spool) -> Keeper:
    """Return the process that made the keeper's file; it may be about to write into it."""
    try:
        async with asyncio.timeout(_START):
            while (keeper := spool.keeper()) is None:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise Unreachable(_TOO_BUSY) from None
    return keeper


@contextmanager
def on_keeper_end(keeper: Keeper, call: Callable[[], None]) -> Iterator[None]:
    """Have something called when a keeper has ended, by the event loop; at once if it has."""
    try:
        descriptor = os.pidfd_open(keeper.pid) if keeper.is_alive() else None
    except ProcessLookupError:
        descriptor = None
    except OSError as error:
        raise no_room(error) from error
    if descriptor is None:
        call()
        _bury(keeper)
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
        _bury(keeper)


def _bury(keeper: Keeper) -> None:
    """Let the kernel forget a child that has ended; it may be no child of ours."""
    if keeper.pid:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(keeper.pid, os.WNOHANG)


async def has_ended(keeper: Keeper, timeout: float) -> bool:
    """Wait until a keeper has ended, for so many seconds at most; say whether it has."""
    ended = asyncio.Event()
    with on_keeper_end(keeper, ended.set), contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), timeout)
    return ended.is_set()


async def end_all(
    keeper: Keeper, grace: float, call: Callable[[Callable[[], list[int]]], Awaitable[list[int]]]
) -> bool:
    """End what a keeper that was killed has left behind: SIGTERM, and SIGKILL after a grace; say whether it is gone."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, KILLED)):
        give_up_at = time.monotonic() + seconds
        for pid in (left := await call(keeper.left_behind)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        while left and time.monotonic() < give_up_at:
            await asyncio.sleep(_LOOK_AGAIN)
            left = await call(keeper.left_behind)
        if not left:
            return True
    return False


async def _readable(descriptor: int) -> None:
    """Wait until there is something to read, or the end."""
    loop, happened = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, happened.set)
    try:
        await happened.wait()
    finally:
        loop.remove_reader(descriptor)


def _spawn(spool: Spool, options: Process, command: list[str], environment: dict[str, str], told: int) -> int:
    """Start a keeper, without a copy of this process; return its pid. It closes `told` when it has begun."""
    limits = (options.cpu, None if options.memory is None else max(1, options.memory // 1024), options.files)
    place = options.cwd or str(spool.folder / "work")
    arguments = [_SHELL, _KEEPER, str(spool.folder), place, *("-" if one is None else str(one) for one in limits)]
    written = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        _SHELL,
        [*arguments, *command],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, str(spool.folder / "input"), os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull if options.output == "none" else str(spool.stdout), written, 0o600),
            (os.POSIX_SPAWN_OPEN, 2, str(spool.folder / "stderr"), written, 0o600),
            (os.POSIX_SPAWN_DUP2, told, 3),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=_DEFAULT,
    )


def no_room(error: OSError) -> Exception:
    """Return an error of the system as one that is waited for, if others have taken what was asked for."""
    return Unreachable(f"this machine has no room for it now: {error.strerror}") if error.errno in _FULL else error


# -- notices writes to files through the kernel (inotify), without polling.
#
# Python has no call for it, so the C library is called. If the limits of this user are reached, the caller gets no
# notification, and polls.

_MODIFIED = 0x2
_EVENT = struct.Struct("iIII")
_PART = 65_536


class Written:
    """Watched files. All of it belongs to one event loop."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._waiting: dict[int, asyncio.Event] = {}

    @contextmanager
    def telling(self, path: Path, tick: asyncio.Event) -> Iterator[bool]:
        """Set an event whenever the file is written; yield whether that works, or the caller must poll."""
        watch = self._begin(path)
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
                    _library().inotify_rm_watch(self._descriptor, watch)

    def close(self) -> None:
        """Send no more notifications."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin(self, path: Path) -> int:
        if self._descriptor < 0:
            self._descriptor = _library().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._descriptor < 0:
                return -1
            asyncio.get_running_loop().add_reader(self._descriptor, self._hear)
        return int(_library().inotify_add_watch(self._descriptor, os.fsencode(path), _MODIFIED))

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            heard, place = os.read(self._descriptor, _PART), 0
            while place < len(heard):
                watch, _, _, length = _EVENT.unpack_from(heard, place)
                place += _EVENT.size + length
                if watch < 0:  # there were more than the kernel keeps
                    for tick in self._waiting.values():
                        tick.set()
                elif (one := self._waiting.get(watch)) is not None:
                    one.set()


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
