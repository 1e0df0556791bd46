"""rq-scheduler's Scheduler. Its cron and interval jobs are schedules, which the leading scheduler fires."""

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
"""Before the id of a repeated job, in the name of its workflow."""


@dataclass(frozen=True, kw_only=True)
class RepeatedJob:
    """A job that runs again and again; each run is a job of its own."""

    id: str
    func_name: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    next_run: datetime | None = None


class Scheduler:
    """Starts jobs later, or again and again. There is no process to run for it."""

    def __init__(self, queue_name: str = "default", queue: Queue | None = None, **_: Any) -> None:
        self._queue = queue or Queue(queue_name)

    def enqueue_at(self, scheduled_time: datetime, func: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Job:
        """Have a worker run a function at a time; one without a zone is in UTC."""
        return self._queue.enqueue_at(scheduled_time, func, *args, **_renamed(kwargs))

    def enqueue_in(self, time_delta: timedelta, func: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Job:
        return self._queue.enqueue_in(time_delta, func, *args, **_renamed(kwargs))

    def cron(
        self, cron_string: str, func: str | Callable[..., Any], *, use_local_timezone: bool = False, **options: Any
    ) -> RepeatedJob:
        """Run a function by the clock, in UTC."""
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
        """Run a function at a time, and again after each interval."""
        if interval is None:
            named = {name: value for name, value in options.items() if name != "queue_name"}
            return self._queue.enqueue_at(scheduled_time, func, args=args, kwargs=kwargs, **_renamed(named))
        start = scheduled_time if scheduled_time.tzinfo else scheduled_time.replace(tzinfo=UTC)
        times = {"every": interval, "start": start.isoformat(), "overlap": "allow"}
        if repeat is not None:
            times["end"] = (start + timedelta(seconds=(repeat - 0.5) * interval)).isoformat()
        return self._repeat(func, times, {"interval": interval, "repeat": repeat}, args, kwargs, **options)

    def _repeat(
        self,
        func: str | Callable[..., Any],
        times: Mapping[str, Any],
        about: Mapping[str, Any],
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

        name, chosen = function_name(func), id or str(uuid4())
        given = dict(kwargs or {})
        if args:
            function = resolve_name(name) if isinstance(func, str) else func
            given |= inspect.signature(function).bind_partial(*args).arguments
        data = {
            "name": f"{_PREFIX}{chosen}",
            "description": description or f"{name}, scheduled by a program written for rq-scheduler.",
            "queue": queue_name or self._queue.name,
            "schedule": dict(times),
            "params": {one: {"default": tagged(value)} for one, value in given.items()},
            "tasks": {
                STEP: {
                    "task": name,
                    "input": {one: f"${{params.{one}}}" for one in given},
                    "timeout": parse_timeout(timeout) or DEFAULT_TIMEOUT,
                }
            },
        }
        app._client.backend.schedules.apply([definitions.from_data(data, f"job {chosen}")], STEP, [])
        return RepeatedJob(id=chosen, func_name=name.replace(":", "."), meta={**about, **(meta or {})})

    def cancel(self, job: Job | RepeatedJob | str) -> None:
        """Cancel a job, or run it no more."""
        chosen = job if isinstance(job, str) else job.id
        try:
            app.schedules[f"{_PREFIX}{chosen}"].delete()
        except NotFound:
            Job.fetch(chosen).cancel()

    def get_jobs(self, until: Any = None, with_times: bool = False) -> Iterator[Any]:
        """Yield what is scheduled: repeated jobs, and those of the queue that wait for their time."""
        last = datetime.now(UTC) + until if isinstance(until, timedelta) else until
        found: list[tuple[Any, datetime | None]] = []
        for key in app.schedules:
            if key.startswith(_PREFIX):
                stored = app.schedules[key].status()
                chosen = stored.workflow.removeprefix(_PREFIX)
                found.append((RepeatedJob(id=chosen, next_run=stored.next_fire), stored.next_fire))
        waiting = ScheduledJobRegistry(queue=self._queue)
        found += [(job, waiting.get_scheduled_time(job)) for one in waiting.get_job_ids() for job in [Job.fetch(one)]]
        for job, moment in found:
            if last is None or (moment is not None and moment <= last):
                yield (job, moment) if with_times else job

    def __contains__(self, job: Job | RepeatedJob | str) -> bool:
        return (job if isinstance(job, str) else job.id) in {one.id for one in self.get_jobs()}


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a job by RQ's names."""
    renamed = {"timeout": "job_timeout", "job_description": "description", "id": "job_id"}
    return {renamed.get(name, name): value for name, value in kwargs.items()}
