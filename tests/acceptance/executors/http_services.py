"""The remote side of the executor `http`: an HTTP service that counts jobs and deduplicates requests by id."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

from orchestrator.domain.executors.builtin import Http
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.services import ServiceWorker
from orchestrator.transport import announcements as registry
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from tests.acceptance.executors.harness import BehindDoor, Services
from tests.doors import Door


class _Work:
    def __init__(self, input: dict[str, Any]) -> None:
        self.input = input
        self.end: dict[str, Any] | None = None
        self.changed = asyncio.Event()
        self.is_lost = False


class HttpHarness(BehindDoor):
    """A process with one registered service."""

    name = "http"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._works: dict[str, _Work] = {}
        self._begun: list[str] = []
        self._let_go: dict[str, dict[str, Any]] = {}
        """Results of `hold` jobs that tests have let go, by job id."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.door = Door(self._server.sockets[0].getsockname()[1])

    def prepare(self, services: Services) -> None:
        redis, keys = connect(services.settings.redis_url), Keys.of(services.settings)
        _, now = registry.find(redis, keys, "w")
        url = f"http://127.0.0.1:{self.door.port}"
        far_future = now + 1_000  # heartbeats are not tested here
        registry.write(redis, keys, ServiceWorker(id="w", url=url, services=("work",), heard_at=far_future))
        redis.close()

    def options(self) -> ExecutorOptions:
        return Http(service="work")

    def started(self, id: str) -> int:
        return self._begun.count(id)

    def is_running(self, id: str) -> bool:
        return any(work.input.get("id") == id and work.end is None for work in list(self._works.values()))

    def let_go(self, id: str, value: Any = None) -> None:
        end = {"result": value, "error": ""}

        async def set_end() -> None:
            self._let_go[id] = end
            for _, work in self._running(id):
                work.end = end
                work.changed.set()

        self._call(set_end())

    def lose(self, id: str) -> None:
        async def set_end() -> None:
            for name, work in self._running(id):
                work.end, work.is_lost = {}, True
                work.changed.set()
                del self._works[name]

        self._call(set_end())

    def close(self) -> None:
        self.door.shut()
        self._loop.call_soon_threadsafe(self._server.close)
        self._call(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _cancel_all(self) -> None:
        running_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running_tasks:
            task.cancel()
        await asyncio.gather(*running_tasks, return_exceptions=True)

    def _running(self, id: str) -> list[tuple[str, _Work]]:
        return [(name, work) for name, work in self._works.items() if work.input.get("id") == id and work.end is None]

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            if method == "DELETE":
                if (work := self._works.get(path.rsplit("/", 1)[1])) is not None and work.end is None:
                    work.end = {"result": None, "error": "cancelled"}
                    work.changed.set()
                writer.write(_response({}))
            else:
                size = next(int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
                writer.write(await self._do(json.loads(await reader.readexactly(size))))
            await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    async def _do(self, request: dict[str, Any]) -> bytes:
        name, input = request["request_id"], request["input"]
        work = self._works.get(name)
        if work is None:
            work = self._works[name] = _Work(input)
            self._begun.append(input["id"])
            _begin(work)
            if input["do"] == "hold":
                work.end = self._let_go.get(input["id"])
        if input["do"] == "garbage":
            work.end = {}
            return b"\x00\xff no HTTP at all\r\n\r\n"
        if work.end is None:
            await work.changed.wait()
        return b"" if work.is_lost else _response(work.end or {})


def _begin(work: _Work) -> None:
    input = work.input
    ends = {
        "return": {"result": input.get("value"), "error": ""},
        "fail": {"result": None, "error": input.get("message"), "retryable": input.get("retryable", True)},
        "large": {"result": "x" * input.get("bytes", 0)},
        "say": {"result": input.get("lines"), "logs": [f"line {number}" for number in range(input.get("lines", 0))]},
    }
    work.end = ends.get(input["do"])


def _response(document: dict[str, Any]) -> bytes:
    data = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
