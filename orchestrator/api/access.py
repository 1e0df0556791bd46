"""Authentication: by a key or by a trusted proxy, as soon as there is either; before that, only for this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NamedTuple

from sqlalchemy import Connection
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from orchestrator.api.context import Api
from orchestrator.api.problems import Problem, Refused
from orchestrator.api.proxies import Proxies, User, check_sender
from orchestrator.domain.access import Key, KeyScope, Scope, Secret, Ticket, parse
from orchestrator.domain.quotas import DEFAULTS, Quotas
from orchestrator.sdk.acting import Actor
from orchestrator.store import keys, sessions

_PERIOD = 60.0
"""Seconds after which an address begins anew."""
_TRIES = 20
"""Wrong keys of one address within that time."""
_MOST_ADDRESSES = 10_000


class LoginLimits:
    """Addresses from which wrong keys came lately, the one that began first in front."""

    def __init__(self) -> None:
        self._tries: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def wait(self, address: str) -> float:
        """Return for how many seconds no key of this address is looked at."""
        began, count = self._tries.get(neighbourhood(address), (0.0, 0))
        return max(0.0, began + _PERIOD - time.monotonic()) if count >= _TRIES else 0.0

    def note(self, address: str) -> None:
        """Count a wrong key."""
        now = time.monotonic()
        while self._tries and (
            next(iter(self._tries.values()))[0] <= now - _PERIOD or len(self._tries) >= _MOST_ADDRESSES
        ):
            self._tries.popitem(last=False)
        near = neighbourhood(address)
        began, count = self._tries.get(near, (now, 0))
        self._tries[near] = began, count + 1


@lru_cache(10_000)
def neighbourhood(address: str) -> str:
    """Return what stands for an address: one host has a whole /64 of IPv6 to itself."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address[:50]
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Does something in a thread."""
Credential = Secret | Ticket
"""A key, or the session that was begun with one."""

_REMEMBERED = 1.0
"""Seconds for which a look into Postgres holds: so long may a key that was revoked still open the door."""
_MOST_REMEMBERED = 10_000
_ALL = KeyScope()
_NOTHING_SENT = "Send a key: `Authorization: Bearer orc_…`. `orchestrator keys create` makes one."
_NO_KEY = (
    "What the header Authorization holds is no key: expected `Bearer orc_…`, all of the 60 characters that "
    "`orchestrator keys create` has shown."
)


class Caller(NamedTuple):
    """The caller of a request."""

    actor: Actor
    key_scope: KeyScope = _ALL
    scope: Scope = Scope.ADMIN
    """The scope of the caller; everything where no key is needed."""
    key: str | None = None
    """The id of the key that has let them in."""
    quotas: Quotas | None = None
    """How much the caller may ask for; None where no key is needed."""
    again: Callable[[], Awaitable[object]] | None = None
    """Refuses a caller whose key was revoked or has expired since. Long requests call it again."""


class Doorkeeper:
    """Knows the keys that came by in the last second."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._proxies = Proxies(api.settings)
        self._login_limits = LoginLimits()
        self._asked_at = -math.inf
        self._has_keys = True
        self._known: dict[str, tuple[float, tuple[Key, datetime] | None]] = {}
        self._looks: dict[str | None, asyncio.Future[Any]] = {}
        """Those that are under way."""
        self._one_by_one = asyncio.Lock()
        """For looks at what may be a guess."""

    def refused_actor(self, peer: str, headers: Headers, ticket: Ticket | None = None) -> Actor:
        """Return the actor of a refused request: by name where the key is known, else by what it claims."""
        given, user = _credential(headers, ticket), None
        if given is None:
            with contextlib.suppress(Refused):
                user = self._proxies.user(peer, headers)
            who = "?" if user is None else user.name
        else:
            key = self._key(given)
            unknown = f"? ({given.id})" if isinstance(given, Secret) else "?"
            who = unknown if key is None else f"{key.name} ({key.id})"
        return Actor(who, self._proxies.origin(peer, headers))

    async def admit(
        self, peer: str, headers: Headers, needed: Scope | None, run: Run, ticket: Ticket | None = None
    ) -> Caller:
        """Return the caller, or refuse one that may not do this.

        A probe needs no key, so `needed` is None. A ticket counts where no key was sent.
        """
        origin = self._proxies.origin(peer, headers)
        if needed is None:
            return Caller(Actor("?", origin))
        given = _credential(headers, ticket)
        user = self._proxies.user(peer, headers) if given is None else None
        if user is not None:
            return _check_user(user, needed, origin)
        if not self._is_fresh(given):
            await self._look_after(given, origin, run)
        if self.asks:
            key = self._check(given, _sent(headers), needed, origin)
            return Caller(Actor(f"{key.name} ({key.id})", origin), key.key_scope, key.scope, key.id, key.quotas)
        check_sender(peer, headers)
        return Caller(Actor("anyone on this machine", origin))

    def forget(self, ticket: Ticket) -> None:
        """Look again whether a ticket opens anything: its session was ended."""
        self._known.pop(ticket.id, None)

    def is_tls(self, peer: str, request: HTTPConnection) -> bool:
        """Say whether the connection is encrypted: here, or up to a trusted proxy."""
        return request.scope["scheme"] == "https" or self._proxies.is_tls(peer, request.headers)

    def prefix(self, peer: str, request: HTTPConnection) -> str:
        """Return the prefix of all paths in the caller's browser."""
        return self._proxies.prefix(peer, request.headers)

    @property
    def asks(self) -> bool:
        """Say whether every caller needs a key or a proxy's word."""
        return self._has_keys or self._proxies.identify

    async def _look_after(self, given: Credential | None, origin: str, run: Run) -> None:
        """Read keys. Unknown keys from an address that has sent many wrong ones are looked up one by one.

        So guesses never take more than one connection, and a good key among them waits, but is not refused.
        """
        if given is not None and self._key(given) is None and self._login_limits.wait(origin):
            async with self._one_by_one:
                await self._look(given, run)
        else:
            await self._look(given, run)

    async def _look(self, given: Credential | None, run: Run) -> None:
        """Read keys. Concurrent requests with the same key share one look-up."""
        id = None if given is None else given.id
        look = self._looks.get(id)
        if look is None:
            look = self._looks[id] = asyncio.ensure_future(run(partial(self.read_keys, given)))
            look.add_done_callback(lambda _: self._looks.pop(id))
        await asyncio.shield(look)

    def _is_fresh(self, given: Credential | None) -> bool:
        since = time.monotonic() - _REMEMBERED
        return self._asked_at > since and (given is None or self._known.get(given.id, (-math.inf, None))[0] > since)

    def read_keys(self, given: Credential | None = None) -> bool:
        """Look into Postgres whether there are keys, and what this one is; return the first."""
        now = time.monotonic()
        with self._api.reading() as connection:
            self._has_keys = keys.has_any(connection)
            if given is not None:
                if len(self._known) >= _MOST_REMEMBERED:
                    self._known.clear()
                self._known[given.id] = now, _find(connection, given)
        self._asked_at = now
        return self._has_keys

    def _key(self, given: Credential) -> Key | None:
        """Return the key of a credential, valid or not, if it is known; None for a guess."""
        found = self._known.get(given.id, (0.0, None))[1]
        if found is None:
            return None
        return found[0] if isinstance(given, Ticket) or found[0].is_of(given) else None

    def _note_guess(self, origin: str) -> None:
        """Count a wrong key, and refuse an address that has tried many."""
        seconds = math.ceil(self._login_limits.wait(origin))
        if not seconds:
            self._login_limits.note(origin)
            return
        detail = f"Too many wrong keys came from {origin!r:.100}: come again in {seconds} s, or with a good one."
        raise Refused(
            Problem(title="There were too many wrong keys", status=429, detail=detail), {"Retry-After": str(seconds)}
        )

    def _check(self, given: Credential | None, sent: bool, needed: Scope, origin: str) -> Key:
        if given is None:
            raise _unknown(_NO_KEY if sent else _NOTHING_SENT)
        found = self._known.get(given.id, (0.0, None))[1]
        if isinstance(given, Ticket):
            return self._check_session(found, needed, origin)
        reason = "no such key" if found is None else found[0].refusal(given, found[1])
        if found is None or reason is not None:
            if self._key(given) is None:
                self._note_guess(origin)
            raise _unknown(f"The key {given.id} opens nothing: {reason}.")
        key = found[0]
        _check_scope(f"key {given.id} ({key.name})", key.scope, needed)
        return key

    def _check_session(self, found: tuple[Key, datetime] | None, needed: Scope, origin: str) -> Key:
        """Return the key of a session. An unknown session may have ended, so it is not refused as a guess."""
        reason = "it has ended" if found is None else found[0].fault(found[1])
        if found is None or reason is not None:
            if found is None and not self._login_limits.wait(origin):
                self._login_limits.note(origin)
            raise _unknown(f"The session opens nothing: {reason}. Log in again.")
        key = found[0]
        _check_scope(f"key {key.id} ({key.name})", key.scope, needed)
        return key


