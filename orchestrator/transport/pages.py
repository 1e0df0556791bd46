"""Histories that are too large for an activation message, stored in pages in Redis.

The leader writes the pages of an attempt before it pushes the message with their number, and removes them when the
attempt has ended. A worker reads the pages one by one. A page is either exactly as written, or gone. If a page is gone,
the worker reports it, and the leader sends the history again with the next attempt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from redis import Redis
from redis.exceptions import ResponseError

from orchestrator.transport.keys import Keys
from orchestrator.transport.quarantine import Refused, set_aside
from orchestrator.transport.signing import Forged

_TTL = 3_600
"""Seconds after which pages expire if the leader died before it removed them."""


class Pages:
    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    def write(self, run: bytes, attempt: int, number: int, page: bytes) -> None:
        """Write one page. Page 0 first deletes all pages of the attempt. Writing the same pages again has no effect."""
        key = self._keys.pages(run, attempt)
        page = self._keys.signing.sign(_signed_name(key, number), page)
        pipeline = self._redis.pipeline(transaction=False)
        if number == 0:
            pipeline.unlink(key)
        pipeline.hset(key, str(number), page)
        pipeline.expire(key, _TTL)
        try:
            pipeline.execute()
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            self._redis.unlink(key)  # taken by another program: earlier pages are lost, and the worker will report it

    def read(self, run: bytes, attempt: int, number: int) -> bytes | None:
        """Return one page, or None if it is gone or not ours."""
        key = self._keys.pages(run, attempt)
        page = cast("bytes | None", self._redis.hget(key, str(number)))
        try:
            return None if page is None else self._keys.signing.body(_signed_name(key, number), page)
        except Forged as error:
            pipeline = self._redis.pipeline(transaction=False)
            set_aside(pipeline, self._keys, [Refused(f"{key} {number}", page or b"", str(error))])
            pipeline.execute(raise_on_error=False)
            return None

    def remove(self, attempts: Iterable[tuple[bytes, int]]) -> None:
        """Remove the pages of ended attempts."""
        keys = [self._keys.pages(run, attempt) for run, attempt in attempts]
        if keys:
            self._redis.unlink(*keys)


def _signed_name(key: str, number: int) -> str:
    return f"{key}:{number}"
