"""The handle of a started composition: a run with one result."""

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
_MAX_LISTED_STEPS = 20
_PAGE_SIZE = 1_000
_MAX_RETRIES = 100
"""Retries of a run, at most, up to which its child runs are found."""


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
        """Returns the definition of the run; None for a run of many tasks."""
        self._restored = restored

    def __repr__(self) -> str:
        return f"<CompositionHandle {self.id}{self._client.via}>"

    @blocking
    def result(self, timeout: float | None = None) -> Steps[O_co]:
        """Wait for the result of the last part and return it. RunFailed names the failed part and the parts not run.

        The result of a group is the list of all results. The result of any other workflow maps its steps to outputs.
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
        """Return the result of a run that did not succeed, with exceptions in place of missing results."""
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
        missing = [index for index, value in enumerate(values) if value is None]
        if step.kind == "workflow":
            for index, run, state in self._failed_children(step.name, missing):
                values[index] = run._failure(state)
            return values
        signature = self._signature if self._signature and self._signature.name == step.calls else None
        ids = {derived_id(self._id, step.name, index): index for index in missing}
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

    def _failed_children(self, step: str, indexes: Sequence[int]) -> Iterator[tuple[int, CompositionHandle[Any], str]]:
        """Yield the failed and cancelled child runs at some indexes of a step, and their states.

        A retry may have left several runs at one index; the newest comes last.
        """
        from orchestrator.store.insights import RunFilter  # loads SQLAlchemy, which workers do without

        query = RunFilter(parent=UUID(bytes=self._id), statuses=(ShownRunState.FAILED, ShownRunState.CANCELLED))
        states: dict[bytes, str] = {}
        before: UUID | None = None
        while True:
            page = self._client.backend.insights.page_of_runs(query, limit=_PAGE_SIZE, before=before)
            states |= {run.id.bytes: run.status for run in page.runs}
            if (before := page.next) is None:
                break
        for retried in range(_MAX_RETRIES):
            for index in indexes if states else ():
                if (identifier := child_id(self._id, step, index, retried)) in states:
                    yield index, self._client.run_handle(identifier), states.pop(identifier)

    def _not_run(self, step: StepView, steps: Mapping[str, StepView]) -> OrchestratorError:
        """Return the error of a part that was not run. It names the failed part before it."""
        if step.state == "cancelled":
            return TaskCancelled(f"{_step_label(step)} was cancelled.")
        ancestors, unvisited = set(), [step.name]
        while unvisited:
            if (name := unvisited.pop()) not in ancestors:
                ancestors.add(name)
                unvisited += steps[name].depends_on
        cause = _first_failure([*steps.values()], self._nested_failure, ancestors)
        return TaskSkipped(f"{_step_label(step)} was not run{': ' if cause else '.'}{cause}")

    def _failure(self, state: str) -> RunFailed:
        """Return the error of a run that did not succeed. It names the failed part and the parts not run."""
        steps = self._client.backend.insights.list_steps(UUID(bytes=self._id))
        return _failure(self, state, steps, self._nested_failure)

    def _nested_failure(self) -> str:
        """Describe the first failure in a nested composition; empty if there is none."""
        from orchestrator.store.insights import RunFilter  # loads SQLAlchemy, which workers do without

        query = RunFilter(parent=UUID(bytes=self._id), statuses=(ShownRunState.FAILED,))
        found = self._client.backend.insights.page_of_runs(query, limit=1, before=None).runs
        if not found:
            return ""
        child: CompositionHandle[Any] = CompositionHandle(self._client, found[0].id.bytes)
        steps = self._client.backend.insights.list_steps(found[0].id)
        return f" In run {child.id}: {_first_failure(steps, child._nested_failure)}"

    aresult = async_variant(result)


_RETRY_HINTS: dict[str, str] = {
    RunState.FAILED: "`retry()` tries again what did not succeed. ",
    RunState.CANCELLED: "`rerun()` starts it over. ",
}


def _failure(
    run: CompositionHandle[Any], state: str, steps: Sequence[StepView], nested_failure: Callable[[], str]
) -> RunFailed:
    not_run = [
        _step_label(step)
        for step in steps
        if step.state in ("skipped", "waiting") or (step.state == "cancelled" and step.started_at is None)
    ]
    named = ", ".join(not_run[:_MAX_LISTED_STEPS]) + (
        f" and {len(not_run) - _MAX_LISTED_STEPS:,} more" * (len(not_run) > _MAX_LISTED_STEPS)
    )
    failed = next((step for step in steps if step.state == "failed"), None)
    return RunFailed(
        f"{run!r} ended as {state}{': ' if failed else '.'}{_first_failure(steps, nested_failure)}"
        f"{f' Not run: {named}.' if not_run else ''} {_RETRY_HINTS.get(state, '')}See "
        f"`orchestrator runs show {run.id}`.",
        kind=failed.error.kind if failed and failed.error else "",
        data={"step": failed.name, "task": _step_label(failed), "not_run": not_run} if failed else {"not_run": not_run},
    )


def _step_label(step: StepView) -> str:
    """Return the task name of a step; for a nested composition, the name of the step."""
    return step.calls if step.kind == "task" else step.name


def _first_failure(
    steps: Sequence[StepView], nested_failure: Callable[[], str], among: Collection[str] | None = None
) -> str:
    """Describe the first failed step, and its error. `among` limits the search to some steps."""
    for number, step in enumerate(steps, 1):
        if step.state != "failed" or (among is not None and step.name not in among):
            continue
        description = f"step {number} of {len(steps)}, {_step_label(step)}"
        if step.fan_out:
            description += f", {step.failed:,} of {step.total or 0:,}"
        if step.error is not None:
            return f"{description}: {error_text(step.error.kind, step.error.message)}."
        return (
            f"{description}: {step.reason.rstrip('.')}."
            if step.reason
            else f"{description}.{nested_failure() if step.kind == 'workflow' else ''}"
        )
    return ""
