"""Who is let in: by a key, as soon as there is one; before that, only programs of this machine."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from orchestrator.api.context import Api
from orchestrator.api.guard import check_sender
from orchestrator.api.problems import Problem, Refused
from orchestrator.domain.access import Key, Reach, Scope, Secret, parse
from orchestrator.store import keys

Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Does something in a thread."""

_ALL = Reach()
_REMEMBERED = 1.0
"""Seconds for which a look into Postgres holds: so long may a key that was revoked still open the door."""
_MOST_REMEMBERED = 10_000


class Doorkeeper:
    """Knows the keys that came by in the last second."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._asked_at = -math.inf
        self._has_keys = True
        self._known: dict[str, tuple[float, tuple[Key, datetime] | None]] = {}
        self._looks: dict[str | None, asyncio.Future[Any]] = {}
        """Those that are under way."""

    async def admit(self, headers: Mapping[str, str], needed: Scope | None, run: Run) -> Reach:
        """Refuse who may not do this, and return what they may do it to.

        None needs no key, for those who only ask whether the server lives.
        """
        if needed is None:
            return _ALL
        given = _given(headers)
        if not self._is_fresh(given):
            await self._look(given, run)
        if self._has_keys:
            return self._check(given, needed).reach
        check_sender(headers)
        return _ALL

    async def _look(self, given: Secret | None, run: Run) -> None:
        """Read keys; whoever needs the same meanwhile waits for this, so that a crowd looks once."""
        id = None if given is None else given.id
        look = self._looks.get(id)
        if look is None:
            look = self._looks[id] = asyncio.ensure_future(run(partial(self.read_keys, given)))
            look.add_done_callback(lambda _: self._looks.pop(id))
        await asyncio.shield(look)

    def _is_fresh(self, given: Secret | None) -> bool:
        since = time.monotonic() - _REMEMBERED
        return self._asked_at > since and (given is None or self._known.get(given.id, (-math.inf, None))[0] > since)

    def read_keys(self, given: Secret | None = None) -> bool:
        """Look into Postgres whether there are keys, and what this one is; return the first."""
        now = time.monotonic()
        with self._api.reading() as connection:
            self._has_keys = keys.has_any(connection)
            if given is not None:
                if len(self._known) >= _MOST_REMEMBERED:
                    self._known.clear()
                self._known[given.id] = now, keys.find(connection, given.id)
        self._asked_at = now
        return self._has_keys

    def _check(self, given: Secret | None, needed: Scope) -> Key:
        if given is None:
            raise _unknown("Send a key: `Authorization: Bearer orc_…`. `orchestrator keys create` makes one.")
        found = self._known[given.id][1]
        reason = "no such key" if found is None else found[0].refusal(given, found[1])
        if found is None or reason is not None:
            raise _unknown(f"The key {given.id} opens nothing: {reason}.")
        if not found[0].scope.includes(needed):
            detail = f"This needs the scope {needed!s}, and key {given.id} ({found[0].name}) has {found[0].scope!s}."
            raise Refused(Problem(title="The key may not do this", status=403, detail=detail))
        return found[0]


def _given(headers: Mapping[str, str]) -> Secret | None:
    word, _, text = headers.get("authorization", "").partition(" ")
    return parse(text.strip()) if word.lower() == "bearer" else None


def _unknown(detail: str) -> Refused:
    problem = Problem(title="Who are you?", status=401, detail=detail)
    return Refused(problem, {"WWW-Authenticate": 'Bearer realm="orchestrator"'})
