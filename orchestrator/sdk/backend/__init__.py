"""The client's side of everything that is stored: one part for each thing, on connections that they share.

    backend ─┬─ tasks  runs  workflows  code  schedules  queues     what a client can do with each
             ├─ waiting                                             subscribe, look, and look again
             └─ connections                                         Postgres to write and read, Redis to nudge

This is the one package of the SDK that loads the store. A worker process never needs it, and so never pays for
SQLAlchemy and a database driver.
"""

from __future__ import annotations

from functools import partial

from orchestrator.sdk.backend.asking import obstacles
from orchestrator.sdk.backend.code import CodeBackend
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.backend.queues import QueueBackend
from orchestrator.sdk.backend.runs import RunBackend
from orchestrator.sdk.backend.schedules import ScheduleBackend
from orchestrator.sdk.backend.tasks import TaskBackend
from orchestrator.sdk.backend.waiting import EndWaiters
from orchestrator.sdk.backend.workflows import WorkflowBackend
from orchestrator.settings import Settings

__all__ = ["Backend"]


class Backend:
    """What an application can do with the things that it has stored. Connections are opened on first use."""

    def __init__(self, settings: Settings) -> None:
        self.connections = Connections(settings)
        self.waiting = EndWaiters(settings, partial(obstacles, self.connections))
        self.tasks = TaskBackend(self.connections, self.waiting)
        self.code = CodeBackend(self.connections, self.waiting, settings.max_payload)
        """Runs of workflows as code."""
        self.runs = RunBackend(self.connections, self.waiting, self.code)
        self.workflows = WorkflowBackend(self.connections, settings.max_payload)
        """Workflows that are data, and their runs."""
        self.schedules = ScheduleBackend(self.connections)
        self.queues = QueueBackend(self.connections)

    def close(self) -> None:
        """Close every connection."""
        self.waiting.close()
        self.connections.close()
