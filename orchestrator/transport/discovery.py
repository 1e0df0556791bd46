"""Redis behind Sentinels, or in a cluster. Each new connection asks which server holds our keys now.

    redis+sentinel://[user:password@]host1:26379,host2:26379/mymaster/0
    redis+cluster://[user:password@]host1:6379,host2:6379

All keys of a shard carry one hash tag (`keys.py`). In a cluster they are therefore in one slot, on one server at a
time. When they move, the connection breaks as in an outage, and the next connection goes to the new server. That server
has a run id of its own, so the leader begins a new generation on it. Nothing is sent twice, because no process follows
a redirection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from redis import Redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

_PORTS = {"sentinel": 26379, "cluster": 6379}
_NODE_TIMEOUT = 1.0
"""Seconds to wait for the reply of one node or Sentinel before asking the next."""
_MOVED = (AskError, TryAgainError, ClusterDownError, ReadOnlyError)
"""Errors meaning that the keys are on another server, or soon will be. MovedError is a subclass of AskError."""

Address = tuple[str, int]
Locate = Callable[[float], Address]
"""Find the server within about this many seconds."""


class Discovered(NamedTuple):
    """How to find the server."""

    url: str
    """The URL of a single server, with user, password and connection options. Its host is a placeholder."""
    locate: Locate


def discovery_of(url: str) -> Discovered | None:
    """Return how to find the server behind a Sentinel or cluster URL; None if the URL names a server."""
    scheme, _, rest = url.partition("://")
    scheme, _, mode = scheme.partition("+")
    if not mode:
        return None
    if mode not in _PORTS or scheme == "unix":
        raise ValueError("expected redis+sentinel://, rediss+sentinel://, redis+cluster:// or rediss+cluster://")
    rest, _, namespace = rest.partition("#")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    user, at, hosts = authority.rpartition("@")
    nodes = [_address(host, _PORTS[mode]) for host in hosts.split(",")]
    options = dict(parse_qsl(query))
    if mode == "cluster":
        if path not in ("", "0"):
            raise ValueError(f"a cluster has only database 0, found {path!r}")
        credentials, path = f"{user}{at}", "0"
    else:
        service, _, path = path.partition("/")
        if not service:
            raise ValueError("the name of the master is missing: redis+sentinel://host/mymaster/0")
        sentinel_login = [quote(options.pop(f"sentinel_{name}", ""), safe="") for name in ("username", "password")]
        credentials = f"{':'.join(sentinel_login)}@" if any(sentinel_login) else ""
    tail = f"?{urlencode(options)}" if options else ""

    def ask(address: Address, seconds: float) -> tuple[Address | None, list[Address]]:
        """Ask one node or Sentinel. Return the server's address, if known, and the addresses of all nodes."""
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        limits = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
        url = f"{scheme}://{credentials}{host}:{address[1]}{tail}"
        with Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), **limits) as redis:
            if mode == "cluster":
                return _owner(redis.execute_command("CLUSTER SLOTS"), key_slot(f"{{{namespace}:0}}".encode()), address)
            reply: Any = redis.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", unquote(service))
            return (_text(reply[0]), int(reply[1])) if reply else None, []

    def locate(seconds: float) -> Address:
        give_up_at = time.monotonic() + seconds
        reason = "none of them knows it"
        for address in tuple(dict.fromkeys(nodes)):
            try:
                server, nodes_found = ask(address, max(0.05, min(_NODE_TIMEOUT, give_up_at - time.monotonic())))
            except (RedisError, OSError) as error:
                reason = str(error)
                continue
            if server is not None:
                nodes[:] = dict.fromkeys([*nodes_found, *nodes])  # for when all nodes of the URL are replaced
                return server
        raise ConnectionError(f"No server for our keys was found through {hosts}: {reason}")

    return Discovered(f"{scheme}://{user}{at}discovered/{path or 0}{tail}", locate)


def _owner(answer: Any, slot: int, queried: Address) -> tuple[Address | None, list[Address]]:
    """Return a slot's owner and all nodes from a CLUSTER SLOTS reply. A node without a host is `queried`."""
    owner, nodes = None, []
    for entry in answer if isinstance(answer, list) else []:
        first, last, *servers = entry
        addresses = [(_text(server[0]) or queried[0], int(server[1]) or queried[1]) for server in servers]
        nodes += addresses
        owner = addresses[0] if first <= slot <= last else owner
    return owner, nodes


def _address(host: str, port: int) -> Address:
    name, colon, number = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, number = host, str(port)
    if not name or not number.isdigit():
        raise ValueError(f"expected host:port, found {host!r}")
    return unquote(name).strip("[]"), int(number)


def _text(value: bytes | str | None) -> str:
    text = value.decode() if isinstance(value, bytes) else value or ""
    return "" if text == "?" else text


class Following:
    """Looks up the server that holds the keys before each connect, and disconnects once the keys have moved."""

    def __init__(self, *, locate: Locate, **options: Any) -> None:
        self._locate = locate
        super().__init__(**options)

    def _connect(self) -> Any:
        connection: Any = self
        connection.host, connection.port = self._locate(connection.socket_connect_timeout or _NODE_TIMEOUT)
        return super()._connect()  # type: ignore[misc]

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().read_response(*arguments, **options)  # type: ignore[misc]
        except ResponseError as error:
            if not isinstance(error, _MOVED):
                raise
            connection: Any = self
            connection.disconnect()
            raise ConnectionError(f"our keys are moving to another server: {error}") from error
