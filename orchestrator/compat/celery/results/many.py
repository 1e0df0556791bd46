"""Results of groups, and sets of results."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from orchestrator.compat.celery import outcomes
from orchestrator.compat.celery.app.current import app_or_default
from orchestrator.compat.celery.exceptions import NotCovered, Refused, TimeoutError
from orchestrator.compat.celery.request import MARK
from orchestrator.compat.celery.results.single import (
    AsyncResult,
    ResultBase,
    of_handle,
    refuse_in_task,
    refuse_on_message,
)
from orchestrator.compat.celery.tags import untagged
from orchestrator.compat.celery.utils import to_id, uuid
from orchestrator.domain.dag.composed import RESULT, child_id
from orchestrator.domain.ids import derived_id, to_text
from orchestrator.errors import ResultTimeout, RunFailed
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.tasks.compositions import Call, Chain, Composition, Group
from orchestrator.sdk.tasks.handle import Handle

_STEP = re.compile(r"\$\{`([^`]+)`\}")


class ResultSet(ResultBase):
    """Several results, to wait for them together."""

    def __init__(self, results: Iterable[Any], app: Any = None, **_: Any) -> None:
        self.results = list(results)
        self.app = app_or_default(app or next((result.app for result in self.results if result.app), None))
        self._run: CompositionHandle[Any] | None = None

    def add(self, result: Any) -> None:
        if result not in self.results:
            self.results.append(result)

    def remove(self, result: Any) -> None:
        self.results.remove(result)

    def discard(self, result: Any) -> None:
        """Remove a result, if present."""
        self.results = [result for result in self.results if result != result]

    def update(self, results: Iterable[Any]) -> None:
        for result in results:
            self.add(result)

    def clear(self) -> None:
        self.results.clear()

    def completed_count(self) -> int:
        return sum(result.successful() for result in self.results)

    def successful(self) -> bool:
        return all(result.successful() for result in self.results)

    def failed(self) -> bool:
        return any(result.failed() for result in self.results)

    def waiting(self) -> bool:
        return any(not result.ready() for result in self.results)

    def ready(self) -> bool:
        if self._run is not None and not self.results:
            return self._run.status() not in ("pending", "running")
        return all(result.ready() for result in self.results)

    def maybe_throw(self, callback: Any = None, propagate: bool = True) -> None:
        for result in self.results:
            result.maybe_throw(callback=callback, propagate=propagate)

    maybe_reraise = maybe_throw

    def forget(self) -> None:
        for result in self.results:
            result.forget()

    def revoke(self, terminate: bool = False, **_: Any) -> None:
        for result in self.results:
            result.revoke(terminate=terminate)

    def get(
        self,
        timeout: float | None = None,
        propagate: bool = True,
        callback: Any = None,
        disable_sync_subtasks: bool = True,
        on_message: Any = None,
        **_: Any,
    ) -> list[Any]:
        """Wait for all results and return them in order; the first failure is raised."""
        refuse_on_message(on_message)
        if disable_sync_subtasks:
            refuse_in_task()
        if self._run is not None and propagate and callback is None:
            return self._of_run(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        values = []
        for result in self.results:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            values.append(result.get(remaining, propagate=propagate, callback=callback, disable_sync_subtasks=False))
        return values

    def _of_run(self, timeout: float | None) -> list[Any]:
        assert self._run is not None
        try:
            values: list[Any] = untagged(self._run.result(timeout))
        except ResultTimeout as error:
            raise TimeoutError(str(error)) from None
        except RunFailed as error:
            raise outcomes.of_end(self.app, error, self._run) from None
        if len(self.results) != len(values):  # the results were restored before the scheduler had created the tasks
            self.results = restore(self.app, self._run.id).results
        return [
            result.get(timeout) if type(value) is dict and MARK in value else value
            for result, value in zip(self.results, values, strict=True)
        ]

    join = join_native = get

    def iter_native(self, timeout: float | None = None, **_: Any) -> Iterator[tuple[str, Any]]:
        """Yield the id, state and result of each, in order."""
        for result in self.results:
            value = result.get(timeout, propagate=False)
            yield result.id, {"status": result.state, "result": value}

    def iterate(self, timeout: float | None = None, propagate: bool = True, **_: Any) -> Iterator[Any]:
        return (result.get(timeout, propagate=propagate) for result in self.results)

    then = Refused("chord(group, callback) calls a task after all of them.")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.results)

    def __getitem__(self, index: int) -> Any:
        return self.results[index]

    def __len__(self) -> int:
        return len(self.results)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResultSet) and other.results == self.results

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: [{', '.join(str(result.id) for result in self.results)}]>"

    supports_native_join = True
    backend = None


class GroupResult(ResultSet):
    """The results of a group."""

    def __init__(
        self,
        id: str | None = None,  # Celery's name
        results: Iterable[Any] | None = None,
        parent: Any = None,
        app: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(results or [], app=app)
        self.id = id or uuid()
        self.parent = parent

    children = property(lambda self: self.results)

    def save(self, **_: Any) -> None:
        """Do nothing: a run is always stored under its id."""
        if self._run is None:
            raise NotCovered("GroupResult.save() of results that were put together", "Keep their ids: as_tuple().")

    def delete(self, **_: Any) -> None:
        self.forget()

    @classmethod
    def restore(cls, id: str, app: Any = None, **_: Any) -> Any:
        """Return the results of a group that was started elsewhere; None for an unknown id."""
        return restore(app_or_default(app), id)

    def revoke(self, terminate: bool = False, **_: Any) -> None:
        if self._run is not None:
            self.app.control.revoke(self._run.id, terminate=terminate)
        else:
            super().revoke(terminate=terminate)

    def as_tuple(self) -> Any:
        return (self.id, self.parent and self.parent.as_tuple()), [result.as_tuple() for result in self.results]

    def as_list(self) -> list[str]:
        return [self.id, *(result.id for result in self.results)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupResult) and other.id == self.id and other.results == self.results

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<GroupResult: {self.id} [{', '.join(str(result.id) for result in self.results)}]>"


def of_run(app: Any, run: CompositionHandle[Any], part: Composition[Any], task_id: str | None) -> Any:
    """Return the result of a started composition; `parent` leads to its earlier parts."""
    definition = run._definition()
    assert definition is not None
    result = _of_part(app, run, part, iter(definition.steps), None)
    identifier = task_id or run.id
    if isinstance(result, GroupResult):
        result.id, result._run = identifier, run
        return result
    composed = AsyncResult(identifier, app=app, parent=result.parent)
    composed._run, composed._handle = run, result._handle
    return composed


def _of_part(app: Any, run: CompositionHandle[Any], part: Composition[Any], steps: Iterator[Any], parent: Any) -> Any:
    """Return the result of a part. `steps` iterates the definition's steps, which are in the order of the parts."""
    if isinstance(part, Chain):
        result = parent
        for part_ in part.parts:
            result = _of_part(app, run, part_, steps, result)
        return result
    if isinstance(part, Call):
        return _of_step(app, run, next(steps).name, 0, parent)
    assert isinstance(part, Group)
    if part._first is None or not part._is_uniform:
        results = [_of_part(app, run, part_, steps, parent) for part_ in part.parts]
    elif isinstance(part._first, Call):
        step = next(steps).name
        results = [_of_step(app, run, step, index, parent) for index in range(len(part.parts))]
    else:
        step = next(steps).name
        client = app.orchestrator._client
        runs = [client.run_handle(child_id(run._id, step, index)) for index in range(len(part.parts))]
        results = [_of_child(app, run, part_) for part_ in runs]
    return GroupResult(uuid(), results, app=app, parent=parent)


