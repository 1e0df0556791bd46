"""Notices writes to files through the kernel (inotify), without polling.

Python has no call for it, so the C library is called. If the limits of this user are reached, the caller gets no
notification, and polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

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
