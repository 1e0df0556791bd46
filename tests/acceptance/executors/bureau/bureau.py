"""An executor as somebody else would write it: a bureau that does work under a name, over TCP, one JSON a line."""

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
    """Where the bureau is."""

    executor: ClassVar[str] = "bureau"
    port: int


class BureauExecutor:
    """Talks with the bureau."""

    options: ClassVar[type[ExecutorOptions]] = Bureau

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    async def submit(self, execution: Execution) -> str:
        answer = await self._ask(execution, "submit", input=execution.input)
        return str(answer["number"])

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:  # noqa: ARG002
        async for said in self._talk(execution, "watch"):
            if "log" in said:
                watcher.log(said["log"], level=said.get("level", "info"))
            elif "progress" in said:
                watcher.progress(*said["progress"])
            elif "error" in said:
                return Broken("BureauError", said["error"], said.get("retryable", True), said.get("detail", ""))
            elif "result" in said:
                return Finished(said["result"])
            else:
                raise Gone("the bureau knows nothing of it")
        raise Unreachable("the bureau has hung up")

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        await self._ask(execution, "cancel")

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        await self._ask(execution, "release")

    async def expire(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        await self._ask(execution, "expire")

    async def close(self) -> None:
        """Nothing is open between two calls."""

    async def _ask(self, execution: Execution, verb: str, **more: Any) -> dict[str, Any]:
        async for answer in self._talk(execution, verb, **more):
            return answer
        raise Unreachable("the bureau has hung up")

    async def _talk(self, execution: Execution, verb: str, **more: Any) -> AsyncIterator[dict[str, Any]]:
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
