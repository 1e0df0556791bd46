"""An outbox that collects the messages of tasks that run inside a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from orchestrator.domain.tasks.task import KeyHolder, NewTask
from orchestrator.transport.codec import LogLine, ProgressMark
from orchestrator.workers.running.job import Job
from orchestrator.workers.running.task_runtime import Outbox


class KeptOutbox(Outbox):
    """An outbox that stores messages in lists."""

    def __init__(self) -> None:
        self.tasks: list[NewTask] = []
        self.marks: list[tuple[bytes, ProgressMark]] = []
        self.lines: list[tuple[bytes, LogLine]] = []

    def send_tasks(self, tasks: Sequence[NewTask]) -> Mapping[bytes, KeyHolder] | None:
        self.tasks.extend(tasks)
        return None

    def publish_progress(self, task: bytes, mark: ProgressMark) -> None:
        self.marks.append((task, mark))

    def log(self, job: Job, line: LogLine) -> None:
        self.lines.append((job.dispatch.id, line))

    def log_lines(self, job: Job, lines: LogLine) -> None:
        for text in lines.text.split("\n"):
            self.log(job, msgspec.structs.replace(lines, text=text))

    def save_details(self, job: Job, details: bytes) -> None:
        job.noted = details

    def page(self, job: Job, number: int) -> bytes | None:
        raise AssertionError(f"page {number} of {job}")


class ClosedOutbox(KeptOutbox):
    """An outbox for tasks that must enqueue nothing."""

    def send_tasks(self, tasks: Sequence[NewTask]) -> Mapping[bytes, KeyHolder] | None:
        raise AssertionError(f"nothing was to be enqueued: {tasks}")
