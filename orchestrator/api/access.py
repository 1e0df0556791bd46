"""Authentication by key or trusted proxy. While neither is configured, only this machine is served."""

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
"""Seconds after which the count of an address's wrong keys starts again."""
_MAX_WRONG_KEYS = 20
"""Wrong keys of one address within that time before it must wait."""
_MAX_ADDRESSES = 10_000


class LoginLimits:
    """Counts wrong keys by client network, the oldest first."""

    def __init__(self) -> None:
        self._wrong_keys: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def wait(self, address: str) -> float:
        """Return the seconds until keys of this address are accepted again."""
        started, count = self._wrong_keys.get(network_of(address), (0.0, 0))
        return max(0.0, started + _PERIOD - time.monotonic()) if count >= _MAX_WRONG_KEYS else 0.0

    def count_wrong_key(self, address: str) -> None:
        now = time.monotonic()
        while self._wrong_keys and (
            next(iter(self._wrong_keys.values()))[0] <= now - _PERIOD or len(self._wrong_keys) >= _MAX_ADDRESSES
        ):
            self._wrong_keys.popitem(last=False)
        network = network_of(address)
        started, count = self._wrong_keys.get(network, (now, 0))
        self._wrong_keys[network] = started, count + 1


@lru_cache(10_000)
def network_of(address: str) -> str:
    """Return the network that identifies a client: its IPv4 address, or its /64, which one IPv6 host owns entirely."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:50]
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]
Credential = Secret | Ticket
"""A key, or the session that was started with it."""

_KEY_TTL = 1.0
"""Seconds for which keys are cached. A revoked key works this long at most."""
_MAX_CACHED_KEYS = 10_000
_ALL = KeyScope()
_NOTHING_SENT = "Send an API key: `Authorization: Bearer orc_…`. Create one with `orchestrator keys create`."
_NO_KEY = (
    "The Authorization header is invalid: expected `Bearer orc_…`, with all 60 characters of the key that "
    "`orchestrator keys create` printed."
)


class Caller(NamedTuple):
    actor: Actor
    key_scope: KeyScope = _ALL
    scope: Scope = Scope.ADMIN
    """The caller's scope; `admin` while no key is needed."""
    key: str | None = None
    quotas: Quotas | None = None
    """The caller's quotas; None while no key is needed."""
    recheck: Callable[[], Awaitable[object]] | None = None
    """Raises if the caller's key was revoked or has expired since. Long requests call it repeatedly."""