def _check_user(user: User, needed: Scope, origin: str) -> Caller:
    scope = _check_scope(f"user {user.name}", user.scope, needed)
    return Caller(Actor(user.name, origin), scope=scope, quotas=DEFAULTS)


def _check_scope(who: str, scope: Scope | None, needed: Scope) -> Scope:
    if scope is None or not scope.includes(needed):
        detail = f"This needs the scope {needed!s}, and {who} has {scope or 'none'!s}."
        raise Refused(Problem(title="The key may not do this", status=403, detail=detail))
    return scope


def _given(headers: Headers) -> Secret | None:
    word, _, text = headers.get("authorization", "").partition(" ")
    return parse(text.strip()) if word.lower() == "bearer" else None


def _find(connection: Connection, given: Credential) -> tuple[Key, datetime] | None:
    return sessions.find(connection, given) if isinstance(given, Ticket) else keys.find(connection, given.id)


def _credential(headers: Headers, ticket: Ticket | None) -> Credential | None:
    return ticket if ticket is not None and not _sent(headers) else _given(headers)


def _sent(headers: Headers) -> bool:
    return bool(headers.get("authorization", "").strip())


def _unknown(detail: str) -> Refused:
    problem = Problem(title="The caller is not known", status=401, detail=detail)
    return Refused(problem, {"WWW-Authenticate": 'Bearer realm="orchestrator"'})
