"""What the caller holds of a composition that was started: its run, with one result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from orchestrator.domain.dag.composed import result_template
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.tasks.task import error_text
from orchestrator.errors import OrchestratorError, RunFailed
from orchestrator.sdk.client import Client
from orchestrator.sdk.tasks.handle import Handle, RunHandle
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.waiting.async_variants import async_variant, blocking
from orchestrator.sdk.waiting.steps import Steps, Stream, check_timeout

if TYPE_CHECKING:
    from orchestrator.store.insights import StepView

O_co = TypeVar("O_co", covariant=True)
_MOST_NAMED = 20
"""Steps that an error names."""


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
        return f"<CompositionHandle {self.id}>"

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
            steps = self._client.backend.insights.list_steps(UUID(bytes=self._id))
            raise _failure(self, state, steps, self._below)
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
        is_fan_out = len(definition.steps) == 1 and definition.steps[0].foreach and definition.steps[0].workflow is None
        result: Any
        if return_exceptions and is_fan_out and (yield from self._wait_ended(timeout)) != RunState.SUCCESS:
            result = yield from self._with_errors(definition.steps[0].name)
        else:
            result = yield from self._result(timeout)
        yield from result if isinstance(result, list) else [result]

    def _with_errors(self, step: str) -> Steps[list[Any]]:
        """Return what the tasks of the only step came to, with the errors of those that did not succeed."""
        from orchestrator.sdk.calls.insights import list_tasks  # loads SQLAlchemy, which workers do without
        from orchestrator.store.insights import TaskFilter

        results = [*(self._client.backend.runs.outputs(self._id, [step])[step] or ())]
        wanted = TaskFilter(run=UUID(bytes=self._id), statuses=(TaskState.FAILED, TaskState.CANCELLED))
        found = list_tasks(self._client.backend.insights, wanted, limit=max(1, len(results))).tasks
        failed = {task.position or 0: Handle[Any](self._client, task.id.bytes, self._signature) for task in found}
        for place, value in enumerate(results):
            try:
                if (handle := failed.get(place)) is not None:
                    results[place] = handle._value((yield from handle._ended(None)))
                elif self._signature is not None:
                    results[place] = self._signature.restore_kept(value)
            except OrchestratorError as error:
                results[place] = error
        return results

    def _below(self) -> str:
        """Say which part of a composition within this one failed first."""
        from orchestrator.store.insights import RunFilter  # loads SQLAlchemy, which workers do without

        wanted = RunFilter(parent=UUID(bytes=self._id), statuses=(RunState.FAILED,))
        found = self._client.backend.insights.page_of_runs(wanted, limit=1, before=None).runs
        if not found:
            return ""
        child: CompositionHandle[Any] = CompositionHandle(self._client, found[0].id.bytes)
        steps = self._client.backend.insights.list_steps(found[0].id)
        return f" In run {child.id}: {_where(steps, child._below)}"

    aresult = async_variant(result)


def _failure(run: CompositionHandle[Any], state: str, steps: Sequence[StepView], below: Callable[[], str]) -> RunFailed:
    """Return the error of a run that did not succeed: which part failed, and what was not run."""
    not_run = [_called(step) for step in steps if step.state in ("skipped", "cancelled", "waiting")]
    named = ", ".join(not_run[:_MOST_NAMED]) + (
        f" and {len(not_run) - _MOST_NAMED:,} more" * (len(not_run) > _MOST_NAMED)
    )
    failed = next((step for step in steps if step.state == "failed"), None)
    return RunFailed(
        f"{run!r} ended as {state}{': ' if failed else '.'}{_where(steps, below)}"
        f"{f' Not run: {named}.' if not_run else ''} `retry()` tries again what did not succeed; see "
        f"`orchestrator runs show {run.id}`.",
        kind=failed.error.kind if failed and failed.error else "",
        data={"step": failed.name, "task": _called(failed), "not_run": not_run} if failed else {"not_run": not_run},
    )


def _called(step: StepView) -> str:
    """Return the task of a step; a composition within another is called like its step."""
    return step.calls if step.kind == "task" else step.name


def _where(steps: Sequence[StepView], below: Callable[[], str]) -> str:
    """Say which step failed first, and how."""
    for number, step in enumerate(steps, 1):
        if step.state != "failed":
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
