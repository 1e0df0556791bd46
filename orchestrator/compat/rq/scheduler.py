"""rq-scheduler's Scheduler. Its cron and interval jobs become schedules, which the leading scheduler fires."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pkgutil import resolve_name
from typing import Any
from uuid import uuid4

from orchestrator.compat.rq.call import DEFAULT_TIMEOUT, function_name, parse_timeout
from orchestrator.compat.rq.job import Job
from orchestrator.compat.rq.queue import Queue
from orchestrator.compat.rq.registry import ScheduledJobRegistry
from orchestrator.compat.rq.values import app, tagged
from orchestrator.errors import InvalidTask, NotFound
from orchestrator.sdk.schedule_declarations import STEP

_PREFIX = "rq."
"""Prefix of workflow names for repeated jobs, followed by the job's id."""


@dataclass(frozen=True, kw_only=True)
class RepeatedJob:
    """A job that runs repeatedly. Each run is a separate job."""

    id: str
    func_name: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    next_run: datetime | None = None


class Scheduler:
    """Schedules jobs for later, or repeatedly. It needs no process of its own."""

    def __init__(self, queue_name: str = "default", queue: Queue | None = None, **_: Any) -> None:
        self._queue = queue or Queue(queue_name)

    def enqueue_at(self, scheduled_time: datetime, func: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Job:
        """Enqueue a call that runs at a time. A time without a zone is in UTC."""
        return self._queue.enqueue_at(scheduled_time, func, *args, **_rq_options(kwargs))

    def enqueue_in(self, time_delta: timedelta, func: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Job:
        return self._queue.enqueue_in(time_delta, func, *args, **_rq_options(kwargs))

    def cron(
        self, cron_string: str, func: str | Callable[..., Any], *, use_local_timezone: bool = False, **options: Any
    ) -> RepeatedJob:
        """Run a function on a cron schedule, in UTC."""
        if use_local_timezone or options.pop("repeat", None) is not None:
            raise InvalidTask(
                "Scheduler.cron: repeat and use_local_timezone are not covered. Use a schedule with timezone= and end=."
            )
        return self._repeat(func, {"cron": cron_string, "overlap": "allow"}, {"cron_string": cron_string}, **options)

    def schedule(
        self,
        scheduled_time: datetime,
        func: str | Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        interval: float | None = None,
        repeat: int | None = None,
        **options: Any,
    ) -> Job | RepeatedJob:
        """Run a function at a time and, with `interval`, again after each interval."""
        if interval is None:
            named = {name: value for name, value in options.items() if name != "queue_name"}
            return self._queue.enqueue_at(scheduled_time, func, args=args, kwargs=kwargs, **_rq_options(named))
        start = scheduled_time if scheduled_time.tzinfo else scheduled_time.replace(tzinfo=UTC)
        times = {"every": interval, "start": start.isoformat(), "overlap": "allow"}
        if repeat is not None:
            times["end"] = (start + timedelta(seconds=(repeat - 0.5) * interval)).isoformat()
        return self._repeat(func, times, {"interval": interval, "repeat": repeat}, args, kwargs, **options)

    def _repeat(
        self,
        func: str | Callable[..., Any],
        times: Mapping[str, Any],
        timing: Mapping[str, Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        queue_name: str | None = None,
        timeout: float | str | None = None,
        meta: Mapping[str, Any] | None = None,
        description: str | None = None,
    ) -> RepeatedJob:
        from orchestrator.sdk.dag import definitions  # loads YAML and cron, which programs without schedules do without

        name, job_id = function_name(func), id or str(uuid4())
        parameters = dict(kwargs or {})
        if args:
            function = resolve_name(name) if isinstance(func, str) else func
            parameters |= inspect.signature(function).bind_partial(*args).arguments
        data = {
            "name": f"{_PREFIX}{job_id}",
            "description": description or f"{name}, scheduled by a program written for rq-scheduler.",
            "queue": queue_name or self._queue.name,
            "schedule": dict(times),
            "params": {parameter: {"default": tagged(value)} for parameter, value in parameters.items()},
            "tasks": {
                STEP: {
                    "task": name,
                    "input": {parameter: f"${{params.{parameter}}}" for parameter in parameters},
                    "timeout": parse_timeout(timeout) or DEFAULT_TIMEOUT,
                }
            },
        }
        app._client.backend.schedules.apply([definitions.from_data(data, f"job {job_id}")], STEP, [])
        return RepeatedJob(id=job_id, func_name=name.replace(":", "."), meta={**timing, **(meta or {})})

    def cancel(self, job: Job | RepeatedJob | str) -> None:
        """Cancel a job, or delete the schedule of a repeated job."""
        job_id = job if isinstance(job, str) else job.id
        try:
            app.schedules[f"{_PREFIX}{job_id}"].delete()
        except NotFound:
            Job.fetch(job_id).cancel()

    def get_jobs(self, until: Any = None, with_times: bool = False) -> Iterator[Any]:
        """Yield repeated jobs, and the queue's jobs that wait for their time."""
        end = datetime.now(UTC) + until if isinstance(until, timedelta) else until
        jobs: list[tuple[Any, datetime | None]] = []
        for key in app.schedules:
            if key.startswith(_PREFIX):
                stored = app.schedules[key].status()
                job_id = stored.workflow.removeprefix(_PREFIX)
                jobs.append((RepeatedJob(id=job_id, next_run=stored.next_fire), stored.next_fire))
        waiting = ScheduledJobRegistry(queue=self._queue)
        jobs += [(job, waiting.get_scheduled_time(job)) for id in waiting.get_job_ids() for job in [Job.fetch(id)]]
        for job, moment in jobs:
            if end is None or (moment is not None and moment <= end):
                yield (job, moment) if with_times else job

    def __contains__(self, job: Job | RepeatedJob | str) -> bool:
        return (job if isinstance(job, str) else job.id) in {scheduled.id for scheduled in self.get_jobs()}


def _rq_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a job with RQ's names."""
    names = {"timeout": "job_timeout", "job_description": "description", "id": "job_id"}
    return {names.get(name, name): value for name, value in kwargs.items()}
