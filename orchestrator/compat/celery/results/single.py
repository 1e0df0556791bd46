"""The result of a call, or of a composition as a whole, by its id."""

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
from orchestrator.errors import NotFound, OrchestratorError, RunFailed, TaskEnded
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.tasks.handle import Handle

_POLL = 0.05
"""Seconds between two looks at what does not exist yet."""


class ResultBase:
    """What all results have."""

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
        """The run, where the result is that of a composition."""
        self._around: CompositionHandle[Any] | None = None
        """The run that the call is a part of."""
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
        """Wait for the result and return it, or raise what the task raised."""
        refuse_on_message(on_message)
        if disable_sync_subtasks:
            refuse_in_task()
        try:
            value = untagged(self._wait(timeout))
        except (TaskEnded, RunFailed) as error:
            exception = outcomes.of_end(self.app, error, self._run or self._around)
            if propagate and self.parent is not None and isinstance(exception, ChordError):
                exception = exception.__cause__ or exception  # Celery looks at the tasks of the header first
            if propagate:
                raise exception from None
            value = exception
        if type(value) is dict and MARK in value:
            return self._marked(value[MARK], timeout, propagate=propagate)
        if callback is not None:
            callback(self.id, value)
        return value

    wait = get

    def _wait(self, timeout: float | None) -> Any:
        if self._run is not None:
            return self._run.result(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                return self._handle.result(left)
            except NotFound:
                self._look_for_run()
                if self._run is not None:
                    return self._run.result(left)
                if left is not None and left <= 0:
                    raise TimeoutError("The operation timed out.") from None
                time.sleep(_POLL)

    def _look_for_run(self) -> None:
        """Find out whether the id is that of a run, or what became of the run that the call is a part of."""
        if self._around is not None:
            state = self._around.status()
            if state not in ("pending", "running"):
                raise self._around._failure(state)
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

    def _marked(self, mark: Mapping[str, Any], timeout: float | None, *, propagate: bool) -> Any:
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
        found = outcomes.find(self)
        if isinstance(found.result, dict) and "replaced" in (found.result.get(MARK) or {}):
            replaced: AsyncResult = self.app.AsyncResult(found.result[MARK]["replaced"])
            return replaced._outcome()
        return found

    @property
    def state(self) -> str:
        """Where it stands, in Celery's words."""
        return self._outcome().state

    status = state

    @property
    def result(self) -> Any:
        """What it returned, raised, or says of itself with `update_state`."""
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
        known = self.app.tasks.get(self.name)
        return known is not None and bool(known.ignore_result)

    def maybe_throw(self, propagate: bool = True, callback: Any = None) -> Any:
        """Raise what it raised; return its result otherwise."""
        found = self._outcome()
        if propagate and found.state in states.PROPAGATE_STATES:
            raise found.result
        if callback is not None:
            callback(self.id, found.result)
        return found.result

    maybe_reraise = maybe_throw

    # -- others around it

    @property
    def children(self) -> list[Any] | None:
        try:
            found = (self._run or self._handle).children()
        except NotFound:
            return None
        return [of_any(self.app, one) for one in found] or None

    def iterdeps(self, **_: Any) -> Iterator[tuple[Any, Any]]:
        """Yield it and all that came of it, each with what it came of."""
        waiting: deque[tuple[Any, Any]] = deque([(None, self)])
        while waiting:
            parent, one = waiting.popleft()
            yield parent, one
            if one.ready():
                waiting.extend((one, child) for child in one.children or [])

    def collect(self, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Yield results, waited for, of it and of all that came of it."""
        waiting: deque[Any] = deque([self])
        while waiting:
            one = waiting.popleft()
            yield one, one.get(**kwargs)
            waiting.extend(one.children or [])

    def get_leaf(self) -> Any:
        value: Any = None
        for _, value in self.collect():  # noqa: B007
            pass
        return value

    def as_tuple(self) -> Any:
        return (self.id, self.parent and self.parent.as_tuple()), None

    def as_list(self) -> list[str]:
        """Return its id, and those of what it came after."""
        return [self.id, *(self.parent.as_list() if self.parent else [])]

    # -- acting

    def revoke(self, terminate: bool = False, **_: Any) -> None:
        """Cancel it; where it runs already, only with `terminate`."""
        self.app.control.revoke(self._run.id if self._run is not None else str(self.id), terminate=terminate)

    def forget(self) -> None:
        """Forget the result here; the settings retention_success and retention_failed say when it is deleted."""
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
    """Refuse to call a function with each message of the result backend."""
    if function is not None:
        raise NotCovered("get(on_message=…)", "Look at .state and .info while you wait.")


def refuse_in_task() -> None:
    """Refuse to wait inside a task, as Celery does."""
    found = requests.current.get()
    if found is not None and found[1].native is not None:
        raise RuntimeError(
            "Never call result.get() within a task! It would hold a slot while it waits. Link the other task, or use "
            "self.replace(…)."
        )


class _Handled(AsyncResult):
    """A result whose id is read off its handle when it is asked for."""

    def __init__(self, app: Any, handle: Handle[Any]) -> None:
        self.app = app
        self._handle = handle
        self._name = None
        self._run = self._around = None
        self._is_forgotten = False

    @property
    def id(self) -> str:  # type: ignore[override]
        return to_text(self._handle._id)


def of_handle(app: Any, handle: Handle[Any], task_id: str | None = None) -> AsyncResult:
    if task_id is None:
        return _Handled(app, handle)
    result = AsyncResult(task_id, app=app)
    result._handle = handle
    return result


def of_any(app: Any, handle: Any) -> AsyncResult:
    """Return the result of a task or run that was found."""
    if isinstance(handle, Handle):
        return of_handle(app, handle)
    result = AsyncResult(handle.id, app=app)
    result._run = handle
    return result


class EagerResult(AsyncResult):
    """How a call ended that ran right here."""

    def __init__(
        self, id: str, ret_value: Any, state: str, traceback: str | None = None, name: str | None = None
    ) -> None:
        self.app = app_or_default()
        self.id = id
        self._name = name
        self._found = outcomes.Outcome(state=state, result=ret_value, traceback=traceback)
        self._run = self._around = None
        self._is_forgotten = False

    def _outcome(self) -> outcomes.Outcome:
        return self._found

    def get(self, timeout: float | None = None, propagate: bool = True, **_: Any) -> Any:
        """Return the result, or raise what was raised."""
        if self.state in states.PROPAGATE_STATES and propagate:
            raise self.result if isinstance(self.result, BaseException) else OrchestratorError(str(self.result))
        return self.result

    wait = get
    children = None

    def revoke(self, *_: Any, **__: Any) -> None:
        self._found = outcomes.Outcome(state=states.REVOKED, result=None)

    def __repr__(self) -> str:
        return f"<EagerResult: {self.id}>"
