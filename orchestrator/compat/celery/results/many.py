"""The results of a group, and of calls that are waited for together."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from orchestrator.compat.celery import outcomes
from orchestrator.compat.celery.app.current import app_or_default
from orchestrator.compat.celery.exceptions import NotCovered, Refused
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
from orchestrator.domain.ids import derived_id
from orchestrator.errors import RunFailed
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.tasks.compositions import Call, Chain, Composition, Group
from orchestrator.sdk.tasks.handle import Handle

_STEP = re.compile(r"\$\{`([^`]+)`\}")


class ResultSet(ResultBase):
    """Results that are waited for together."""

    def __init__(self, results: Iterable[Any], app: Any = None, **_: Any) -> None:
        self.results = list(results)
        self.app = app_or_default(app or next((one.app for one in self.results if one.app), None))
        self._run: CompositionHandle[Any] | None = None

    def add(self, result: Any) -> None:
        if result not in self.results:
            self.results.append(result)

    def remove(self, result: Any) -> None:
        self.results.remove(result)

    def discard(self, result: Any) -> None:
        """Remove a result, if it is there."""
        self.results = [one for one in self.results if one != result]

    def update(self, results: Iterable[Any]) -> None:
        for one in results:
            self.add(one)

    def clear(self) -> None:
        self.results.clear()

    def completed_count(self) -> int:
        return sum(one.successful() for one in self.results)

    def successful(self) -> bool:
        return all(one.successful() for one in self.results)

    def failed(self) -> bool:
        return any(one.failed() for one in self.results)

    def waiting(self) -> bool:
        return any(not one.ready() for one in self.results)

    def ready(self) -> bool:
        if self._run is not None and not self.results:
            return self._run.status() not in ("pending", "running")
        return all(one.ready() for one in self.results)

    def maybe_throw(self, callback: Any = None, propagate: bool = True) -> None:
        for one in self.results:
            one.maybe_throw(callback=callback, propagate=propagate)

    maybe_reraise = maybe_throw

    def forget(self) -> None:
        for one in self.results:
            one.forget()

    def revoke(self, terminate: bool = False, **_: Any) -> None:
        for one in self.results:
            one.revoke(terminate=terminate)

    def get(
        self,
        timeout: float | None = None,
        propagate: bool = True,
        callback: Any = None,
        disable_sync_subtasks: bool = True,
        on_message: Any = None,
        **_: Any,
    ) -> list[Any]:
        """Wait for all and return their results in order; the first failure is raised."""
        refuse_on_message(on_message)
        if disable_sync_subtasks:
            refuse_in_task()
        if self._run is not None and propagate and callback is None:
            return self._of_run(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        values = []
        for one in self.results:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            values.append(one.get(left, propagate=propagate, callback=callback, disable_sync_subtasks=False))
        return values

    def _of_run(self, timeout: float | None) -> list[Any]:
        assert self._run is not None
        try:
            values: list[Any] = untagged(self._run.result(timeout))
        except RunFailed as error:
            raise outcomes.of_end(self.app, error, self._run) from None
        if len(self.results) != len(values):  # it was restored before the scheduler had made its tasks
            self.results = restore(self.app, self._run.id).results
        return [
            one.get(timeout) if type(value) is dict and MARK in value else value
            for one, value in zip(self.results, values, strict=True)
        ]

    join = join_native = get

    def iter_native(self, timeout: float | None = None, **_: Any) -> Iterator[tuple[str, Any]]:
        """Yield ids and what stands behind them, in order."""
        for one in self.results:
            value = one.get(timeout, propagate=False)
            yield one.id, {"status": one.state, "result": value}

    def iterate(self, timeout: float | None = None, propagate: bool = True, **_: Any) -> Iterator[Any]:
        return (one.get(timeout, propagate=propagate) for one in self.results)

    then = Refused("chord(group, callback) calls a task after all of them.")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.results)

    def __getitem__(self, place: int) -> Any:
        return self.results[place]

    def __len__(self) -> int:
        return len(self.results)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResultSet) and other.results == self.results

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: [{', '.join(str(one.id) for one in self.results)}]>"

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
        """Do nothing: a run is stored, and found again by its id."""
        if self._run is None:
            raise NotCovered("GroupResult.save() of results that were put together", "Keep their ids: as_tuple().")

    def delete(self, **_: Any) -> None:
        self.forget()

    @classmethod
    def restore(cls, id: str, app: Any = None, **_: Any) -> Any:
        """Return the results of a group that was started elsewhere; None if there is none of this id."""
        return restore(app_or_default(app), id)

    def revoke(self, terminate: bool = False, **_: Any) -> None:
        if self._run is not None:
            self.app.control.revoke(self._run.id, terminate=terminate)
        else:
            super().revoke(terminate=terminate)

    def as_tuple(self) -> Any:
        return (self.id, self.parent and self.parent.as_tuple()), [one.as_tuple() for one in self.results]

    def as_list(self) -> list[str]:
        return [self.id, *(one.id for one in self.results)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupResult) and other.id == self.id and other.results == self.results

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<GroupResult: {self.id} [{', '.join(str(one.id) for one in self.results)}]>"


def of_run(app: Any, run: CompositionHandle[Any], part: Composition[Any], task_id: str | None) -> Any:
    """Return the result of a composition that was started; `parent` leads to its parts."""
    definition = run._definition()
    assert definition is not None
    result = _of_part(app, run, part, iter(definition.steps), None)
    identifier = task_id or run.id
    if isinstance(result, GroupResult):
        result.id, result._run = identifier, run
        return result
    whole = AsyncResult(identifier, app=app, parent=result.parent)
    whole._run = run
    return whole


def _of_part(app: Any, run: CompositionHandle[Any], part: Composition[Any], steps: Iterator[Any], parent: Any) -> Any:
    """Return the result of a part: the steps of a definition are in the order of its parts."""
    if isinstance(part, Chain):
        result = parent
        for one in part.parts:
            result = _of_part(app, run, one, steps, result)
        return result
    if isinstance(part, Call):
        return _of_step(app, run, next(steps).name, 0, parent)
    assert isinstance(part, Group)
    if part._first is None or not part._is_uniform:
        results = [_of_part(app, run, one, steps, parent) for one in part.parts]
    elif isinstance(part._first, Call):
        step = next(steps).name
        results = [_of_step(app, run, step, place, parent) for place in range(len(part.parts))]
    else:
        step = next(steps).name
        client = app.orchestrator._client
        runs = [client.run_handle(child_id(run._id, step, place)) for place in range(len(part.parts))]
        results = [_of_child(app, run, one) for one in runs]
    return GroupResult(uuid(), results, app=app, parent=parent)


def _of_step(app: Any, run: CompositionHandle[Any], step: str, place: int, parent: Any) -> AsyncResult:
    handle: Handle[Any] = Handle(app.orchestrator._client, derived_id(run._id, step, place))
    result = of_handle(app, handle)
    result._around, result.parent = run, parent
    return result


def _of_child(app: Any, run: CompositionHandle[Any], child: CompositionHandle[Any]) -> AsyncResult:
    result = AsyncResult(child.id, app=app)
    result._around = run
    return result


# -- found by its id


def restore(app: Any, identifier: str) -> Any:
    """Return the results of a group by its id; None if there is none."""
    client = app.orchestrator._client
    run = client.run_handle(to_id(identifier).bytes)
    if client.backend.insights.show_run(UUID(bytes=run._id)) is None:
        run = outcomes.run_under(app, identifier)
    definition = None if run is None else run._definition()
    if definition is None:
        return None
    steps = {step.name: step for step in client.backend.insights.list_steps(UUID(bytes=run._id))}
    found = list(_of_template(app, run, definition.params[RESULT].default, steps))
    group = GroupResult(identifier, found, app=app)
    group._run = run
    return group


def _of_template(app: Any, run: Any, template: Any, steps: Any) -> Iterator[Any]:
    """Yield the results of what a run comes to: of steps, or of the items of one."""
    if isinstance(template, list):
        for one in template:
            yield from _of_template(app, run, one, steps)
        return
    named = _STEP.fullmatch(template) if isinstance(template, str) else None
    if named is None:
        return
    step = steps[named[1]]
    for place in range(step.total or 0 if step.fan_out else 1):
        if step.kind == "workflow":
            yield _of_child(app, run, app.orchestrator._client.run_handle(child_id(run._id, step.name, place)))
        else:
            yield _of_step(app, run, step.name, place, None)


def result_from_tuple(r: Any, app: Any = None) -> Any:
    if isinstance(r, ResultBase):
        return r
    (identifier, parent), nodes = r if isinstance(r[0], (list, tuple)) else ((r[0], None), r[1])
    made = result_from_tuple(parent, app) if parent else None
    if nodes is not None:
        results = [result_from_tuple(one, app) for one in nodes]
        return GroupResult(identifier, results, parent=made, app=app)
    return AsyncResult(identifier, app=app, parent=made)


def allow_join_result() -> Any:
    raise NotCovered("allow_join_result", "A task cannot wait for another: link it, or use self.replace(…).")
