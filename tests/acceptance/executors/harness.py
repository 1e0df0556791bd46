"""What the conformance suite must know of an executor, so that it can be run over it.

To join: write a `Harness` in a file here, which starts the remote side (a real one, or a local server that speaks its
protocol), and add it to `HARNESSES` in `conftest.py`. The work of a task is told by its input; `Work` says which kinds
there are. The remote side does them, and counts how often it has begun each task, which is what the suite trusts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from orchestrator.domain.executors.options import ExecutorOptions
from tests.acceptance.stack import Stack


class Harness(ABC):
    """One executor and its remote side, for one test."""

    name: ClassVar[str]
    without: ClassVar[frozenset[str]] = frozenset()
    """Tests that make no sense for it, by name; its documentation says why."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
        """Let work that is held return this value."""

    def go_down(self) -> None:
        """Make the remote side unreachable; what it does goes on."""
        raise NotImplementedError

    def come_back(self) -> None:
        """Make it reachable again."""
        raise NotImplementedError

    def lose(self, id: str) -> None:
        """Make the remote side forget that work, which ends."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Stop the remote side."""
