"""The result of a call or a whole composition, by its id."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orchestrator.compat.celery import outcomes, states
from orchestrator.compat.celery import request as requests
from orchestrator.compat.celery.app.current import app_or_default
from orchestrator.compat.celery.exceptions import ChordError, NotCovered, Refused, TimeoutError
from orchestrator.compat.celery.request import MARK
from orchestrator.compat.celery.tags import untagged
from orchestrator.compat.celery.utils import to_id
from orchestrator.domain.ids import to_text
from orchestrator.errors import NotFound, OrchestratorError, ResultTimeout, RunFailed, TaskEnded
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.tasks.handle import Handle

_POLL = 0.05
"""Seconds between two checks for a task or run that does not exist yet."""


class ResultBase:
    """Base of all results."""

    parent: Any = None


class AsyncResult(ResultBase):
    """The result of one call, or of a composition, by its id."""

    def __init__(
        self,
        id: str,  # Celery's name
        backend: Any = None,
        task_name: str | None = None,
        app: Any = None,
        parent: Any = None,
    ) -> None:
        if id is None:
            raise ValueError(f"AsyncResult requires valid id, not {type(id)}")
        self.app = app_or_default(app)
        self.id = id
        self.parent = parent
        self._name = task_name
        self._handle: Handle[Any] = Handle(self.app.orchestrator._client, to_id(str(id)).bytes)
        self._run: CompositionHandle[Any] | None = None
        """The run, if this is the result of a composition."""
        self._enclosing_run: CompositionHandle[Any] | None = None
        """The run that the call belongs to."""
        self._is_forgotten = False

    task_id = property(lambda self: self.id)

    # -- waiting

    def get(
        self,
        timeout: float | None = None,
        propagate: bool = True,
        *,
        callback: Callable[[str, Any], Any] | None = None,
        disable_sync_subtasks: bool = True,
        on_message: Any = None,
        **_: Any,
    ) -> Any:
        """Wait for the result and return it, or raise the task's exception."""
        refuse_on_message(on_message)
        if disable_sync_subtasks:
            refuse_in_task()
        try:
            value = untagged(self._wait(timeout))
        except ResultTimeout as error:
            raise TimeoutError(str(error)) from None
        except (TaskEnded, RunFailed) as error:
            exception = outcomes.of_end(self.app, error, self._run or self._enclosing_run)
            if propagate and self.parent is not None and isinstance(exception, ChordError):
                exception = exception.__cause__ or exception  # Celery raises the header task's exception here
            if propagate:
                raise exception from None
            value = exception
        if type(value) is dict and MARK in value:
            return self._value_of_mark(value[MARK], timeout, propagate=propagate)
        if callback is not None:
            callback(self.id, value)
        return value

    wait = get

    def _wait(self, timeout: float | None) -> Any:
        if self._run is not None:
            return self._run.result(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                return self._handle.result(remaining)
            except NotFound:
                self._find_run()
                if self._run is not None:
                    return self._run.result(remaining)
                if remaining is not None and remaining <= 0:
                    raise TimeoutError("The operation timed out.") from None
                time.sleep(_POLL)

    def _find_run(self) -> None:
        """Find the run with this id. For a call in a run that has ended, raise: the task will never exist."""
        if self._enclosing_run is not None:
            state = self._enclosing_run.status()
            if state not in ("pending", "running"):
                raise self._enclosing_run._failure(state)
            return
        client = self.app.orchestrator._client
        run: CompositionHandle[Any] = client.run_handle(self._handle._id)
        try:
            run.status()
        except NotFound:
            found = outcomes.run_under(self.app, str(self.id))
            self._run = found
            return
        self._run = run

    def _value_of_mark(self, mark: Mapping[str, Any], timeout: float | None, *, propagate: bool) -> Any:
        if "replaced" in mark:
            return self.app.AsyncResult(mark["replaced"]).get(timeout, propagate=propagate, disable_sync_subtasks=False)
        value = outcomes.of_mark(mark)[1]
        if isinstance(value, BaseException) and propagate:
            raise value
        return value

    # -- where it stands

    def _outcome(self) -> outcomes.Outcome:
        if self._is_forgotten:
            return outcomes.NOTHING
        outcome = outcomes.find(self)
        if isinstance(outcome.result, dict) and "replaced" in (outcome.result.get(MARK) or {}):
            replaced: AsyncResult = self.app.AsyncResult(outcome.result[MARK]["replaced"])
            return replaced._outcome()
        return outcome

    @property
    def state(self) -> str:
        """The state, in Celery's terms."""
        return self._outcome().state

    status = state

    @property
    def result(self) -> Any:
        """The return value, the exception, or the meta from `update_state`."""
        return self._outcome().result

    info = result

    @property
    def traceback(self) -> str | None:
        return self._outcome().traceback

    @property
    def date_done(self) -> Any:
        return self._outcome().date_done

    def _meta(self, name: str) -> Any:
        return getattr(self._outcome().detail, name, None)

    name = property(lambda self: self._name or getattr(self._handle._signature, "name", None) or self._meta("name"))
    worker = property(lambda self: self._meta("worker"))
    queue = property(lambda self: self.app._celery_queue(self._meta("queue")))
    retries = property(lambda self: self._outcome().retries)
    args = property(lambda self: outcomes.arguments(self._outcome().detail)[0])
    kwargs = property(lambda self: outcomes.arguments(self._outcome().detail)[1])

    def ready(self) -> bool:
        return self.state in states.READY_STATES

    def successful(self) -> bool:
        return self.state == states.SUCCESS

    def failed(self) -> bool:
        return self.state == states.FAILURE

    @property
    def ignored(self) -> bool:
        task = self.app.tasks.get(self.name)
        return task is not None and bool(task.ignore_result)

    def maybe_throw(self, propagate: bool = True, callback: Any = None) -> Any:
        """Raise the task's exception, or return its result."""
        outcome = self._outcome()
        if propagate and outcome.state in states.PROPAGATE_STATES:
            raise outcome.result
        if callback is not None:
            callback(self.id, outcome.result)
        return outcome.result

    maybe_reraise = maybe_throw

    # -- others around it

    @property
    def children(self) -> list[Any] | None:
        try:
            handles = self._handle.children()
        except NotFound:
            return None
        return [of_any(self.app, handle) for handle in handles] or None

    def iterdeps(self, **_: Any) -> Iterator[tuple[Any, Any]]:
        """Yield this result and its descendants, each with its parent."""
        queue_: deque[tuple[Any, Any]] = deque([(None, self)])
        while queue_:
            parent, result = queue_.popleft()
            yield parent, result
            if result.ready():
                queue_.extend((result, child) for child in result.children or [])

    def collect(self, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Wait for this result and its descendants, and yield each with its value."""
        queue_: deque[Any] = deque([self])
        while queue_:
            result = queue_.popleft()
            yield result, result.get(**kwargs)
            queue_.extend(result.children or [])

    def get_leaf(self) -> Any:
        value: Any = None
        for _, value in self.collect():  # noqa: B007
            pass
        return value

    def as_tuple(self) -> Any:
        return (self.id, self.parent and self.parent.as_tuple()), None

    def as_list(self) -> list[str]:
        """Return the id, and the ids of the results before it."""
        return [self.id, *(self.parent.as_list() if self.parent else [])]

    # -- acting

    def revoke(self, terminate: bool = False, **_: Any) -> None:
        """Cancel the task; a running one only with `terminate`."""
        self.app.control.revoke(self._run.id if self._run is not None else str(self.id), terminate=terminate)

    def forget(self) -> None:
        """Forget the result in this process; retention_success and retention_failed decide when it is deleted."""
        self._is_forgotten = True

    then = Refused("link=… calls a task after it; get() waits.")
    graph = build_graph = Refused("`orchestrator runs show ID` draws the graph of a run.")
    backend = Refused("There is no result backend: AsyncResult(id) finds results.")

    def __str__(self) -> str:
        return str(self.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.id}>"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, AsyncResult):
            return str(other.id) == str(self.id)
        return other == self.id if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self.id))

    def __copy__(self) -> AsyncResult:
        return AsyncResult(self.id, app=self.app, task_name=self._name, parent=self.parent)

    def __reduce__(self) -> Any:
        return AsyncResult, (self.id, None, self._name)


def refuse_on_message(function: Any) -> None:
    """Refuse a callback for each message of the result backend."""
    if function is not None:
        raise NotCovered("get(on_message=…)", "Look at .state and .info while you wait.")


def refuse_in_task() -> None:
    """Refuse to wait inside a task, as Celery does."""
    running = requests.current.get()
    if running is not None and running[1].native is not None:
        raise RuntimeError(
            "Never call result.get() within a task! It would hold a slot while it waits. Link the other task, or use "
            "self.replace(…)."
        )


class _HandleResult(AsyncResult):
    """A result that computes its id from a handle on access."""

    def __init__(self, app: Any, handle: Handle[Any]) -> None:
        self.app = app
        self._handle = handle
        self._name = None
        self._run = self._enclosing_run = None
        self._is_forgotten = False

    @property
    def id(self) -> str:  # type: ignore[override]
        return to_text(self._handle._id)


def of_handle(app: Any, handle: Handle[Any], task_id: str | None = None) -> AsyncResult:
    if task_id is None:
        return _HandleResult(app, handle)
    result = AsyncResult(task_id, app=app)
    result._handle = handle
    return result


def of_any(app: Any, handle: Any) -> AsyncResult:
    """Return the result of a task handle or a run handle."""
    if isinstance(handle, Handle):
        return of_handle(app, handle)
    result = AsyncResult(handle.id, app=app)
    result._run = handle
    return result


class EagerResult(AsyncResult):
    """The result of a call that ran in this process."""

    def __init__(
        self, id: str, ret_value: Any, state: str, traceback: str | None = None, name: str | None = None
    ) -> None:
        self.app = app_or_default()
        self.id = id
        self._name = name
        self._fixed_outcome = outcomes.Outcome(state=state, result=ret_value, traceback=traceback)
        self._run = self._enclosing_run = None
        self._is_forgotten = False

    def _outcome(self) -> outcomes.Outcome:
        return self._fixed_outcome

    def get(self, timeout: float | None = None, propagate: bool = True, **_: Any) -> Any:
        """Return the result, or raise what was raised."""
        if self.state in states.PROPAGATE_STATES and propagate:
            raise self.result if isinstance(self.result, BaseException) else OrchestratorError(str(self.result))
        return self.result

    wait = get
    children = None

    def revoke(self, *_: Any, **__: Any) -> None:
        self._fixed_outcome = outcomes.Outcome(state=states.REVOKED, result=None)

    def __repr__(self) -> str:
        return f"<EagerResult: {self.id}>"
