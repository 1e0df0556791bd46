"""Senders that need no key: users of a trusted proxy, and programs of this machine while there is no key.

Only proxies that the operator names are believed. A web page that a browser has open is not served.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from orchestrator.api.problems import refused
from orchestrator.domain.access import Scope
from orchestrator.errors import ConfigurationError
from orchestrator.settings import Settings

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-prefix", "x-real-ip", "via")
"""Headers that a proxy adds to a request."""
_LONGEST_NAME = 200
_PREFIX = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)+")


class User(NamedTuple):
    """A user that a trusted proxy names."""

    name: str
    scope: Scope | None
    """Their scope; None for none."""


class Proxies:
    """The settings about proxies."""

    def __init__(self, settings: Settings) -> None:
        self._networks = [_network(text) for text in _words(settings.api_proxies)]
        self._user_header = settings.api_user_header
        self._group_header = settings.api_group_header
        self._scope = _scope("api_user_scope", settings.api_user_scope)
        self._groups = {
            group.strip(): _scope("api_group_scopes", scope.strip())
            for group, _, scope in (word.partition("=") for word in _words(settings.api_group_scopes))
        }
        if self._user_header and not self._networks:
            raise ConfigurationError(
                "Setting api_user_header: expected api_proxies too, the addresses of the proxies whose header is "
                "believed, such as 10.0.0.5, 10.1.0.0/16."
            )

    @property
    def identify(self) -> bool:
        """Say whether trusted proxies name users."""
        return bool(self._user_header)

    def origin(self, peer: str, headers: Headers) -> str:
        """Return where a request comes from: the last address that no proxy of ours stands at."""
        if not self.is_ours(peer):
            return peer
        forwarded = [word.strip() for line in headers.getlist("x-forwarded-for") for word in line.split(",")]
        return next((word for word in reversed(forwarded) if not self.is_ours(word)), peer)[:_LONGEST_NAME]

    def is_tls(self, peer: str, headers: Headers) -> bool:
        """Say whether a proxy of ours was spoken to by TLS."""
        return self.is_ours(peer) and headers.get("x-forwarded-proto", "").strip().lower() == "https"

    def prefix(self, peer: str, headers: Headers) -> str:
        """Return what a proxy of ours cuts off each path, such as `/jobs`; nothing where none says so."""
        given = headers.get("x-forwarded-prefix", "").strip().rstrip("/") if self.is_ours(peer) else ""
        return given if len(given) <= _LONGEST_NAME and _PREFIX.fullmatch(given) else ""

    def user(self, peer: str, headers: Headers) -> User | None:
        """Return the user that a trusted proxy names; None if there is none."""
        if not self._user_header or not self.is_ours(peer):
            return None
        named = headers.getlist(self._user_header)
        if not named or not named[0].strip():
            return None
        name = named[0].strip()
        if len(named) > 1 or not name.isprintable() or len(name) > _LONGEST_NAME:
            detail = f"{self._user_header}: expected one name of at most {_LONGEST_NAME} printable characters."
            raise refused(403, "The caller is not known", detail)
        if not self._group_header:
            return User(name, self._scope)
        groups = {word.strip() for line in headers.getlist(self._group_header) for word in line.split(",")}
        scopes = [scope for group, scope in self._groups.items() if group in groups and scope is not None]
        return User(name, max(scopes, key=list(Scope).index, default=self._scope))

    def is_ours(self, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found in network for network in self._networks)


def is_forwarded(headers: Headers) -> bool:
    """Say whether a request has come through a proxy that says so."""
    return any(name in headers for name in _FORWARDED)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigurationError(
            f"Setting api_proxies: expected addresses and networks such as 10.0.0.5, 10.1.0.0/16; {error}."
        ) from error


def _scope(name: str, text: str) -> Scope | None:
    """Return a scope, or None for `none`."""
    if text == "none":
        return None
    try:
        return Scope(text)
    except ValueError:
        expected = ", ".join(Scope)
        raise ConfigurationError(f"Setting {name}: expected one of {expected} or none, found {text!r}.") from None


@lru_cache(1_000)
def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host in ("localhost", "localhost.localdomain") or host.endswith(".localhost")


def check_address(host: str, address: str, asks: bool) -> None:
    """Refuse to serve an address that other machines can reach while no key is needed.

    What `host` is called says nothing: any name may lead anywhere.
    """
    if not asks and not is_loopback(address):
        raise ConfigurationError(
            f"There is no key yet, and others can reach {host!r} ({address}). Make one "
            f"with `orchestrator keys create NAME`, or "
            f"serve this machine only, at 127.0.0.1."
        )


def check_sender(peer: str, headers: Headers) -> None:
    """Refuse other machines, and requests that a browser on this machine sends for a foreign page.

    Such a page is known by its origin, by what the browser says of its site, or by a name that leads here.
    """
    if not is_loopback(peer):
        raise refused(
            403, "The caller is on another machine", "There is no key yet, and so only this machine is served."
        )
    if is_forwarded(headers):
        detail = (
            "A proxy has passed this on, and so anybody may have sent it: make a key with `orchestrator keys create`."
        )
        raise refused(403, "The request came through a proxy", detail)
    host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    if not is_loopback(host):
        raise refused(
            421, "The request is for another server", f"It is reached as localhost or 127.0.0.1, not as {host!r:.100}."
        )
    if headers.get("sec-fetch-site") == "cross-site":
        raise refused(
            403, "The request is of a page of others", "A page of another site has sent it: open this address yourself."
        )
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        raise refused(
            403, "The request is of a page of others", f"A page of {origin!r:.100} may not speak to this server."
        )
