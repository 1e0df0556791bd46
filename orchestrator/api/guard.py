"""Who may speak to a server that asks for no key: programs of this machine, and no web page that a browser has open."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from orchestrator.api.problems import refused
from orchestrator.api.proxies import is_forwarded
from orchestrator.errors import ConfigurationError


@lru_cache(1_000)
def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host in ("localhost", "localhost.localdomain") or host.endswith(".localhost")


def check_address(host: str, address: str, asks: bool) -> None:
    """Refuse to serve an address where everybody could come in, because nobody is asked who they are.

    What `host` is called says nothing: any name may lead anywhere.
    """
    if not asks and not is_loopback(address):
        raise ConfigurationError(
            f"There is no key yet, and others can reach {host!r} ({address}). Make one "
            f"with `orchestrator keys create NAME`, or "
            f"serve this machine only, at 127.0.0.1."
        )


def check_sender(peer: str, headers: Headers) -> None:
    """Refuse who is not on this machine, and what a browser on it sends for a page of somebody else's.

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
