"""A short-lived cache, so that several viewers share one read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_ENTRIES = 200


class Recent:
    """Results of reads, cached for seconds."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[float, Any]] = {}
        self._locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, seconds: float, read: Callable[[], T]) -> T:
        """Return the cached result if it is fresh enough; otherwise read, while others with the same key wait."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            at, value = self._entries.get(key, (0.0, None))
            if time.monotonic() - at < seconds and at:
                result: T = value
                return result
            result = read()
            with self._lock:
                if len(self._entries) >= _MAX_ENTRIES:
                    self._entries.clear()
                    self._locks.clear()
                self._entries[key] = time.monotonic(), result
            return result

    def last(self, key: Hashable, seconds: float) -> Any:
        """Return the last result, if it is not older than so many seconds; otherwise None."""
        at, value = self._entries.get(key, (0.0, None))
        return value if at and time.monotonic() - at < seconds else None

    def forget(self) -> None:
        """Clear the cache, after an action that has changed something."""
        with self._lock:
            self._entries.clear()
