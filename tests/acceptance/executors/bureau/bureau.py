"""A third-party executor plugin for tests. Its service, the bureau, runs work by name, over TCP with JSON lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from orchestrator.executors import (
    Broken,
    Execution,
    ExecutorOptions,
    Finished,
    Gone,
    Outcome,
    Setup,
    Unreachable,
    Watcher,
)


class Bureau(ExecutorOptions, frozen=True, kw_only=True):
    """Options of the executor: the port of the bureau."""

    executor: ClassVar[str] = "bureau"
    port: int


class BureauExecutor:
    """The client of the bureau."""

    options: ClassVar[type[ExecutorOptions]] = Bureau

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    async def submit(self, execution: Execution) -> str:
        reply = await self._request(execution, "submit", input=execution.input)
        return str(reply["number"])

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:  # noqa: ARG002
        async for message in self._stream(execution, "watch"):
            if "log" in message:
                watcher.log(message["log"], level=message.get("level", "info"))
            elif "progress" in message:
                watcher.progress(*message["progress"])
            elif "error" in message:
                return Broken(
                    "BureauError", message["error"], message.get("retryable", True), message.get("detail", "")
                )
            elif "result" in message:
                return Finished(message["result"])
            else:
                raise Gone("the bureau knows nothing of it")
        raise Unreachable("the bureau has hung up")

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        await self._request(execution, "cancel")

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        await self._request(execution, "release")

    async def expire(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        await self._request(execution, "expire")

    async def close(self) -> None:
        """Nothing to close: each call opens its own connection."""

    async def _request(self, execution: Execution, verb: str, **more: Any) -> dict[str, Any]:
        async for reply in self._stream(execution, verb, **more):
            return reply
        raise Unreachable("the bureau has hung up")

    async def _stream(self, execution: Execution, verb: str, **more: Any) -> AsyncIterator[dict[str, Any]]:
        assert isinstance(execution.options, Bureau)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", execution.options.port, limit=2**24)
            try:
                writer.write(json.dumps({"verb": verb, "name": execution.name, **more}).encode() + b"\n")
                while line := await reader.readline():
                    yield json.loads(line)
            finally:
                writer.close()
        except OSError as error:
            raise Unreachable(str(error)) from error
