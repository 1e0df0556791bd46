"""Handles of tasks and of runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from copy import copy
from dataclasses import dataclass
from typing import IO, Any, Generic, Self, TypeVar, overload
from uuid import UUID

from orchestrator.domain.ids import to_text
from orchestrator.domain.runs import RunCounters
from orchestrator.domain.sealed import open_error
from orchestrator.domain.states import ENDED_TASK_STATES, TaskState
from orchestrator.domain.tasks.task import error_text
from orchestrator.errors import (
    NotFound,
    OrchestratorError,
    ResultTimeout,
    RunFailed,
    TaskCancelled,
    TaskFailed,
    TaskSkipped,
)
from orchestrator.payloads.keeping import open_bytes
from orchestrator.references import BYTES, whole_reference
from orchestrator.sdk.client import Client
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.context import refuse_inside_task
from orchestrator.sdk.tasks.logs import LogEntry, TaskProgress, all_lines
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.values.payload import Payload, decode_value
from orchestrator.sdk.waiting.async_variants import async_variant, blocking
from orchestrator.sdk.waiting.steps import Pause, Steps, Stream, complete, iterate, time_limit
from orchestrator.transport.codec import Ended

R = TypeVar("R")


class Handle(Generic[R]):
    """A handle to one task."""

    def __init__(self, client: Client, identifier: bytes, signature: Signature | None = None) -> None:
        self._client = client
        self._signature = signature
        self._id = identifier
        self._final: Ended | None = None
        """The cached end of a task that has succeeded: a task with any other end can be retried."""
        self._just_ended: tuple[Ended, int] | None = None
        """The end that was just received, and how many retries this program had requested by then. It is used once."""

    @property
    def id(self) -> str:
        """The id of the task."""
        return to_text(self._id)

    def __repr__(self) -> str:
        return f"<Handle {self._signature.name + ' ' if self._signature else ''}{self.id}{self._client.via}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and (other._id, other._client) == (self._id, self._client)

    def __hash__(self) -> int:
        return hash(self._id)

    @blocking
    def result(self, timeout: float | None = None) -> Steps[R]:
        """Wait for the result and return it. Raise TaskFailed, TaskCancelled, TaskSkipped or ResultTimeout."""
        return self._value((yield from self._ended(timeout)))

    def _ended(self, timeout: float | None) -> Steps[Ended]:
        refuse_inside_task("another task")
        limit = time_limit(timeout)
        ended = self._cached_end() or (yield from self._client.backend.tasks.wait(self._id, limit))
        if ended is None:
            with limit:
                how = self._client.backend.tasks.overdue(self._id)
            raise ResultTimeout(
                f"{self!r} had no result after {timeout} s. {how}; ask again, or see "
                f"`orchestrator tasks show {self.id}`."
            )
        return ended

    @blocking
    def open_result(self, timeout: float | None = None) -> Steps[IO[bytes]]:
        """Wait for a result of type `bytes` and return it as a file, which buffers about a megabyte in memory."""
        ended = yield from self._ended(timeout)
        stored = whole_reference(ended.result) if ended.state == TaskState.SUCCESS and ended.result else None
        if stored is not None and stored.form == BYTES:
            return open_bytes(stored)
        if ended.state == TaskState.SUCCESS:
            return Payload(decode_value(ended.result or b"\xc0")).open()
        return Payload(self._value(ended)).open()

    def status(self) -> str:
        """Return the state of the task: pending, dispatched, running, success, failed, cancelled or skipped."""
        return self._client.backend.tasks.status(self._id)

    def progress(self) -> TaskProgress | None:
        """Return the progress that the task last reported; None if it reported none, or long ago."""
        return self._client.backend.tasks.progress(self._id)

    def logs(self, attempt: int | None = None) -> list[LogEntry]:
        """Return all lines that the task has logged and printed so far, in one attempt or in all attempts."""
        return all_lines(lambda after: self._client.backend.tasks.log(self._id, after, attempt=attempt))

    def parent(self) -> Handle[Any] | RunHandle[Any] | None:
        """Return the run of the task, or else the task that enqueued it; None if there is neither."""
        found = self._client.backend.insights.show_task(UUID(bytes=self._id))
        if found is None:
            raise NotFound.by_id("task", self.id)
        return _relative(self._client, found.run_id, found.parent_id)

    def children(self) -> list[Handle[Any] | RunHandle[Any]]:
        """Return the tasks that the task enqueued and the runs that it started, as far as the lineage records them."""
        found = self._client.backend.insights.lineage(UUID(bytes=self._id)).children
        return [
            self._client.run_handle(child.id.bytes) if child.kind == "run" else Handle(self._client, child.id.bytes)
            for child in found
        ]

    def cancel(self) -> None:
        """Cancel the task in any state. The request is durable, even while no scheduler runs."""
        self._client.backend.tasks.cancel(self._id)

    def retry(self) -> None:
        """Retry the task if it has failed, was skipped, or was cancelled outside a run."""
        self._client.backend.tasks.retry(self._id)

    aresult = async_variant(result)
    aopen_result = async_variant(open_result)
    astatus = async_variant(status)
    aprogress = async_variant(progress)
    alogs = async_variant(logs)
    aparent = async_variant(parent)
    achildren = async_variant(children)
    acancel = async_variant(cancel)
    aretry = async_variant(retry)

    def _cached_end(self) -> Ended | None:
        """Return the cached end of the task, or None if the backend must be asked."""
        if self._final is not None:
            return self._final
        cached, self._just_ended = self._just_ended, None
        return cached[0] if cached is not None and cached[1] == self._client.backend.tasks.retries else None

    def _cache_end(self, ended: Ended) -> None:
        self._just_ended = ended, self._client.backend.tasks.retries

    def _value(self, ended: Ended) -> R:
        if ended.state == TaskState.SUCCESS:
            self._final = ended
            value = decode_value(ended.result or b"\xc0")
            result: R = self._signature.convert_stored(value) if self._signature else value
            return result
        if ended.state not in ENDED_TASK_STATES:
            raise NotFound.by_id("task", self.id)
        error = ended.error and open_error(ended.error)
        message = f"{self._signature.name if self._signature else 'Task'} {self.id}"
        if ended.state == TaskState.CANCELLED:
            raise TaskCancelled(f"{message} was cancelled.")
        if ended.state == TaskState.SKIPPED:
            raise TaskSkipped(f"{message} was skipped.")
        if error is None:
            raise TaskFailed(f"{message} failed.")
        text = f"{message} failed: {error_text(error.kind, error.message)}"
        raise TaskFailed(text, kind=error.kind, traceback=error.traceback, data=error.attributes)


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    status: str
    """The state of the run: pending, running, success, failed or cancelled."""
    counters: RunCounters
    """The number of tasks in each state."""

    @property
    def fraction(self) -> float:
        """Share of the tasks that have ended, from 0 to 1."""
        return self.counters.ended / self.counters.total if self.counters.total else 1.0


class RunHandle(Generic[R]):
    """A handle to a run of many tasks, or of a workflow."""

    def __init__(self, client: Client, identifier: bytes, signature: Signature | None = None) -> None:
        self._client = client
        self._signature = signature
        self._id = identifier

    @property
    def id(self) -> str:
        """The id of the run."""
        return str(UUID(bytes=self._id))

    def __repr__(self) -> str:
        return f"<RunHandle {self.id}{self._client.via}>"

    def status(self) -> str:
        """Return the state of the run: pending, running, success, failed or cancelled."""
        return self.progress().status

    def progress(self) -> Progress:
        """Return the state of the run and the number of its tasks in each state."""
        status, counters = self._client.backend.runs.progress(self._id)
        return Progress(status, counters)

    def logs(self) -> list[LogEntry]:
        """Return all lines that the tasks of the run have logged and printed so far."""
        return all_lines(lambda after: self._client.backend.runs.log(self._id, after))

    @blocking
    def wait_ended(self, timeout: float | None = None) -> Steps[str]:
        """Wait until the run has ended and return its state: success, failed or cancelled."""
        return (yield from self._wait_ended(timeout))

    def _wait_ended(self, timeout: float | None) -> Steps[str]:
        refuse_inside_task("another task")
        limit = time_limit(timeout)
        ended = yield from self._client.backend.runs.wait(self._id, limit)
        if ended is None:
            with limit:
                how = self._client.backend.code.overdue(self._id)
            raise ResultTimeout(
                f"{self!r} had not ended after {timeout} s. {how}; see `orchestrator runs show {self.id}`."
            )
        return ended.state

    @overload
    def results(self, timeout: float | None = None) -> list[R]: ...
    @overload
    def results(self, timeout: float | None = None, *, return_exceptions: bool) -> list[R | OrchestratorError]: ...

    def results(
        self, timeout: float | None = None, *, return_exceptions: bool = False
    ) -> list[R] | list[R | OrchestratorError]:
        """Wait for the end of the run and return the results of all tasks, in order. Raise RunFailed on any failure.

        With `return_exceptions`, nothing is raised: the list has the exception of each task without a result.
        """
        return complete(self._results(timeout, return_exceptions))

    @overload
    async def aresults(self, timeout: float | None = None) -> list[R]: ...
    @overload
    async def aresults(
        self, timeout: float | None = None, *, return_exceptions: bool
    ) -> list[R | OrchestratorError]: ...

    async def aresults(
        self, timeout: float | None = None, *, return_exceptions: bool = False
    ) -> list[R] | list[R | OrchestratorError]:
        """Do the same as `results` without blocking the event loop."""
        return await self._client.threads.complete(self._results(timeout, return_exceptions))

    def _results(self, timeout: float | None, return_exceptions: bool) -> Steps[list[R | OrchestratorError]]:
        results: list[R | OrchestratorError] = []
        for result in self._iter_results(timeout, return_exceptions):
            if isinstance(result, Pause):
                yield result
            else:
                results.append(result)
        return results

    @overload
    def iter_results(self, timeout: float | None = None) -> Iterator[R]: ...
    @overload
    def iter_results(
        self, timeout: float | None = None, *, return_exceptions: bool
    ) -> Iterator[R | OrchestratorError]: ...

    def iter_results(
        self, timeout: float | None = None, *, return_exceptions: bool = False
    ) -> Iterator[R] | Iterator[R | OrchestratorError]:
        """Do the same as `results`, but yield the results one by one, in bounded memory."""
        return iterate(self._iter_results(timeout, return_exceptions))

    @overload
    def aiter_results(self, timeout: float | None = None) -> AsyncIterator[R]: ...
    @overload
    def aiter_results(
        self, timeout: float | None = None, *, return_exceptions: bool
    ) -> AsyncIterator[R | OrchestratorError]: ...

    def aiter_results(
        self, timeout: float | None = None, *, return_exceptions: bool = False
    ) -> AsyncIterator[R] | AsyncIterator[R | OrchestratorError]:
        """Do the same as `iter_results` without blocking the event loop."""
        return self._client.threads.iterate(self._iter_results(timeout, return_exceptions))

    def _iter_results(self, timeout: float | None, return_exceptions: bool) -> Stream[R | OrchestratorError]:
        state = yield from self._wait_ended(timeout)
        if state != "success" and not return_exceptions:
            counters = self.progress().counters
            raise RunFailed(
                f"{self!r} ended as {state}: of {counters.total} tasks, {counters.failed} failed and "
                f"{counters.cancelled} were cancelled{self._first_failure()}. See `orchestrator runs show {self.id}`; "
                f"`results(return_exceptions=True)` returns what there is."
            )
        for ended in self._client.backend.runs.ends(self._id):
            result: R | OrchestratorError
            try:
                result = Handle(self._client, ended.id, self._signature)._value(ended)
            except OrchestratorError as error:
                if not return_exceptions:
                    raise
                result = error
            yield result

    def _first_failure(self) -> str:
        """Describe the first failed task and its error, for a message."""
        from orchestrator.store.insights import TaskFilter  # loads SQLAlchemy, which workers do without

        insights = self._client.backend.insights
        failed_tasks = TaskFilter(run=UUID(bytes=self._id), statuses=(TaskState.FAILED,))
        for task in insights.page_of_tasks(failed_tasks, limit=1, before=None).tasks:
            if (detail := insights.show_task(task.id)) is not None and detail.error is not None:
                how = error_text(detail.error.kind, detail.error.message).rstrip(".")
                return f", the first {task.name} at position {task.position}: {how}"
        return ""

    @blocking
    def outputs(self, timeout: float | None = None) -> Steps[dict[str, Any]]:
        """Wait for the end of a workflow's run and return the output of each step that was not skipped.

        The output of a fan-out is a list in order; that of a child workflow maps its last steps to their outputs.
        None stands in place of the output of a failed or cancelled step, task or child run.
        """
        yield from self._wait_ended(timeout)
        return self._client.backend.runs.outputs(self._id)

    def parent(self) -> Handle[Any] | RunHandle[Any] | None:
        """Return the parent run, or else the task that started the run; None if there is neither."""
        found = self._client.backend.insights.show_run(UUID(bytes=self._id))
        if found is None:
            raise NotFound.by_id("run", self.id)
        return _relative(self._client, found.parent_run, found.parent_task)

    def children(self, limit: int = 1_000) -> list[Handle[Any] | RunHandle[Any]]:
        """Return the child runs, newest first, and the tasks, in order; at most `limit` of each."""
        from orchestrator.sdk.calls.insights import list_runs, list_tasks  # loads SQLAlchemy, which workers do without
        from orchestrator.store.insights import RunFilter, TaskFilter

        run, insights = UUID(bytes=self._id), self._client.backend.insights
        runs = list_runs(insights, RunFilter(parent=run), limit=limit).runs
        tasks = list_tasks(insights, TaskFilter(run=run), limit=limit).tasks
        return [
            *(self._client.run_handle(child.id.bytes) for child in runs),
            *(Handle(self._client, child.id.bytes) for child in tasks),
        ]

    def cancel(self) -> None:
        """Cancel the run and all its open tasks."""
        self._client.backend.runs.cancel(self._id)

    def rerun(self, from_step: str | None = None) -> Self:
        """Start a new run of the same workflow, with the same parameters and tags, and return its handle.

        With `from_step`, successful steps keep their results, except for that step and all steps after it.
        """
        new_run = copy(self)
        new_run._id = new_id()
        self._client.backend.runs.rerun(self._id, new_run._id, from_step)
        return new_run

    def retry(self) -> None:
        """Retry the failed and cancelled parts of the run, and all steps that depend on them. The rest remains."""
        self._client.backend.runs.retry(self._id)

    def delete(self) -> None:
        """Delete an ended run with its tasks, child runs, logs and results. This cannot be undone."""
        self._client.backend.runs.delete(self._id)

    astatus = async_variant(status)
    aprogress = async_variant(progress)
    alogs = async_variant(logs)
    await_ended = async_variant(wait_ended)
    aoutputs = async_variant(outputs)
    aparent = async_variant(parent)
    achildren = async_variant(children)
    acancel = async_variant(cancel)
    arerun = async_variant(rerun)
    aretry = async_variant(retry)
    adelete = async_variant(delete)


def _relative(client: Client, run: UUID | None, task: UUID | None) -> Handle[Any] | RunHandle[Any] | None:
    if run is not None:
        handle: RunHandle[Any] = client.run_handle(run.bytes)
        return handle
    return None if task is None else Handle(client, task.bytes)
