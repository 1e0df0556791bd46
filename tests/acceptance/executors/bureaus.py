"""The bureau, the remote service of the executor `bureau`, in a thread of the test process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from orchestrator.domain.executors.options import ExecutorOptions
from tests.acceptance.executors.harness import BehindDoor, Services
from tests.doors import Door

PLUGIN = Path(__file__).parent / "bureau"
sys.path.insert(0, str(PLUGIN))  # its entry point is found here, like that of an installed package


class _Work:
    def __init__(self, input: dict[str, Any]) -> None:
        self.input = input
        self.end: dict[str, Any] | None = None
        self.changed = asyncio.Event()


class BureauHarness(BehindDoor):
    """A bureau that counts executions."""

    name = "bureau"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.works: dict[str, _Work] = {}
        self.begun: list[str] = []
        self._let_go: dict[str, dict[str, Any]] = {}
        """Results of `hold` work that tests have let go, by the work's id."""
        self.expired: list[str] = []
        self.released: list[str] = []
        self.crash: dict[str, Any] = {}
        """Callbacks by moment: before a verb (`before submit`), at a verb (`submit`), or after it (`after submit`)."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.door = Door(self._server.sockets[0].getsockname()[1])

    def prepare(self, services: Services) -> None:
        path = [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        services.environment["PYTHONPATH"] = os.pathsep.join(path)

    def options(self) -> ExecutorOptions:
        options: ExecutorOptions = import_module("bureau").Bureau(port=self.door.port)
        return options

    def started(self, id: str) -> int:
        return self.begun.count(id)

    def is_running(self, id: str) -> bool:
        return any(work.input.get("id") == id and work.end is None for work in self.works.values())

    def let_go(self, id: str, value: Any = None) -> None:
        self._let_go[id] = {"result": value}
        self._end(id, self._let_go[id])

    def lose(self, id: str) -> None:
        self._end(id, {"gone": True})

    def close(self) -> None:
        self.door.shut()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _end(self, id: str, end: dict[str, Any]) -> None:
        async def set_end() -> None:
            for work in self.works.values():
                if work.input.get("id") == id and work.end is None:
                    work.end = end
                    work.changed.set()

        self._call(set_end())

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            verb, name = request["verb"], request["name"]
            await self._run_crash(f"before {verb}")
            work = self.works.get(name)
            if verb == "submit":
                if work is None:
                    work = self.works[name] = _Work(request["input"])
                    self.begun.append(work.input.get("id", ""))
                    self._do(work)
                await self._run_crash(verb)
                await self._send(writer, {"number": list(self.works).index(name)})
                await self._run_crash("after submit")
            elif verb == "watch" and work is not None:
                await self._stream(work, writer)
            elif verb == "cancel":
                if work is not None and work.end is None:
                    work.end = {"error": "cancelled"}
                    work.changed.set()
                await self._send(writer, {})
            elif verb in ("expire", "release"):
                (self.released if verb == "release" else self.expired).append(name)
                await self._send(writer, {})
            else:
                await self._send(writer, {"gone": True})
        except (OSError, json.JSONDecodeError):
            pass
        finally:
            writer.close()

    async def _run_crash(self, moment: str) -> None:
        if (callback := self.crash.pop(moment, None)) is not None:
            await asyncio.get_running_loop().run_in_executor(None, callback)

    def _do(self, work: _Work) -> None:
        do = work.input.get("do")
        if do == "hold":
            work.end = self._let_go.get(work.input["id"])
        elif do == "return":
            work.end = {"result": work.input.get("value")}
        elif do == "fail":
            work.end = {"error": work.input["message"], "retryable": work.input.get("retryable", True)}
        elif do == "large":
            work.end = {"result": "x" * work.input["bytes"]}
        elif do == "say":
            work.end = {"result": work.input["lines"]}

    async def _stream(self, work: _Work, writer: asyncio.StreamWriter) -> None:
        await self._run_crash("watch")
        if work.input.get("do") == "say":
            for number in range(work.input["lines"]):
                await self._send(writer, {"log": f"line {number}"})
            await self._send(writer, {"progress": [1, 2, "half"]})
        if work.input.get("do") == "garbage":
            writer.write(b"\x00\xff no JSON at all\n")
            await writer.drain()
            return
        if work.end is None:
            await work.changed.wait()
        await self._run_crash("end")
        await self._send(writer, work.end or {})

    async def _send(self, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()
