"""A cache of the registered names: tasks, workflows and flows, as workers and definitions have them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

import anyio.to_thread
import msgspec

from orchestrator.domain.fleet.announced import hiding, redacted_among
from orchestrator.domain.tasks.obstacles import unregistered, wrong_door
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask
from orchestrator.store.insights.lookup import UNHEARD

_FRESH = 10.0
"""Seconds for which a task that is known stays so."""
_AGAIN = 1.0
"""Seconds after which it is read again for a name that is not."""


class KnownNames:
    """Refuses workflows that are enqueued as tasks, and warns of tasks that no live worker has."""

    def __init__(self, read: Callable[[], dict[str, str]]) -> None:
        self._read = read
        self._kinds: dict[str, str] = {}
        self._redacted: Mapping[str, tuple[str, ...]] = {}
        self._at = float("-inf")
        self._lock = threading.Lock()

    def check(self, names: Iterable[str]) -> list[str]:
        """Return warnings about these names; raise InvalidTask if one is a workflow's."""
        names = {*names}
        if self._is_due(names):
            self._refresh(names)
        return self._told(names)

    async def acheck(self, name: str) -> list[str]:
        """Do the same on an event loop, in a thread only where something is to be read."""
        if self._is_due({name}):
            await anyio.to_thread.run_sync(self._refresh, {name})
        return self._told({name})

    def redacted(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """Return what tasks do not want shown, by their names."""
        if self._is_due(names := {*names}):
            self._refresh(names)
        return self._redacted

    def hiding(self, task: NewTask) -> NewTask:
        """Return a task that has been checked, which hides what its function does, too."""
        options = hiding(task.options, self._redacted.get(task.name, ()))
        return task if options == task.options else msgspec.structs.replace(task, options=options)

    def _is_due(self, names: set[str]) -> bool:
        age = time.monotonic() - self._at
        return age > _FRESH or (age > _AGAIN and any(self._kinds.get(name) != "task" for name in names))

    def _refresh(self, names: set[str]) -> None:
        with self._lock:
            if self._is_due(names):  # or another request has read it meanwhile
                kinds = self._read()
                self._kinds, self._redacted, self._at = kinds, redacted_among(kinds), time.monotonic()

    def _told(self, names: set[str]) -> list[str]:
        for name in sorted(names):
            if problem := wrong_door(name, self._kinds.get(name)):
                raise InvalidTask(problem)
        if UNHEARD in self._kinds:
            return []  # nobody knows what workers have
        return [unregistered(name) for name in sorted(names) if name not in self._kinds and not _is_found(name)]


def _is_found(name: str) -> bool:
    """Say whether every worker finds it by its name: a function in a file, an executor, or a task of our own."""
    return ":" in name or name.startswith("orchestrator.")
