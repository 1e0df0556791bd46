"""Which folders are payload stores in use: noted in Redis, for processes that have not seen them mounted.

Where Redis has lost it, the next process that writes into such a folder notes it again.
"""

from __future__ import annotations

import contextlib
from contextlib import closing

from redis import RedisError

from orchestrator.errors import Unavailable
from orchestrator.settings import Settings
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys

_TIMEOUT = 2.0


class StoresInUse:
    """Notes which are; it is asked so rarely that it keeps no connection."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.redis_url and settings.of_shard(0).require_redis()
        self._key = Keys.of(settings).payload_stores

    def has(self, place: str) -> bool:
        """Say whether a store was noted; raise `Unavailable` where that cannot be known now."""
        if not self._url:
            return False
        try:
            with closing(connect(self._url, timeout=_TIMEOUT)) as redis:
                return bool(redis.sismember(self._key, place))
        except RedisError as error:
            raise Unavailable(
                f"The payload store {place} cannot be used: Redis, which knows whether it is new or not mounted, is "
                f"not reached: {error}"
            ) from error

    def note(self, place: str) -> None:
        """Note that a store is in use, if that can be done now."""
        if self._url:
            with contextlib.suppress(RedisError), closing(connect(self._url, timeout=_TIMEOUT)) as redis:
                redis.sadd(self._key, place)
