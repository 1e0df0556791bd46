"""The states of all our Jobs and Pods in a namespace, by one watch for each of the two kinds.

A watcher of an execution subscribes before it looks at its Job. A watch goes on where it broke off; where Kubernetes
has forgotten that version, everything is listed once more. While it cannot be reached, all watchers are notified.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from orchestrator.plugins.executors.kubernetes import OWN_LABEL
from orchestrator.telemetry import get_logger
from orchestrator.workers.executors.asking import Answer
from orchestrator.workers.executors.protocol import Unreachable
from orchestrator.workers.executors.rest import Api

log = get_logger("worker")

_PAGE = "500"
_LASTS = 240
"""Seconds for which Kubernetes keeps a watch open."""
_SILENCE = _LASTS + 30.0
_PAUSE = 0.2
_LONGEST_PAUSE = 30.0


class _Expired(Exception):
    """Kubernetes has forgotten the place where a watch would go on."""


class Followed:
    """One execution that somebody waits for."""

    def __init__(self) -> None:
        self.job: Mapping[str, Any] | None = None
        self.pod: Mapping[str, Any] | None = None
        self.is_gone = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def show(self, kind: str, thing: Mapping[str, Any] | None) -> None:
        """Take a Job or a Pod as it is now; None if it is gone."""
        if kind == "jobs":
            self.job, self.is_gone = thing, thing is None
        elif thing is not None or self.pod is None:
            self.pod = thing
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Say that nothing is known any more."""
        self._error = error
        self._changed.set()

    async def change(self, within: float | None = None) -> None:
        """Wait until something has changed, or so long."""
        try:
            async with asyncio.timeout(within):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()
        if self._error is not None:
            raise self._error


class NamespaceWatch:
    """Follows the executions of one namespace, while there are any that somebody waits for."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._followed: dict[str, set[Followed]] = {}
        self._going: list[asyncio.Task[None]] = []

    @contextmanager
    def following(self, name: str) -> Iterator[Followed]:
        """Follow an execution within this block."""
        one = Followed()
        self._followed.setdefault(name, set()).add(one)
        if not self._going:
            self._going = [asyncio.create_task(self._follow(kind)) for kind in ("jobs", "pods")]
        try:
            yield one
        finally:
            rest = self._followed[name] - {one}
            if rest:
                self._followed[name] = rest
            else:
                del self._followed[name]
            if not self._followed:
                self._stop()

    async def close(self) -> None:
        """Follow nothing any more."""
        going = self._going
        self._stop()
        if going:
            await asyncio.wait(going)

    def _stop(self) -> None:
        for task in self._going:
            task.cancel()
        self._going = []

    async def _follow(self, kind: str) -> None:
        version, pause = "", _PAUSE
        while True:
            try:
                if not version:
                    version = await self._list(kind)
                async for reached in self._watch(kind, version):
                    version, pause = reached, _PAUSE
                await asyncio.sleep(_PAUSE)
            except _Expired:
                version = ""
            except Exception as error:  # noqa: BLE001  # it is for those who wait
                if not isinstance(error, Unreachable):
                    log.warning("kubernetes.watch_failed kind=%s namespace=%s error=%r", kind, self._namespace, error)
                for name in list(self._followed):
                    for one in self._followed[name]:
                        one.fail(Unreachable(f"Kubernetes: {error}"))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _list(self, kind: str) -> str:
        """Show everything as it is, and return from where a watch goes on."""
        query, seen = {"labelSelector": OWN_LABEL, "limit": _PAGE}, set[str]()
        before = set(self._followed)
        while True:
            answer = await self._api.ask("GET", path_of(kind, self._namespace), query)
            data = self._understood(answer)
            for thing in data.get("items") or ():
                seen |= self._show(kind, "", thing)
            more = data["metadata"].get("continue")
            if not more:
                break
            query["continue"] = more
        if kind == "jobs":
            for name in (before - seen) & set(self._followed):
                for one in self._followed[name]:
                    if one.job is not None:  # a watcher that has not seen it yet is about to look
                        one.show(kind, None)
        return str(data["metadata"]["resourceVersion"])

    async def _watch(self, kind: str, version: str) -> AsyncIterator[str]:
        """Show what changes, and yield from where it could go on."""
        query = {
            "labelSelector": OWN_LABEL,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_LASTS),
        }
        async with self._api.lines(path_of(kind, self._namespace), query, silence=_SILENCE) as (answer, lines):
            if answer.status != 200:
                self._understood(answer)
            async for line in lines:
                event = msgspec.json.decode(line)
                thing = event["object"]
                if event["type"] == "ERROR":
                    self._understood(Answer(int(thing.get("code", 500)), {}, msgspec.json.encode(thing)))
                if event["type"] != "BOOKMARK":
                    self._show(kind, event["type"], thing)
                yield str(thing["metadata"]["resourceVersion"])

    def _show(self, kind: str, event: str, thing: Mapping[str, Any]) -> set[str]:
        name = thing["metadata"].get("labels", {}).get(OWN_LABEL, "")
        for one in self._followed.get(name, ()):
            one.show(kind, None if event == "DELETED" else thing)
        return {name}

    def _understood(self, answer: Answer) -> Any:
        if answer.status == 410:
            raise _Expired
        if answer.status != 200 or not isinstance(answer.data, dict):
            raise Unreachable(told(answer))
        return answer.data


def path_of(kind: str, namespace: str, name: str = "") -> str:
    """Return where things of a kind are found."""
    group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
    return f"{group}/namespaces/{namespace}/{kind}" + (f"/{name}" if name else "")


def told(answer: Answer) -> str:
    """Return what Kubernetes says of a request that it has refused."""
    data = answer.data
    said = data.get("message") if isinstance(data, dict) else None
    return f"Kubernetes answered with status {answer.status}: {said or answer.body[:200].decode(errors='replace')}"