def ids_of_calls(run: CompositionHandle[Any], part: Composition[Any]) -> Iterator[str | None]:
    """Yield the ids of a started composition's calls, in order; None for those of its child runs."""
    definition = run._definition()
    assert definition is not None
    return _ids_of_calls(run._id, part, iter(definition.steps))


def _ids_of_calls(run: bytes, part: Composition[Any], steps: Iterator[Any]) -> Iterator[str | None]:
    if isinstance(part, Call):
        yield to_text(derived_id(run, next(steps).name, 0))
    elif isinstance(part, Group) and part._first is not None and part._is_uniform:
        step, is_call = next(steps).name, isinstance(part._first, Call)
        for index, part_ in enumerate(part.parts):
            yield from [to_text(derived_id(run, step, index))] if is_call else (None for _ in part_._calls())
    else:
        assert isinstance(part, (Chain, Group))
        for part_ in part.parts:
            yield from _ids_of_calls(run, part_, steps)


def _of_step(app: Any, run: CompositionHandle[Any], step: str, index: int, parent: Any) -> AsyncResult:
    handle: Handle[Any] = Handle(app.orchestrator._client, derived_id(run._id, step, index))
    result = of_handle(app, handle)
    result._enclosing_run, result.parent = run, parent
    return result


def _of_child(app: Any, run: CompositionHandle[Any], child: CompositionHandle[Any]) -> AsyncResult:
    result = AsyncResult(child.id, app=app)
    result._enclosing_run = run
    return result


# -- found by its id


def restore(app: Any, identifier: str) -> Any:
    """Return the results of a group by its id; None for an unknown id."""
    client = app.orchestrator._client
    run = client.run_handle(to_id(identifier).bytes)
    if client.backend.insights.show_run(UUID(bytes=run._id)) is None:
        run = outcomes.run_under(app, identifier)
    definition = None if run is None else run._definition()
    if definition is None:
        return None
    steps = {step.name: step for step in client.backend.insights.list_steps(UUID(bytes=run._id))}
    results = list(_of_template(app, run, definition.params[RESULT].default, steps))
    group = GroupResult(identifier, results, app=app)
    group._run = run
    return group


def _of_template(app: Any, run: Any, template: Any, steps: Any) -> Iterator[Any]:
    """Yield the results of the steps that a run's result template refers to."""
    if isinstance(template, list):
        for item in template:
            yield from _of_template(app, run, item, steps)
        return
    match = _STEP.fullmatch(template) if isinstance(template, str) else None
    if match is None:
        return
    step = steps[match[1]]
    for index in range(step.total or 0 if step.fan_out else 1):
        if step.kind == "workflow":
            yield _of_child(app, run, app.orchestrator._client.run_handle(child_id(run._id, step.name, index)))
        else:
            yield _of_step(app, run, step.name, index, None)


def result_from_tuple(r: Any, app: Any = None) -> Any:
    if isinstance(r, ResultBase):
        return r
    (identifier, parent), nodes = r if isinstance(r[0], (list, tuple)) else ((r[0], None), r[1])
    parent_result = result_from_tuple(parent, app) if parent else None
    if nodes is not None:
        results = [result_from_tuple(node, app) for node in nodes]
        return GroupResult(identifier, results, parent=parent_result, app=app)
    return AsyncResult(identifier, app=app, parent=parent_result)


def allow_join_result() -> Any:
    raise NotCovered("allow_join_result", "A task cannot wait for another: link it, or use self.replace(…).")
