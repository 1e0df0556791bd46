"""What the conformance suite must know of an executor, so that it can be run over it.

To join: write a `Harness` in a file here, which starts the remote side (a real one, or a local server that speaks its
protocol), and add it to `HARNESSES` in `conftest.py`. The work of a task is told by its input; `Work` says which kinds
there are. The remote side does them, and counts how often it has begun each task, which is what the suite trusts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import project

from orchestrator import Handle
from orchestrator.domain.executors.options import ExecutorOptions
from tests.acceptance.stack import Process, Stack
from tests.doors import Door
from tests.waiting import eventually

AWAY = frozenset(
    {
        "test_a_remote_side_that_is_away_is_waited_for",
        "test_a_remote_side_that_is_away_for_minutes_is_asked_again_until_it_is_back",
        "test_time_runs_while_the_remote_side_is_away",
    }
)
"""Tests of a remote side that can be away while workers are not."""


class Harness(ABC):
    """One executor and its remote side, for one test."""

    name: ClassVar[str]
    without: ClassVar[frozenset[str]] = frozenset()
    """Tests that make no sense for it, by name; its documentation says why."""
    soon: ClassVar[float] = 1.0
    """Seconds within which work has surely begun, on a busy machine too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def settings(self) -> dict[str, str]:
        """Return what schedulers, workers and clients have set for it."""
        return {}

    def prepare(self, stack: Stack) -> None:  # noqa: B027
        """Change the environment of processes that are started from now on."""

    def worker_options(self) -> list[str]:
        """Return what a worker is started with."""
        return []

    @abstractmethod
    def options(self) -> ExecutorOptions:
        """Return what a task says to the executor.

        Its input says what to do: {"do": "return", "value": …}, {"do": "fail", "message": …}, {"do": "hold"} until
        `let_go`, {"do": "say", "lines": n}, {"do": "large", "bytes": n}, {"do": "garbage"}; and "id", a word by which
        the remote side counts.
        """

    @abstractmethod
    def started(self, id: str) -> int:
        """Return how often the work of a task was begun at the remote side."""

    @abstractmethod
    def is_running(self, id: str) -> bool:
        """Say whether the remote side does that work now."""

    @abstractmethod
    def let_go(self, id: str, value: Any = None) -> None:
        """Let work that is held return this value, also where it begins only now, or once more.

        A task that is `running` is watched; a service may be asked, or may ask, a moment after that.
        """

    def go_down(self) -> None:
        """Make the remote side unreachable; what it does goes on."""
        raise NotImplementedError

    def hang(self) -> None:
        """Make the remote side refuse nobody and answer nobody; what it does goes on."""
        raise NotImplementedError

    def come_back(self) -> None:
        """Make it reachable again."""
        raise NotImplementedError

    def lose(self, id: str) -> None:
        """Make the remote side forget that work, which has begun and ends."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Stop the remote side."""


class BehindDoor(Harness):
    """A remote side that workers reach through a door, which can be shut."""

    door: Door

    def go_down(self) -> None:
        self.door.shut()

    def hang(self) -> None:
        self.door.hang()

    def come_back(self) -> None:
        self.door.open()


class Stage:
    """A scheduler, workers, and tasks that the executor of a harness does."""

    def __init__(self, stack: Stack, harness: Harness) -> None:
        self.stack = stack
        self.harness = harness
        self._shared: Process | None = None
        self._own: list[Process] = []
        stack.scheduler()

    def usual(self) -> Process:
        """Return the worker that all have who disturb nothing."""
        if self._shared is None:
            self._shared = self._worker()
        return self._shared

    def worker(self, *options: str) -> Process:
        """Start a worker of this test's own, which is then the only one, but for others of its own."""
        if self._shared is not None:
            self._shared.stop()
            self._shared = None
        self._own.append(self._worker(*options))
        return self._own[-1]

    def leave(self) -> None:
        """Stop what a test has started."""
        for process in self._own:
            process.stop()
        self._own = []

    def _worker(self, *options: str) -> Process:
        return self.stack.worker(*self.harness.worker_options(), *options)

    def enqueue(self, do: str, options: dict[str, Any] | None = None, **more: Any) -> tuple[Handle[Any], str]:
        """Enqueue work; return its handle, and the word by which the remote side counts it."""
        id = uuid4().hex[:8]
        task = project.work.options(executor=self.harness.options(), **(options or {}))
        return task.enqueue(do=do, id=id, **more), id

    def hold(self, **options: Any) -> tuple[Handle[Any], str]:
        """Enqueue work that is held; return once it is begun and watched."""
        ((handle, id),) = self.hold_many(1, **options)
        return handle, id

    def hold_many(self, count: int, **options: Any) -> list[tuple[Handle[Any], str]]:
        """Enqueue work that is held, all at once; return when all of it is begun and watched."""
        held = [self.enqueue("hold", options) for _ in range(count)]
        for handle, id in held:
            self.is_begun(id)
            self.is_watched(handle)
        return held

    def is_begun(self, id: str) -> None:
        eventually(lambda: self.harness.started(id) >= 1, f"{id} is begun")

    def is_watched(self, handle: Handle[Any]) -> None:
        eventually(lambda: handle.status() == "running", f"{handle.id} runs")

    def attempt(self, handle: Handle[Any]) -> int:
        """Return the attempt that is running, or 0."""
        found = self.stack.sql(
            "SELECT attempt FROM orchestrator.tasks WHERE id = :id AND status = 'running'", id=handle.id
        )
        return int(found[0][0]) if found else 0

    def failures(self, handle: Handle[Any]) -> int:
        """Return how often a task that has ended had failed."""
        return int(self.stack.scalar("SELECT failures FROM orchestrator.ended_tasks WHERE id = :id", id=handle.id))