class Authenticator:
    """Authenticates callers, with a short-lived cache of keys."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._proxies = Proxies(api.settings)
        self._login_limits = LoginLimits()
        self._read_at = -math.inf
        self._has_keys = True
        self._cached: dict[str, tuple[float, tuple[Key, datetime] | None]] = {}
        self._lookups: dict[str | None, asyncio.Future[Any]] = {}
        """Lookups in progress, by id of the key."""
        self._guess_lock = asyncio.Lock()
        """Serializes lookups of keys that may be guesses."""

    def refused_actor(self, peer: str, headers: Headers, ticket: Ticket | None = None) -> Actor:
        """Return the actor of a rejected request: the key or user by name, or the id that it claims."""
        credential, user = _credential(headers, ticket), None
        if credential is None:
            with contextlib.suppress(Refused):
                user = self._proxies.user(peer, headers)
            who = "?" if user is None else user.name
        else:
            key = self._cached_key(credential)
            unknown = f"? ({credential.id})" if isinstance(credential, Secret) else "?"
            who = unknown if key is None else f"{key.name} ({key.id})"
        return Actor(who, self._proxies.origin(peer, headers))

    async def admit(
        self, peer: str, headers: Headers, needed: Scope | None, run: RunInThread, ticket: Ticket | None = None
    ) -> Caller:
        """Return the caller; raise Refused if the caller may not make this request.

        A probe needs no key, so its `needed` is None. A session ticket counts only if no key was sent.
        """
        origin = self._proxies.origin(peer, headers)
        if needed is None:
            return Caller(Actor("?", origin))
        credential = _credential(headers, ticket)
        user = self._proxies.user(peer, headers) if credential is None else None
        if user is not None:
            return _check_user(user, needed, origin)
        if not self._is_fresh(credential):
            await self._refresh(credential, origin, run)
        if self.requires_key:
            key = self._check(credential, _has_authorization(headers), needed, origin)
            return Caller(Actor(f"{key.name} ({key.id})", origin), key.key_scope, key.scope, key.id, key.quotas)
        check_sender(peer, headers)
        return Caller(Actor("anyone on this machine", origin))

    def forget(self, ticket: Ticket) -> None:
        """Drop a ticket from the cache, because its session was ended."""
        self._cached.pop(ticket.id, None)

    def is_tls(self, peer: str, request: HTTPConnection) -> bool:
        """Return whether the connection is encrypted: to this server, or to a trusted proxy."""
        return request.scope["scheme"] == "https" or self._proxies.is_tls(peer, request.headers)

    def prefix(self, peer: str, request: HTTPConnection) -> str:
        """Return the prefix that paths have in the caller's browser."""
        return self._proxies.prefix(peer, request.headers)

    @property
    def requires_key(self) -> bool:
        """Return whether every caller must authenticate, by a key or through a trusted proxy."""
        return self._has_keys or self._proxies.names_users

    async def _refresh(self, credential: Credential | None, origin: str, run: RunInThread) -> None:
        """Refresh the cached key. Unknown keys from an address with many wrong keys are looked up one by one.

        So guesses never take more than one connection, and a valid key among them waits but is not rejected.
        """
        if credential is not None and self._cached_key(credential) is None and self._login_limits.wait(origin):
            async with self._guess_lock:
                await self._look_up(credential, run)
        else:
            await self._look_up(credential, run)

    async def _look_up(self, credential: Credential | None, run: RunInThread) -> None:
        """Look up a key. Concurrent requests with the same key share one lookup."""
        id = None if credential is None else credential.id
        lookup = self._lookups.get(id)
        if lookup is None:
            lookup = self._lookups[id] = asyncio.ensure_future(run(partial(self.read_keys, credential)))
            lookup.add_done_callback(lambda _: self._lookups.pop(id))
        await asyncio.shield(lookup)

    def _is_fresh(self, credential: Credential | None) -> bool:
        since = time.monotonic() - _KEY_TTL
        return self._read_at > since and (
            credential is None or self._cached.get(credential.id, (-math.inf, None))[0] > since
        )

    def read_keys(self, credential: Credential | None = None) -> bool:
        """Read the API key from Postgres. Return whether any keys exist."""
        now = time.monotonic()
        with self._api.reading() as connection:
            self._has_keys = keys.has_any(connection)
            if credential is not None:
                if len(self._cached) >= _MAX_CACHED_KEYS:
                    self._cached.clear()
                self._cached[credential.id] = now, _find(connection, credential)
        self._read_at = now
        return self._has_keys

    def _cached_key(self, credential: Credential) -> Key | None:
        """Return the cached key of a credential, valid or not; None for a guess."""
        found = self._cached.get(credential.id, (0.0, None))[1]
        if found is None:
            return None
        return found[0] if isinstance(credential, Ticket) or found[0].is_of(credential) else None

    def _count_guess(self, origin: str) -> None:
        """Count a wrong key; reject an address with too many."""
        seconds = math.ceil(self._login_limits.wait(origin))
        if not seconds:
            self._login_limits.count_wrong_key(origin)
            return
        detail = f"Too many wrong keys from {origin!r:.100}: retry in {seconds} s, or with a valid key."
        raise Refused(
            Problem(title="There were too many wrong keys", status=429, detail=detail), {"Retry-After": str(seconds)}
        )

    def _check(self, credential: Credential | None, has_authorization: bool, needed: Scope, origin: str) -> Key:
        if credential is None:
            raise _unauthorized(_NO_KEY if has_authorization else _NOTHING_SENT)
        found = self._cached.get(credential.id, (0.0, None))[1]
        if isinstance(credential, Ticket):
            return self._check_session(found, needed, origin)
        reason = "no such key" if found is None else found[0].refusal(credential, found[1])
        if found is None or reason is not None:
            if self._cached_key(credential) is None:
                self._count_guess(origin)
            raise _unauthorized(f"The key {credential.id} is not valid: {reason}.")
        key = found[0]
        _check_scope(f"key {credential.id} ({key.name})", key.scope, needed)
        return key

    def _check_session(self, found: tuple[Key, datetime] | None, needed: Scope, origin: str) -> Key:
        """Return the key of a session. An unknown session may have ended, so it is not rejected as a guess."""
        reason = "it has ended" if found is None else found[0].fault(found[1])
        if found is None or reason is not None:
            if found is None and not self._login_limits.wait(origin):
                self._login_limits.count_wrong_key(origin)
            raise _unauthorized(f"The session is not valid: {reason}. Log in again.")
        key = found[0]
        _check_scope(f"key {key.id} ({key.name})", key.scope, needed)
        return key


def _check_user(user: User, needed: Scope, origin: str) -> Caller:
    scope = _check_scope(f"user {user.name}", user.scope, needed)
    return Caller(Actor(user.name, origin), scope=scope, quotas=DEFAULTS)


def _check_scope(who: str, scope: Scope | None, needed: Scope) -> Scope:
    if scope is None or not scope.includes(needed):
        detail = f"This needs the scope {needed!s}, and {who} has {scope or 'none'!s}."
        raise Refused(Problem(title="The key does not allow this", status=403, detail=detail))
    return scope


def _bearer_key(headers: Headers) -> Secret | None:
    word, _, text = headers.get("authorization", "").partition(" ")
    return parse(text.strip()) if word.lower() == "bearer" else None


def _find(connection: Connection, credential: Credential) -> tuple[Key, datetime] | None:
    return (
        sessions.find(connection, credential)
        if isinstance(credential, Ticket)
        else keys.find(connection, credential.id)
    )


def _credential(headers: Headers, ticket: Ticket | None) -> Credential | None:
    return ticket if ticket is not None and not _has_authorization(headers) else _bearer_key(headers)


def _has_authorization(headers: Headers) -> bool:
    return bool(headers.get("authorization", "").strip())


def _unauthorized(detail: str) -> Refused:
    problem = Problem(title="The caller is not authenticated", status=401, detail=detail)
    return Refused(problem, {"WWW-Authenticate": 'Bearer realm="orchestrator"'})
