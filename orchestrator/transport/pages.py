"""Histories that are too large for one message: in pages, beside the activation that they belong to.

The leader writes the pages of an attempt before it pushes the message that says how many there are, and removes them
when the attempt has landed. A worker reads them one by one. Whatever happens in between, a page is there as it was
written, or it is gone; then the worker reports that, and the history is sent again with the next attempt.
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
"""Seconds after which pages expire whose leader died before it could remove them."""


class Pages:
    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    def write(self, run: bytes, attempt: int, number: int, page: bytes) -> None:
        """Write one page; the first one, numbered 0, puts away whatever stood there. The same again changes nothing."""
        key = self._keys.pages(run, attempt)
        page = self._keys.signing.sign(_place(key, number), page)
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
            self._redis.unlink(key)  # somebody has taken it, and the pages of before are gone: the worker will say so

    def read(self, run: bytes, attempt: int, number: int) -> bytes | None:
        """Return one page, or None if it is gone, or not ours."""
        key = self._keys.pages(run, attempt)
        page = cast("bytes | None", self._redis.hget(key, str(number)))
        try:
            return None if page is None else self._keys.signing.body(_place(key, number), page)
        except Forged as error:
            pipeline = self._redis.pipeline(transaction=False)
            set_aside(pipeline, self._keys, [Refused(f"{key} {number}", page or b"", str(error))])
            pipeline.execute(raise_on_error=False)
            return None

    def remove(self, attempts: Iterable[tuple[bytes, int]]) -> None:
        """Remove the pages of attempts that have landed."""
        keys = [self._keys.pages(run, attempt) for run, attempt in attempts]
        if keys:
            self._redis.unlink(*keys)


def _place(key: str, number: int) -> str:
    return f"{key}:{number}"
