"""RQ's registries: the jobs of a queue in one state."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from orchestrator.compat.rq.call import JobStatus
from orchestrator.compat.rq.job import Job
from orchestrator.compat.rq.values import app
from orchestrator.domain.states import TaskState

if TYPE_CHECKING:
    from orchestrator.store.insights import TaskView

_MAX_JOBS = 10_000
"""Jobs listed, at most."""
_DERIVED_VERSION = 5
"""UUID version of a task id that was derived from a job id."""


def tasks_in(queue: str, *states: TaskState) -> list[TaskView]:
    """Return the tasks of a queue in these states, the oldest first."""
    from orchestrator.sdk.calls.insights import list_tasks  # loads SQLAlchemy, which workers do without
    from orchestrator.store.insights import TaskFilter

    task_filter = TaskFilter(queue=queue, statuses=states)
    return list_tasks(app._client.backend.insights, task_filter, limit=_MAX_JOBS).tasks[::-1]


def job_id(task: TaskView) -> str:
    return Job.fetch(str(task.id)).id if task.id.version == _DERIVED_VERSION else str(task.id)


class BaseRegistry:
    """The jobs of a queue in some states."""

    states: ClassVar[tuple[TaskState, ...]] = ()
    status: ClassVar[JobStatus | None] = None
    """RQ's status that jobs must have, if the task states alone do not determine it."""

    def __init__(self, name: str = "default", connection: Any = None, queue: Any = None, **_: Any) -> None:
        self.name: str = name if queue is None else queue.name

    def _tasks(self) -> Iterator[TaskView]:
        for task in tasks_in(self.name, *self.states):
            if self.status is None or Job.fetch(str(task.id)).get_status(refresh=False) is self.status:
                yield task

    def get_job_ids(self, start: int = 0, end: int = -1, desc: bool = False, cleanup: bool = True) -> list[str]:
        """Return the ids of the jobs, the oldest first."""
        ids = [job_id(task) for task in self._tasks()]
        ids = ids[::-1] if desc else ids
        return ids[start:] if end == -1 else ids[start : end + 1]

    def get_job_count(self, cleanup: bool = True) -> int:
        """Return the number of jobs, at most 10,000."""
        return sum(1 for _ in self._tasks())

    count = property(get_job_count)
    __len__ = get_job_count

    def __contains__(self, job: Job | str) -> bool:
        return (job if isinstance(job, str) else job.id) in self.get_job_ids()

    def requeue(self, job_or_id: Job | str, at_front: bool = False) -> Job:
        return self._job(job_or_id).requeue()

    def remove(self, job: Job | str, pipeline: Any = None, delete_job: bool = False) -> None:
        """Cancel an open job. An ended job stays for the retention time of ended tasks."""
        self._job(job).delete()

    def cleanup(self, timestamp: float | None = None, exception_handlers: Any = None) -> None:
        """Do nothing: the scheduler deletes tasks after their retention time."""

    def _job(self, job: Job | str) -> Job:
        return Job.fetch(job) if isinstance(job, str) else job


class StartedJobRegistry(BaseRegistry):
    """Jobs that are running."""

    states = (TaskState.RUNNING,)
    status = JobStatus.STARTED


class FinishedJobRegistry(BaseRegistry):
    """Jobs that have succeeded."""

    states = (TaskState.SUCCESS,)


class FailedJobRegistry(BaseRegistry):
    """Jobs that have failed."""

    states = (TaskState.FAILED,)


class CanceledJobRegistry(BaseRegistry):
    """Jobs that were cancelled."""

    states = (TaskState.CANCELLED, TaskState.SKIPPED)


class DeferredJobRegistry(BaseRegistry):
    """Jobs that wait for other jobs."""

    states = (TaskState.PENDING, TaskState.DISPATCHED, TaskState.RUNNING)  # a worker checks the dependencies
    status = JobStatus.DEFERRED


class ScheduledJobRegistry(BaseRegistry):
    """Jobs that wait for a time."""

    states = (TaskState.PENDING,)
    status = JobStatus.SCHEDULED

    def get_scheduled_time(self, job_or_id: Job | str) -> datetime:
        return self._job(job_or_id)._read(refresh=True).wake_at or datetime.now(UTC)
