"""The listeners to live changes, where their keys are on another server than the leader's: in a cluster with shards."""

from __future__ import annotations

import time

from redis import Redis

from orchestrator.transport.connection import UNAVAILABLE
from orchestrator.transport.keys import Keys

_PAUSE = 10.0
"""Seconds for which a server that does not answer is left alone: it keeps the leader for as long as its timeout."""


class FarListeners:
    """Adds to the stream of changes. Where that fails, nobody listens: the next entry that is added is a first one."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._try_at = 0.0
        self._has_gap = False

    def are_there(self) -> bool:
        """Say whether somebody listens; not, once, after an entry was lost."""
        had_gap, self._has_gap = self._has_gap, False
        if had_gap or time.monotonic() < self._try_at:
            return False
        try:
            return bool(self._redis.exists(self._keys.watched))
        except UNAVAILABLE:
            self._try_at = time.monotonic() + _PAUSE
            return False

    def add(self, body: bytes, kept: int) -> None:
        """Add an entry, signed, unless one was lost before it."""
        if self._has_gap:
            return
        try:
            self._redis.xadd(self._keys.changes, {"d": body}, maxlen=kept, approximate=True)
        except UNAVAILABLE:
            self._has_gap = True
            self._try_at = time.monotonic() + _PAUSE
