"""Keepers of commands: how they are started, and how one hears that they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
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
