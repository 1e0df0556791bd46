"""Callers without a key: users that a trusted proxy names, and programs on this machine while no key exists.

Headers of proxies count only if the operator lists the proxy in `api_proxies`. Requests from web pages of other sites
are rejected.
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
_MAX_NAME_LENGTH = 200
_PREFIX = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)+")


class User(NamedTuple):
    name: str
    scope: Scope | None
    """The user's scope; None if the user has no access."""


class Proxies:
    """The trusted proxies, and the scopes of the users that they name."""

    def __init__(self, settings: Settings) -> None:
        self._networks = [_network(text) for text in _split(settings.api_proxies)]
        self._user_header = settings.api_user_header
        self._group_header = settings.api_group_header
        self._scope = _scope("api_user_scope", settings.api_user_scope)
        self._groups = {
            group.strip(): _scope("api_group_scopes", scope.strip())
            for group, _, scope in (word.partition("=") for word in _split(settings.api_group_scopes))
        }
        if self._user_header and not self._networks:
            raise ConfigurationError(
                "Setting api_user_header requires api_proxies: the addresses of the proxies whose header is "
                "trusted, such as 10.0.0.5, 10.1.0.0/16."
            )

    @property
    def names_users(self) -> bool:
        """Return whether trusted proxies name users."""
        return bool(self._user_header)

    def origin(self, peer: str, headers: Headers) -> str:
        """Return the client's address: the last address in X-Forwarded-For that is not a trusted proxy."""
        if not self.is_trusted(peer):
            return peer
        forwarded = [word.strip() for line in headers.getlist("x-forwarded-for") for word in line.split(",")]
        return next((word for word in reversed(forwarded) if not self.is_trusted(word)), peer)[:_MAX_NAME_LENGTH]

    def is_tls(self, peer: str, headers: Headers) -> bool:
        """Return whether the client connected to a trusted proxy by TLS."""
        return self.is_trusted(peer) and headers.get("x-forwarded-proto", "").strip().lower() == "https"

    def prefix(self, peer: str, headers: Headers) -> str:
        """Return the prefix that a trusted proxy cuts from each path, such as `/jobs`; empty if it sends none."""
        prefix = headers.get("x-forwarded-prefix", "").strip().rstrip("/") if self.is_trusted(peer) else ""
        return prefix if len(prefix) <= _MAX_NAME_LENGTH and _PREFIX.fullmatch(prefix) else ""

    def user(self, peer: str, headers: Headers) -> User | None:
        """Return the user that a trusted proxy names; None if it names none."""
        if not self._user_header or not self.is_trusted(peer):
            return None
        named = headers.getlist(self._user_header)
        if not named or not named[0].strip():
            return None
        name = named[0].strip()
        if len(named) > 1 or not name.isprintable() or len(name) > _MAX_NAME_LENGTH:
            detail = f"{self._user_header}: expected one name of at most {_MAX_NAME_LENGTH} printable characters."
            raise refused(403, "The user header is invalid", detail)
        if not self._group_header:
            return User(name, self._scope)
        groups = {word.strip() for line in headers.getlist(self._group_header) for word in line.split(",")}
        scopes = [scope for group, scope in self._groups.items() if group in groups and scope is not None]
        return User(name, max(scopes, key=list(Scope).index, default=self._scope))

    def is_trusted(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self._networks)


def is_forwarded(headers: Headers) -> bool:
    """Return whether a proxy has marked the request as forwarded."""
    return any(name in headers for name in _FORWARDED)


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigurationError(
            f"Setting api_proxies: expected addresses and networks such as 10.0.0.5, 10.1.0.0/16; {error}."
        ) from error


def _scope(name: str, text: str) -> Scope | None:
    if text == "none":
        return None
    try:
        return Scope(text)
    except ValueError:
        expected = ", ".join(Scope)
        raise ConfigurationError(f"Setting {name}: expected one of {expected} or none, found {text!r}.") from None


@lru_cache(1_000)
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host in ("localhost", "localhost.localdomain") or host.endswith(".localhost")


def check_address(host: str, address: str, requires_key: bool) -> None:
    """Raise ConfigurationError if other machines can reach the address while no key is needed.

    The check uses the resolved address: a host name may point anywhere.
    """
    if not requires_key and not is_loopback(address):
        raise ConfigurationError(
            f"There is no API key yet, and other machines can reach {host!r} ({address}). Create a key "
            f"with `orchestrator keys create NAME`, or "
            f"listen at 127.0.0.1 only."
        )


def check_sender(peer: str, headers: Headers) -> None:
    """Reject other machines, and requests that a browser on this machine sends for a foreign web page.

    Such a request has a foreign Origin, `Sec-Fetch-Site: cross-site`, or a host name that points to this machine.
    """
    if not is_loopback(peer):
        raise refused(
            403, "The client is on a different machine", "There is no API key yet, so only this machine is served."
        )
    if is_forwarded(headers):
        detail = (
            "Without an API key, requests through a proxy are rejected. Create one with `orchestrator keys create`."
        )
        raise refused(403, "The request came through a proxy", detail)
    host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    if not is_loopback(host):
        raise refused(421, "The request is for a different host", f"Use localhost or 127.0.0.1, not {host!r:.100}.")
    if headers.get("sec-fetch-site") == "cross-site":
        raise refused(
            403,
            "The request comes from a different site",
            "A page of a different site has sent the request: open this address directly.",
        )
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        raise refused(
            403,
            "The request comes from a different site",
            f"Pages of {origin!r:.100} may not send requests to this server.",
        )
