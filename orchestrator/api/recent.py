"""Answers that several viewers share for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_KEPT = 200


class Recent:
    """Answers that are a moment old."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[float, Any]] = {}
        self._locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, seconds: float, read: Callable[[], T]) -> T:
        """Return what was read last, if that was within so many seconds; else read, while others wait for it."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            at, found = self._found.get(key, (0.0, None))
            if time.monotonic() - at < seconds and at:
                answer: T = found
                return answer
            answer = read()
            with self._lock:
                if len(self._found) >= _MOST_KEPT:
                    self._found.clear()
                    self._locks.clear()
                self._found[key] = time.monotonic(), answer
            return answer

    def last(self, key: Hashable, seconds: float) -> Any:
        """Return what was read last, however that went on since; None if that was longer ago."""
        at, found = self._found.get(key, (0.0, None))
        return found if at and time.monotonic() - at < seconds else None

    def forget(self) -> None:
        """Have everything read again, after an action that has changed something."""
        with self._lock:
            self._found.clear()
