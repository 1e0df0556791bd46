"""Base classes of the executor harnesses; `orchestrator/testing/executor_stage.py` explains what a harness is.

To add an executor, write a harness in a file here, and add it to `HARNESSES` in `conftest.py`.
"""

from __future__ import annotations

from orchestrator.testing import executor_stage
from orchestrator.testing.executor_stage import AWAY, ExecutorHarness, Services
from tests.acceptance.stack import Process, Stack
from tests.doors import Door

__all__ = ["AWAY", "BehindDoor", "Harness", "Services", "Stage"]

Harness = ExecutorHarness


class BehindDoor(Harness):
    """A remote service behind a TCP proxy that can be shut."""

    door: Door

    def go_down(self) -> None:
        self.door.shut()

    def hang(self) -> None:
        self.door.hang()

    def come_back(self) -> None:
        self.door.open()


class Stage(executor_stage.Stage):
    """The stage of the executor suite, on the processes of the acceptance tests."""

    def __init__(self, stack: Stack, harness: Harness) -> None:
        super().__init__(stack, harness)
        self.stack = stack

    def worker(self, *options: str) -> Process:
        """Start a worker for one test. It replaces the shared worker; a test may start several."""
        process = super().worker(*options)
        assert isinstance(process, Process)
        return process
