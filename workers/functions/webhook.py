"""Post JSON to an address that a workflow gives, and nowhere else.

The name is resolved once, each address it has is judged, and the connection is made to one that was found good: what
the name is resolved to a moment later does not matter. Redirects are not followed, and proxies of the environment,
which would resolve the name for themselves, are not used.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from orchestrator.domain.tasks.destinations import Destinations
from orchestrator.errors import GiveUp

_TIMEOUT = 30.0
_PORTS = {"http": 80, "https": 443}
_AS_IT_IS = "!#$%&'()*+,/:;=?@[]~"
"""What a path and its question may hold; the rest is quoted."""


class WebhookFailed(Exception):
    """The other side did not take a webhook."""


class _Target(NamedTuple):
    """An address, taken apart."""

    is_secure: bool
    host: str
    port: int
    path: str


def post(url: str, body: Any, destinations: Destinations) -> int:
    """Post JSON; return the answer's status. An answer other than 2xx is a failure, and is tried again."""
    if destinations.mode == "off":
        raise GiveUp("Webhooks are turned off for this worker (setting webhooks).")
    target = _parse(url)
    try:
        data = json.dumps(body, default=str, allow_nan=False).encode()
    except ValueError as error:
        raise GiveUp(f"The body of the webhook goes out as JSON, which has no NaN and no infinity: {error}.") from None
    connection = _Connection(target, _resolve(target, destinations))
    try:
        connection.request("POST", target.path, data, {"Content-Type": "application/json", "Connection": "close"})
        status = connection.getresponse().status
    except http.client.HTTPException as error:
        raise WebhookFailed(f"{target.host} answered in no way that HTTP knows: {type(error).__name__}.") from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        remark = " Redirects are not followed: give the address that they lead to." if 300 <= status < 400 else ""
        raise WebhookFailed(f"{target.host} answered with status {status}, where 2xx was expected.{remark}")
    return status


def _parse(url: str) -> _Target:
    """Take an address apart; what is wrong with it is said without it, for it may hold a secret."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise GiveUp("The address of the webhook cannot be read.") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise GiveUp(f"A webhook has an http or https address; found one with {parts.scheme[:20] or 'no scheme'!r}.")
    if parts.username is not None or parts.password is not None:
        raise GiveUp("The address of a webhook cannot hold a user or password: put a token into its path or its body.")
    path = quote(parts.path or "/", safe=_AS_IT_IS) + (f"?{quote(parts.query, safe=_AS_IT_IS)}" if parts.query else "")
    return _Target(parts.scheme == "https", parts.hostname, port or _PORTS[parts.scheme], path)


def _resolve(target: _Target, destinations: Destinations) -> list[str]:
    """Return the addresses of a host that may be reached, in the system's order."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise GiveUp("The host of the webhook is no name that can be resolved.") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    refusals = {address: destinations.refusal(target.host, address) for address in addresses}
    reachable = [address for address, refusal in refusals.items() if refusal is None]
    if not reachable:
        reasons = "; ".join(filter(None, refusals.values())) or "it has no address"
        raise GiveUp(f"The webhook is not sent: {reasons}. The worker's operator can allow it.")
    return reachable


class _Connection(http.client.HTTPConnection):
    """A connection to one of some addresses, and not to whatever the name is resolved to by then."""

    def __init__(self, target: _Target, addresses: list[str]) -> None:
        super().__init__(target.host, target.port, timeout=_TIMEOUT)
        self.default_port = _PORTS["https" if target.is_secure else "http"]
        self._target = target
        self._addresses = addresses

    def connect(self) -> None:
        for place, address in enumerate(self._addresses, 1):
            try:
                self.sock = socket.create_connection((address, self._target.port), _TIMEOUT)
                break
            except OSError:
                if place == len(self._addresses):
                    raise
        if self._target.is_secure:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self._target.host)
