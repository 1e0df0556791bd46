"""An execution that a worker watches, with its executor and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.domain.executors.options import Execution
from orchestrator.domain.executors.record import Record
from orchestrator.workers.executors.listener import Listener
from orchestrator.workers.executors.protocol import Executor
from orchestrator.workers.running.job import Job


@dataclass(slots=True)
class Watched:
    """An execution that this worker watches."""

    job: Job
    executor: Executor
    execution: Execution
    record: Record
    ends: bool = False
    """Whether the work must only be cancelled, because its task was cancelled."""
    external_id: str = ""
    listener: Listener | None = None

    def __post_init__(self) -> None:
        self.external_id = self.record.external_id
