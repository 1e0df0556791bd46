"""RQ's registries: the jobs of a queue that stand in one state."""

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

_MOST = 10_000
"""Jobs that are listed."""
_DERIVED = 5
"""The version of a UUID that was derived from a job's own id."""


def tasks_in(queue: str, *states: TaskState) -> list[TaskView]:
    """Return the tasks of a queue in these states, the oldest first."""
    from orchestrator.sdk.calls.insights import list_tasks  # loads SQLAlchemy, which workers do without
    from orchestrator.store.insights import TaskFilter

    wanted = TaskFilter(queue=queue, statuses=states)
    return list_tasks(app._client.backend.insights, wanted, limit=_MOST).tasks[::-1]


def job_id(task: TaskView) -> str:
    return Job.fetch(str(task.id)).id if task.id.version == _DERIVED else str(task.id)


class BaseRegistry:
    """The jobs of a queue in some states."""

    states: ClassVar[tuple[TaskState, ...]] = ()
    status: ClassVar[JobStatus | None] = None
    """A state of RQ's that several states here are looked at for."""

    def __init__(self, name: str = "default", connection: Any = None, queue: Any = None, **_: Any) -> None:
        self.name: str = name if queue is None else queue.name

    def _tasks(self) -> Iterator[TaskView]:
        for task in tasks_in(self.name, *self.states):
            if self.status is None or Job.fetch(str(task.id)).get_status(refresh=False) is self.status:
                yield task

    def get_job_ids(self, start: int = 0, end: int = -1, desc: bool = False, cleanup: bool = True) -> list[str]:
        """Return the ids of its jobs, the oldest first."""
        found = [job_id(task) for task in self._tasks()]
        found = found[::-1] if desc else found
        return found[start:] if end == -1 else found[start : end + 1]

    def get_job_count(self, cleanup: bool = True) -> int:
        """Return how many jobs it has, of 10,000 at most."""
        return sum(1 for _ in self._tasks())

    count = property(get_job_count)
    __len__ = get_job_count

    def __contains__(self, job: Job | str) -> bool:
        return (job if isinstance(job, str) else job.id) in self.get_job_ids()

    def requeue(self, job_or_id: Job | str, at_front: bool = False) -> Job:
        return self._job(job_or_id).requeue()

    def remove(self, job: Job | str, pipeline: Any = None, delete_job: bool = False) -> None:
        """Cancel a job that is open; one that has ended stays for as long as ended tasks are kept."""
        self._job(job).delete()

    def cleanup(self, timestamp: float | None = None, exception_handlers: Any = None) -> None:
        """Do nothing: the scheduler deletes what has been kept long enough."""

    def _job(self, job: Job | str) -> Job:
        return Job.fetch(job) if isinstance(job, str) else job


class StartedJobRegistry(BaseRegistry):
    """Jobs that run."""

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
    """Jobs that wait for others."""

    states = (TaskState.PENDING, TaskState.DISPATCHED, TaskState.RUNNING)  # a worker looks whether they have ended
    status = JobStatus.DEFERRED


class ScheduledJobRegistry(BaseRegistry):
    """Jobs that wait for their time."""

    states = (TaskState.PENDING,)
    status = JobStatus.SCHEDULED

    def get_scheduled_time(self, job_or_id: Job | str) -> datetime:
        return self._job(job_or_id)._read(refresh=True).wake_at or datetime.now(UTC)
