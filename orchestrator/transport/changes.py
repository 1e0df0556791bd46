"""Follow the stream of live changes, and show the leader that it has a listener.

One follower serves all listeners of a process. If it missed entries, because Redis lost them or because it was too
slow, it reports a gap, and listeners read the current state again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from redis import Redis

from orchestrator.domain.tasks.task import Id
from orchestrator.transport.codec import Changes, Malformed, decode, stream_position
from orchestrator.transport.connection import UNAVAILABLE
from orchestrator.transport.keys import NUDGE_CAP, SPOKEN_CAP, WATCHED_TTL, Keys

_REFRESH = 2.0
"""Seconds between two refreshes of the key `watched`."""
_FIRST_ENTRY = 1.0
"""Seconds to wait for the leader's first entry after a new listener showed up."""
_COUNT = 200
NOWHERE = "0-0"

Entries = list[tuple[bytes, dict[bytes, bytes]]]


class Entry(NamedTuple):
    """The changes of one commit of the leader, with their id in the stream."""

    id: str
    changes: Changes


class StreamRead(NamedTuple):
    """The result of one read of the streams."""

    entries: list[Entry] = []
    logged_tasks: set[bytes] = set()
    """Tasks with new log lines or progress."""
    has_gap: bool = False
    """Entries before these may have been missed."""
    any_logged: bool = False
    """Any task may have new log lines or progress."""


def last_log_entry(redis: Redis, keys: Keys) -> str:
    """Return the id of the last entry in the stream of tasks that have logged."""
    last = _last(redis, keys.spoken)
    return last[0][0].decode() if last else NOWHERE


def wait_for_log(redis: Redis, keys: Keys, target: bytes, after: str, seconds: float) -> str:
    """Wait up to `seconds` until a task or run logs. Return the id of the last entry that was read."""
    give_up_at = time.monotonic() + seconds
    while (remaining := give_up_at - time.monotonic()) > 0:
        reply = redis.xread({keys.spoken: after}, count=_COUNT, block=max(1, int(remaining * 1000)))
        for _, items in cast("list[tuple[bytes, Entries]]", reply or []):
            after = items[-1][0].decode()
            if any(target in _tasks(keys, fields) for _, fields in items):
                return after
    return after


class Follower:
    """Follows the streams on its own connection, for one thread."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._refresh_at = 0.0
        self._is_connected = False
        self._log_position = NOWHERE
        self.position = NOWHERE
        """The id of the last entry read; `0-0` if there is none."""
        self.generation = ""
        """The generation of that entry."""

    def begin(self) -> None:
        """Start at the ends of the streams and make the leader publish changes. Wait briefly for its first entry."""
        self._go_to_end()
        is_new = self._show_interest()
        self._is_connected = True
        if is_new:
            self._read(_FIRST_ENTRY)

    def wait(self) -> StreamRead:
        """Return new entries, or an empty result after two seconds. Raise any error of Redis."""
        try:
            return self._wait()
        except UNAVAILABLE:
            self._is_connected = False
            raise

    def _wait(self) -> StreamRead:
        has_gap = any_logged = False
        if not self._is_connected or time.monotonic() >= self._refresh_at:
            has_gap = self._has_lost()
            any_logged = has_gap or not self._is_connected
            if not self._is_connected:  # it may be another server, whose clock is behind
                self._log_position = last_log_entry(self._redis, self._keys)
            self._show_interest()
            self._is_connected = True
        read = self._read(_REFRESH)
        return read._replace(has_gap=read.has_gap or has_gap, any_logged=read.any_logged or any_logged)

    def _read(self, seconds: float) -> StreamRead:
        has_gap = any_logged = False
        after: dict[Any, Any] = {self._keys.changes: self.position, self._keys.spoken: self._log_position}
        reply = self._redis.xread(after, count=_COUNT, block=int(seconds * 1000))
        entries: list[Entry] = []
        logged_tasks: set[bytes] = set()
        for key, items in cast("list[tuple[bytes, Entries]]", reply or []):
            if key == self._keys.changes.encode():
                self.position = items[-1][0].decode()
                entries = list(read_entries(self._keys, items))
                self.generation = entries[-1].changes.generation if entries else self.generation
                has_gap |= len(entries) < len(items)
            else:
                self._log_position = items[-1][0].decode()
                any_logged |= len(items) >= SPOKEN_CAP
                for _, fields in items:
                    logged_tasks.update(_tasks(self._keys, fields))
        return StreamRead(entries, logged_tasks, has_gap, any_logged)

    def _has_lost(self) -> bool:
        """Return whether the stream has lost the entry read last. If so, continue from the end of the stream."""
        if self.position == NOWHERE:
            return False
        if self._redis.xrange(self._keys.changes, min=self.position, max=self.position, count=1):
            return False
        self._go_to_end()
        return True

    def _go_to_end(self) -> None:
        items = _last(self._redis, self._keys.changes)
        self.position = items[0][0].decode() if items else NOWHERE
        self.generation = next((entry.changes.generation for entry in read_entries(self._keys, items)), "")
        last = _last(self._redis, self._keys.spoken)
        self._log_position = last[0][0].decode() if last else NOWHERE

    def _show_interest(self) -> bool:
        """Refresh the key `watched`. If it was missing, wake the leader and return True."""
        before = self._redis.set(self._keys.watched, b"1", ex=WATCHED_TTL, get=True)
        if before is None:
            self._redis.xadd(self._keys.nudges, {"fleet": b""}, maxlen=NUDGE_CAP, approximate=True)
        self._refresh_at = time.monotonic() + _REFRESH
        return before is None


def find_entries(redis: Redis, keys: Keys, ids: Iterable[str]) -> dict[str, Changes]:
    """Return the entries that are still in the stream of changes. All later entries are then there, too."""
    pipeline = redis.pipeline(transaction=False)
    for id in ids:
        pipeline.xrange(keys.changes, min=id, max=id, count=1)
    return {entry.id: entry.changes for items in pipeline.execute() for entry in read_entries(keys, items)}


def history(redis: Redis, keys: Keys, after: str, until: str) -> Iterator[Entry]:
    """Yield the entries between two ids. A malformed one becomes `is_first`: listeners then read the current state."""
    while stream_position(after) < stream_position(until):
        items = cast("Entries", redis.xrange(keys.changes, min=f"({after}", max=until, count=_COUNT))
        if not items:
            return
        by_id = {entry.id: entry for entry in read_entries(keys, items)}
        for entry_id, _ in items:
            name = entry_id.decode()
            yield by_id.get(name) or Entry(name, Changes("?", is_first=True))
        after = items[-1][0].decode()


def read_entries(keys: Keys, items: Entries) -> Iterator[Entry]:
    """Decode stream entries. Skip malformed ones."""
    for entry_id, fields in items:
        try:
            body = keys.signing.body(keys.changes, (fields or {}).get(b"d", b""))
            yield Entry(entry_id.decode(), decode(Changes, body))
        except Malformed:
            continue


def _last(redis: Redis, key: str) -> Entries:
    return cast("Entries", redis.xrevrange(key, count=1))


def _tasks(keys: Keys, fields: dict[bytes, bytes]) -> list[bytes]:
    try:
        return decode(list[Id], keys.signing.body(keys.spoken, (fields or {}).get(b"d", b"")))
    except Malformed:
        return []
