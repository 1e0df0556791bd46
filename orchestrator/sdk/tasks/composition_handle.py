"""What the caller holds of a composition that was started: its run, with one result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from orchestrator.domain.dag.composed import child_id, result_template
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.dag.expression import Template
from orchestrator.domain.dag.scope import Scope
from orchestrator.domain.ids import derived_id
from orchestrator.domain.states import RunState, ShownRunState
from orchestrator.domain.tasks.task import error_text
from orchestrator.errors import NotFound, OrchestratorError, RunFailed, TaskCancelled, TaskSkipped
from orchestrator.sdk.client import Client
from orchestrator.sdk.tasks.handle import Handle, RunHandle
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.waiting.async_variants import async_variant, blocking
from orchestrator.sdk.waiting.steps import Pause, Steps, Stream, check_timeout, time_limit

if TYPE_CHECKING:
    from orchestrator.store.insights import StepView

O_co = TypeVar("O_co", covariant=True)
_MOST_NAMED = 20
"""Steps that an error names."""
_PAGE = 1_000
"""Runs that are read at once."""
_MOST_RETRIES = 100
"""Retries of a run after which the runs below it are found."""


class CompositionHandle(RunHandle[Any], Generic[O_co]):
    """One run of a composition."""

    def __init__(
        self,
        client: Client,
        identifier: bytes,
        definition: Callable[[], Definition | None] | None = None,
        restored: Callable[[Any], Any] = lambda value: value,
        signature: Signature | None = None,
    ) -> None:
        super().__init__(client, identifier, signature)
        self._definition = definition or (lambda: client.backend.insights.definition_of_run(UUID(bytes=identifier)))
        """What it is a run of; nothing if it is a run of many tasks."""
        self._restored = restored

    def __repr__(self) -> str:
        return f"<CompositionHandle {self.id}{self._client.via}>"

    @blocking
    def result(self, timeout: float | None = None) -> Steps[O_co]:
        """Wait for the result of the last part and return it; RunFailed says which part failed, and what was not run.

        Of a group that is the list of all results, of another workflow the outputs of its steps by name.
        """
        return (yield from self._result(timeout))

    def _result(self, timeout: float | None) -> Steps[O_co]:
        state = yield from self._wait_ended(timeout)
        definition = self._definition()
        result: Any
        if definition is None:
            result = yield from self._results(timeout, return_exceptions=False)
            return result  # type: ignore[no-any-return]
        if state != RunState.SUCCESS:
            raise self._failure(state)
        template = result_template(definition)
        if template is None:
            result = self._client.backend.runs.outputs(self._id)
        else:
            outputs = self._client.backend.runs.outputs(self._id, sorted(template.roots))
            result = self._restored(template.render(outputs))
        return result  # type: ignore[no-any-return]

    def _iter_results(self, timeout: float | None, return_exceptions: bool) -> Stream[Any]:
        check_timeout(timeout)
        definition = self._definition()
        if definition is None:
            yield from super()._iter_results(timeout, return_exceptions)
            return
        template = result_template(definition)
        result: Any
        if return_exceptions and template is not None and (yield from self._wait_ended(timeout)) != RunState.SUCCESS:
            result = yield from self._with_errors(template, timeout)
        else:
            result = yield from self._result(timeout)
        yield from result if isinstance(result, list) else [result]

    def _with_errors(self, template: Template, timeout: float | None) -> Steps[Any]:
        """Return what a run came to that did not succeed, with errors in the place of missing results."""
        steps = {step.name: step for step in self._client.backend.insights.list_steps(UUID(bytes=self._id))}
        outputs = self._client.backend.runs.outputs(self._id, sorted(template.roots))
        for name in template.roots:
            if (step := steps[name]).state != "success":
                outputs[name] = yield from self._step_with_errors(step, outputs.get(name), steps, timeout)
        result = template.fill(Scope(outputs))
        if not isinstance(result, list):
            return (yield from self._result(timeout))  # raises: no part of the group has begun
        return self._restored(result)

    def _step_with_errors(
        self, step: StepView, output: Any, steps: Mapping[str, StepView], timeout: float | None
    ) -> Steps[Any]:
        if step.total is None or step.state in ("skipped", "waiting"):
            return self._not_run(step, steps)
        values = [*output] if step.fan_out else [output]
        missing = [place for place, value in enumerate(values) if value is None]
        if step.kind == "workflow":
            for place, run, state in self._failed_children(step.name, missing):
                values[place] = run._failure(state)
            return values
        signature = self._signature if self._signature and self._signature.name == step.calls else None
        ids = {derived_id(self._id, step.name, place): place for place in missing}
        for ended in self._client.backend.tasks.wait_each(list(ids), time_limit(timeout)):
            if isinstance(ended, Pause):
                yield ended
                continue
            try:
                Handle[Any](self._client, ended.id, signature)._value(ended)
            except NotFound:
                values[ids[ended.id]] = self._not_run(step, steps)
            except OrchestratorError as error:
                values[ids[ended.id]] = error
        return values if step.fan_out else values[0]

    def _failed_children(self, step: str, places: Sequence[int]) -> Iterator[tuple[int, CompositionHandle[Any], str]]:
        """Yield the runs at some places of a step that did not succeed, and their states.

        Of several at one place, as a retry may leave them, the newest is the last.
        """
        from orchestrator.store.insights import RunFilter  # loads SQLAlchemy, which workers do without

        wanted = RunFilter(parent=UUID(bytes=self._id), statuses=(ShownRunState.FAILED, ShownRunState.CANCELLED))
        left: dict[bytes, str] = {}
        before: UUID | None = None
        while True:
            page = self._client.backend.insights.page_of_runs(wanted, limit=_PAGE, before=before)
            left |= {run.id.bytes: run.status for run in page.runs}
            if (before := page.next) is None:
                break
        for retried in range(_MOST_RETRIES):
            for place in places if left else ():
                if (identifier := child_id(self._id, step, place, retried)) in left:
                    yield place, self._client.run_handle(identifier), left.pop(identifier)

    def _not_run(self, step: StepView, steps: Mapping[str, StepView]) -> OrchestratorError:
        """Return the error of a part that has not begun: it says which part before it failed."""
        if step.state == "cancelled":
            return TaskCancelled(f"{_called(step)} was cancelled.")
        before, left = set(), [step.name]
        while left:
            if (name := left.pop()) not in before:
                before.add(name)
                left += steps[name].depends_on
        why = _where([*steps.values()], self._below, before)
        return TaskSkipped(f"{_called(step)} was not run{': ' if why else '.'}{why}")

    def _failure(self, state: str) -> RunFailed:
        """Return the error of a run that did not succeed: which part failed, and what was not run."""
        steps = self._client.backend.insights.list_steps(UUID(bytes=self._id))
        return _failure(self, state, steps, self._below)

    def _below(self) -> str:
        """Say which part of a composition within this one failed first."""
        from orchestrator.store.insights import RunFilter  # loads SQLAlchemy, which workers do without

        wanted = RunFilter(parent=UUID(bytes=self._id), statuses=(ShownRunState.FAILED,))
        found = self._client.backend.insights.page_of_runs(wanted, limit=1, before=None).runs
        if not found:
            return ""
        child: CompositionHandle[Any] = CompositionHandle(self._client, found[0].id.bytes)
        steps = self._client.backend.insights.list_steps(found[0].id)
        return f" In run {child.id}: {_where(steps, child._below)}"

    aresult = async_variant(result)


_AGAIN: dict[str, str] = {
    RunState.FAILED: "`retry()` tries again what did not succeed. ",
    RunState.CANCELLED: "`rerun()` starts it over. ",
}


def _failure(run: CompositionHandle[Any], state: str, steps: Sequence[StepView], below: Callable[[], str]) -> RunFailed:
    """Return the error of a run that did not succeed: which part failed, and what was not run."""
    not_run = [
        _called(step)
        for step in steps
        if step.state in ("skipped", "waiting") or (step.state == "cancelled" and step.started_at is None)
    ]
    named = ", ".join(not_run[:_MOST_NAMED]) + (
        f" and {len(not_run) - _MOST_NAMED:,} more" * (len(not_run) > _MOST_NAMED)
    )
    failed = next((step for step in steps if step.state == "failed"), None)
    return RunFailed(
        f"{run!r} ended as {state}{': ' if failed else '.'}{_where(steps, below)}"
        f"{f' Not run: {named}.' if not_run else ''} {_AGAIN.get(state, '')}See "
        f"`orchestrator runs show {run.id}`.",
        kind=failed.error.kind if failed and failed.error else "",
        data={"step": failed.name, "task": _called(failed), "not_run": not_run} if failed else {"not_run": not_run},
    )


def _called(step: StepView) -> str:
    """Return the task of a step; a composition within another is called like its step."""
    return step.calls if step.kind == "task" else step.name


def _where(steps: Sequence[StepView], below: Callable[[], str], among: Collection[str] | None = None) -> str:
    """Say which step failed first, of all or some, and how."""
    for number, step in enumerate(steps, 1):
        if step.state != "failed" or (among is not None and step.name not in among):
            continue
        what = f"step {number} of {len(steps)}, {_called(step)}"
        if step.fan_out:
            what += f", {step.failed:,} of {step.total or 0:,}"
        if step.error is not None:
            return f"{what}: {error_text(step.error.kind, step.error.message)}."
        return (
            f"{what}: {step.reason.rstrip('.')}."
            if step.reason
            else f"{what}.{below() if step.kind == 'workflow' else ''}"
        )
    return ""
