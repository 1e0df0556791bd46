"""Tasks that run on an existing Dask cluster.

The key of the future is the name of the execution, so the cluster runs it once, however often it is submitted. The
future is published, so that the cluster keeps it while nobody watches. If a worker of the cluster dies, Dask itself
reruns its work, including finished results that nobody has fetched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import msgspec
from distributed import Client, KilledWorker
from distributed.client import FutureCancelledError

from orchestrator.domain.executors.options import Broken, Execution, Outcome
from orchestrator.plugins.executors.dask import Dask
from orchestrator.plugins.executors.dask.on_cluster import CALL, STOP
from orchestrator.workers.executors.protocol import Gone, Setup, Unequipped, Unreachable, Watcher, function_outcome

_CONNECT_TIMEOUT = 10.0
"""Seconds that a connection may take, unless the setting executor_timeout is lower."""
_STOP_INTERVAL = 0.2
"""Seconds between two attempts to stop a running function."""
_LOST = "scheduler-connection-lost"


class DaskExecutor:
    """Submits functions to Dask clusters, and waits for their futures."""

    options: ClassVar[type[Dask]] = Dask

    def __init__(self, setup: Setup) -> None:
        self._timeout = min(_CONNECT_TIMEOUT, setup.settings.executor_timeout)
        self._clients: dict[str, Any] = {}
        self._lock = asyncio.Lock()

    async def submit(self, execution: Execution) -> str:
        """Submit a function under the execution's name and publish its future, unless that was done before."""
        options, name = cast(Dask, execution.options), execution.name
        client = await self._client(execution)
        with _reaching(options):
            if await client.get_dataset(name, default=None) is None:
                call = (options.function, list(execution.arguments), dict(execution.input))
                options_for_dask = {"priority": options.priority, "resources": options.resources or None, "retries": 0}
                future = client.submit(CALL, *call, key=name, pure=False, **options_for_dask)
                try:
                    await client.publish_dataset(future, name=name)
                except KeyError:
                    return name  # another worker has just published it
        return name

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Wait for Dask's notification of the end. Log the output, and return the outcome."""
        client = await self._client(execution)
        with _reaching(cast(Dask, execution.options)):
            future = await client.get_dataset(external_id, default=None)
            if future is None:
                raise Gone(f"The Dask cluster does not know {external_id} any longer: its scheduler was restarted.")
            result = await future._result(raiseit=False)
            if isinstance(result, dict) and (lines := result.get("lines")):
                watcher.log(lines.removesuffix("\n"))
            return _outcome(result, external_id)

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Cancel the future, and stop the function where it runs. Return when no worker runs it."""
        client = await self._client(execution)
        with _reaching(cast(Dask, execution.options)):
            future = await client.get_dataset(execution.name, default=None)
            if future is not None:
                await client.cancel([future], force=True)
            while True in (await client.run(STOP, execution.name, on_error="return")).values():
                await asyncio.sleep(_STOP_INTERVAL)
            await client.unpublish_dataset(execution.name)

    async def release(self, execution: Execution, external_id: str) -> None:
        """Let the cluster forget the future."""
        client = await self._client(execution)
        with _reaching(cast(Dask, execution.options)):
            await client.unpublish_dataset(external_id)

    async def close(self) -> None:
        """Close connections. Published futures continue."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def _client(self, execution: Execution) -> Any:
        options = cast(Dask, execution.options)
        address = options.address or os.environ.get(options.address_variable, "")
        if not address:
            raise Unequipped(
                f"Task {execution.task} is for a Dask cluster that this worker does not know: set "
                f"{options.address_variable} in its environment, or the option address."
            )
        async with self._lock:
            client = self._clients.get(address)
            if client is None or client.status != "running":
                if client is not None:
                    del self._clients[address]
                    await client.close()
                with _reaching(options):
                    client = await Client(
                        address, asynchronous=True, set_as_default=False, timeout=self._timeout, name="orchestrator"
                    )
                self._clients[address] = client
            return client


@contextmanager
def _reaching(options: Dask) -> Iterator[None]:
    """Raise Unreachable for connection errors."""
    try:
        yield
    except (OSError, CancelledError) as error:
        where = options.address or options.address_variable
        raise Unreachable(f"The Dask cluster {where}: {error or type(error).__name__}") from error


def _outcome(result: Any, name: str) -> Outcome:
    if isinstance(result, FutureCancelledError):
        if result.reason == _LOST:
            raise Unreachable(f"The connection to the Dask cluster broke: {result}")
        raise Gone(f"{name} was cancelled on the Dask cluster.")
    if isinstance(result, tuple):
        error = result[1]
        if isinstance(error, KilledWorker):
            return Broken("WorkerLost", f"Workers of the Dask cluster died with it: {error}")
        return Broken(type(error).__name__, f"Dask could not run it: {error}")
    return function_outcome(result, msgspec.json.decode(result.get("output", "null")))
