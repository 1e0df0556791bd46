"""Refused requests in the audit log, at a bounded rate."""

from __future__ import annotations

import time

from orchestrator.api.context import Api
from orchestrator.domain.access import masked
from orchestrator.sdk.acting import Actor
from orchestrator.store import audit
from orchestrator.telemetry import get_logger

log = get_logger("api")

_AT_ONCE = 20
"""Refusals that are written one after the other."""
_EVERY = 3.0
"""Seconds for which there may be another one."""


class Refusals:
    """Writes them, a few at once and then one in a while, with the number of those between."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._room = float(_AT_ONCE)
        self._seen = time.monotonic()
        self._left_out = 0

    def is_told(self) -> bool:
        """Say whether there is room for this one, and count it where there is not."""
        now = time.monotonic()
        self._room = min(float(_AT_ONCE), self._room + (now - self._seen) / _EVERY)
        self._seen = now
        if self._room < 1:
            self._left_out += 1
            return False
        self._room -= 1
        return True

    def write(self, actor: Actor, method: str, path: str, status: int) -> None:
        """Write a line; a request has been refused by then, whatever becomes of this."""
        path = masked(path)
        left_out, self._left_out = self._left_out, 0
        detail = {"status": status} | ({"left_out": left_out} if left_out else {})
        log.warning("api.request_refused method=%s path=%s status=%d actor=%s address=%s", method, path, status, *actor)
        try:
            with self._api.backend.connections.writing("a refusal was noted") as connection:
                audit.add(
                    connection,
                    who=actor.who,
                    origin=actor.origin,
                    act="refused",
                    kind="request",
                    target=f"{method} {path}",
                    detail=detail,
                )
        except Exception as error:  # noqa: BLE001  # the client gets its refusal, and nothing else
            log.warning("api.audit_failed error=%s: a refused request is missing from the audit log", error)
