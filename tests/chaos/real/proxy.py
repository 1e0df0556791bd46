"""A TCP proxy between one process and one server, whose connections can be cut, blocked and delayed.

    process ── 127.0.0.1:port ── Proxy ── unix socket of Postgres or Redis

`cut` resets every connection and refuses new ones, as a rejecting firewall does. `stall` keeps connections open and
forwards nothing, like a pulled cable. `delay` makes each packet late. `heal` ends all of these; data that waited in a
blocked connection is then delivered, as TCP would.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

_CHUNK = 1 << 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
T = TypeVar("T")


class Proxies:
    """The event loop, in a thread, that all proxies of an experiment share."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._open: list[Proxy] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for proxy in self._open:
            proxy.close()
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _settle(self) -> None:
        """Wait until connections that were just accepted are closed."""
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks)

    def to(self, server: Path, address: str = "127.0.0.1") -> Proxy:
        """Return a new proxy in front of a server on a Unix socket."""
        proxy = Proxy(self._loop, server, address)
        self._open.append(proxy)
        return proxy


class Proxy:
    """One proxy. All methods are thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: Path, address: str) -> None:
        self._loop = loop
        self._path = server
        self._is_cut = False
        self._delay = 0.0
        self._is_forwarding = asyncio.Event()
        self._is_forwarding.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server = self._do(asyncio.start_server(self._accept, address, 0))
        self.address = address
        self.port: int = self._listener.sockets[0].getsockname()[1]

    @property
    def connections(self) -> int:
        """Number of connections that the process holds open."""
        return len(self._connections)

    def cut(self) -> None:
        """Reset every connection; refuse new ones until `heal`."""
        self._call(self._cut)

    def stall(self) -> None:
        """Forward nothing until `heal`; connections stay open, and new ones are accepted without a reply."""
        self._call(self._is_forwarding.clear)

    def delay(self, seconds: float) -> None:
        """Delay all data by `seconds` until `heal`."""
        self._delay = seconds

    def reset(self) -> None:
        self._call(self._reset)

    def redirect(self, server: Path) -> None:
        self._path = server

    def heal(self) -> None:
        self._is_cut = False
        self._delay = 0.0
        self._call(self._is_forwarding.set)

    def close(self) -> None:

        async def close() -> None:
            self._is_cut = True
            self._listener.close()
            for _ in range(10):  # a connection in transition needs several turns of the loop to close
                self._reset()
                await asyncio.gather(*self._connections, return_exceptions=True)
                await asyncio.sleep(0)

        self._do(close())

    # -- on the event loop

    def _cut(self) -> None:
        self._is_cut = True
        self._reset()

    def _reset(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            if not self._is_cut:
                await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the server is down or the proxy was cut: the process sees a reset
        finally:
            self._connections.discard(connection)
            _abort(writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        responses, requests = await asyncio.open_unix_connection(self._path)
        directions = [
            asyncio.ensure_future(self._forward(reader, requests)),
            asyncio.ensure_future(self._forward(responses, writer)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            requests.close()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                if self._delay:
                    await asyncio.sleep(self._delay)
                await self._is_forwarding.wait()
                sink.write(data)
                await sink.drain()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _call(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        self._do(call())


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, because a normal close would look like a server that has finished."""
    raw_socket: socket.socket | None = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if raw_socket is not None:
            raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
