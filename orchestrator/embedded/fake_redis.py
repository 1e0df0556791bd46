"""The last resort: fakeredis behind a port. Run as a script: fake_redis.py FOLDER PORT.

This adds two things that fakeredis lacks: INFO, and connections that survive an error.
"""

from __future__ import annotations

import secrets
import sys
from typing import Any

from fakeredis import FakeRedisConnection, TcpFakeServer
from fakeredis._commands import command
from fakeredis._socket import FakeSocket
from redis.exceptions import ResponseError

INFO = {
    "redis_version": "7.0.0",
    "redis_mode": "standalone",
    "run_id": secrets.token_hex(20),  # tells clients that the server has restarted, without its data
    "used_memory": 0,
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
}


@command((), (bytes,))
def info(_: FakeSocket, *sections: bytes) -> bytes:  # noqa: ARG001
    """Answer INFO with the values that our processes read, whatever the section."""
    return "".join(f"{name}:{value}\r\n" for name, value in INFO.items()).encode()


class LastingConnection(FakeRedisConnection):
    """Returns an error as an answer, where fakeredis would send it and close the connection."""

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Return the next answer, including errors."""
        try:
            return super().read_response(*arguments, **options)
        except ResponseError as error:
            return error


if __name__ == "__main__":
    FakeSocket.info = info  # type: ignore[attr-defined]
    sys.modules[TcpFakeServer.__module__].FakeRedisConnection = LastingConnection  # type: ignore[attr-defined]
    TcpFakeServer(("127.0.0.1", int(sys.argv[2]))).serve_forever()
