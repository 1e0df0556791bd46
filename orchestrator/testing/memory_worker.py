"""A worker in memory: it runs tasks with a worker process's `Runner`, in the thread of the test."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from typing import ParamSpec, TypeVar, cast

from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import Dispatch, KeyHolder, NewTask
from orchestrator.sdk.app import Orchestrator
from orchestrator.testing.records import TestedTask
from orchestrator.transport.codec import LogLine, ProgressMark
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner

P = ParamSpec("P")
R = TypeVar("R")


class MemoryWorker:
    """Runs attempts, and serves as the outbox of their tasks."""

    def __init__(
        self,
        app: Orchestrator,
        tasks: Mapping[bytes, TestedTask],
        send_tasks: Callable[[Sequence[NewTask]], Mapping[bytes, KeyHolder]],
    ) -> None:
        self._app = app
        self._tasks = tasks
        self.send_tasks = send_tasks
        self._runner = Runner(app, self, Allowed(app, ()))
        self._is_open = False
        """Whether the application's resources are open, as in a started worker process."""
        self._loop: asyncio.Runner | None = None
        """The event loop of asynchronous tasks, with the resources that they keep open."""

    def attempt(self, task: TestedTask) -> AttemptReport:
        """Run an attempt as a worker does, and return its report."""
        new = task.new
        dispatch = Dispatch(
            new.id, task.attempt, new.name, new.payload, new.queue, new.options, new.run_id, new.position,
            failures=task.failures, details=task.details, trace=new.trace,
        )  # fmt: skip
        if not self._is_open:
            self._is_open = True
            self._app._resources.start()
        job = Job(dispatch, Bundle("", new.queue, "", 1), 0, time.monotonic())
        job.begin(time.monotonic())
        report = self._run(job)
        job.finish()
        if self._app._client.middleware is not None:
            self._runner.ended(job, report)
        task.details = job.noted or task.details
        return report

    def close(self) -> None:
        """Close the application's resources, as a worker process does at its end."""
        if self._is_open:
            _off_event_loop(self._close_loop)
            self._app._resources.close()

    def _close_loop(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # a task closed the loop
                self._loop.run(self._app._resources.close_on_loop())
                self._loop.close()

    def _run(self, job: Job) -> AttemptReport:
        """Run a job in this thread, or in another thread if it is async and an event loop runs here."""
        task = self._runner.find(job)
        if task is None or not task._is_async:
            return self._runner.run(job)
        return _off_event_loop(self._run_async, job)

    def _run_async(self, job: Job) -> AttemptReport:
        """Run a coroutine on the test's event loop; with Django, through asgiref, so that it uses this thread's
        connections."""
        if "django.db" in sys.modules:
            asgiref = sys.modules["asgiref.sync"]
            call = asgiref.async_to_sync(self._run_and_close)  # asgiref would change the caller's context variables
            return cast("AttemptReport", copy_context().run(call, job))
        if self._loop is None or self._loop.get_loop().is_closed():
            self._loop = asyncio.Runner()
        return self._runner.run_on(nullcontext(self._loop), job)

    async def _run_and_close(self, job: Job) -> AttemptReport:
        try:
            return await self._runner.run_async(job)
        finally:
            await self._app._resources.close_on_loop()

    # -- the outbox

    def publish_progress(self, task: bytes, mark: ProgressMark) -> None:
        self._tasks[task].progress = mark

    def log(self, job: Job, line: LogLine) -> None:
        self._tasks[job.dispatch.id].lines.append(line)

    log_lines = log

    def save_details(self, job: Job, details: bytes) -> None:
        job.noted = details

    def page(self, job: Job, number: int) -> bytes | None:  # noqa: ARG002
        """Return None: the memory worker runs no workflow turns."""
        return None


def _off_event_loop(function: Callable[P, R], *args: P.args, **keywords: P.kwargs) -> R:
    """Call a function that runs an event loop: in this thread, or in another if an event loop runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*args, **keywords)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args, **keywords).result()
