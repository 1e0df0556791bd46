"""Announces in Redis that this scheduler stands by, in a thread of its own.

A takeover does not depend on it: the lease is in Postgres, and Redis may hang.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from redis import Redis

from orchestrator.domain.fleet.announced import Standby
from orchestrator.telemetry import first_line, get_logger
from orchestrator.transport import standbys
from orchestrator.transport.connection import UNAVAILABLE
from orchestrator.transport.keys import Keys

log = get_logger("scheduler")

_PATIENCE = 1.0
"""Seconds that a scheduler that ends waits for this."""


class StandbyNotice:
    """Says so again and again while another scheduler leads; once this one does or ends, no more."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        leading: threading.Event,
        *,
        every: float,
        ttl: float,
        offer: Callable[[], None] | None = None,
    ) -> None:
        """With several shards, `offer` lets another scheduler take the lease, so that they share the shards evenly."""
        self._offer = offer
        self._process = os.getpid() if offer is None else os.getppid()  # of which there is one for all shards
        self._redis = redis
        self._keys = keys
        self._leading = leading
        self._every = every
        self._ttl = ttl
        self._name = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._since: datetime | None = None
        """Since when it stands by, as announced."""
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin; one that leads within the first moments was never a standby."""
        threading.Thread(target=self._run, name="standby", daemon=True).start()

    def close(self) -> None:
        """Take back what was said, unless Redis takes long: it expires."""
        self._is_over.set()
        if self._lock.acquire(timeout=_PATIENCE):
            self._lock.release()
            self._tell()

    def _run(self) -> None:
        while not self._is_over.is_set():
            (self._is_over if self._leading.is_set() else self._leading).wait(self._every)
            self._tell()
            if self._offer is not None and self._leading.is_set() and not self._is_mine():
                self._offer()

    def _tell(self) -> None:
        with self._lock:
            try:
                if not (self._leading.is_set() or self._is_over.is_set()):
                    self._since = self._since or datetime.now(UTC)
                    one = Standby(address=self._address, since=self._since)
                    standbys.announce(self._redis, self._keys, self._name, one, self._ttl)
                elif self._since is not None:
                    standbys.withdraw(self._redis, self._keys, self._name)
                    self._since = None
            except UNAVAILABLE as error:  # the announcement expires; readers see that Redis is away
                log.debug("scheduler.standby_unannounced error=%s", first_line(error))

    @property
    def _address(self) -> str:
        return f"{socket.gethostname()}:{self._process}"

    def _is_mine(self) -> bool:
        """Say whether a shard is this scheduler's: of all in the order of their addresses, each has every n-th."""
        try:
            found = {one.address for one in standbys.list_standbys(self._redis, self._keys)}
        except UNAVAILABLE:
            return True
        order = sorted(found | {self._address})
        return order[int(self._keys.namespace.partition("/")[2] or 0) % len(order)] == self._address
