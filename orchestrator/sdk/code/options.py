"""Options of a code workflow's decorator and of its calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Literal, get_args

from orchestrator.domain.code.commands import ClosePolicy, OnCancel
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.checks import SECONDS, check_name, check_options, in_seconds
from orchestrator.sdk.code.loop import MAX_WAIT
from orchestrator.sdk.tasks.resources import dependencies_of

Versioning = Literal["pinned", "auto_upgrade"]
"""How a new version affects open runs: they stay on their version and wait for it, or continue with the new one."""


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """Options of a code workflow, given on the decorator or per call."""

    timeout: float | timedelta | None = None
    """The timeout of a run, in seconds."""
    queue: str | None = None
    """The queue of the workflow's code, and of its tasks by default. A child inherits the queue of its parent."""
    name: str = ""
    """The display name of a child."""
    detached: bool = False
    """Let a child outlive its parent. The same as the close policy `abandon`."""
    close_policy: ClosePolicy | None = None
    """The fate of a child when its parent ends for any reason: `cancel` lets its code clean up (the default),
    `terminate` ends it immediately, and `abandon` lets it continue."""
    on_cancel: OnCancel = "cancel"
    """The effect of cancelling the future: `cancel` the child, cancel it and `wait` for its end, or `abandon` it."""

    def __post_init__(self) -> None:
        if self.queue is not None:
            check_name("queue", self.queue)
        if self.timeout is not None and not (_is_number(self.timeout) and 0 < self.seconds <= MAX_WAIT):
            raise InvalidWorkflow(
                f"Option timeout: expected {SECONDS}, above zero, found {self.timeout!r}.{in_seconds(self.timeout)}"
            )
        if not isinstance(self.detached, bool):
            raise InvalidWorkflow(f"Option detached: expected True or False, found {self.detached!r}.")
        if self.close_policy is not None and self.close_policy not in get_args(ClosePolicy):
            known = ", ".join(get_args(ClosePolicy))
            raise InvalidWorkflow(f"Option close_policy: expected one of {known}, found {self.close_policy!r}.")
        if self.detached and self.close_policy not in (None, "abandon"):
            raise InvalidWorkflow(
                "Options detached and close_policy: a detached child is abandoned, but close_policy is "
                f"{self.close_policy!r}. Give only one of the two."
            )
        if self.on_cancel not in get_args(OnCancel):
            known = ", ".join(get_args(OnCancel))
            raise InvalidWorkflow(f"Option on_cancel: expected one of {known}, found {self.on_cancel!r}.")

    @property
    def seconds(self) -> float:
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout or 0.0)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, timedelta)) and not isinstance(value, bool)


OPTION_NAMES = tuple(field.name for field in fields(CodeOptions))


def with_code_options(base: CodeOptions, changes: Mapping[str, Any]) -> CodeOptions:
    """Return the options with these changes. Raise for an unknown name and suggest the nearest one."""
    check_options("workflow", changes, OPTION_NAMES)
    return replace(base, **changes)


def check_workflow_function(name: str, version: object, versioning: object, function: Callable[..., Any]) -> None:
    if not inspect.iscoroutinefunction(function):
        raise InvalidWorkflow(
            f"Workflow {name!r}: expected an `async def` function without `yield`, found {function!r}."
        )
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise InvalidWorkflow(f"Workflow {name!r}: its first parameter is its context, `ctx: WorkflowContext`.")
    if resources := dependencies_of(function):
        raise InvalidWorkflow(
            f"Workflow {name!r}: its code runs again on every replay, so it cannot depend on resources "
            f"({', '.join(resources)}). Give them to its tasks."
        )
    if versioning is not None and versioning not in get_args(Versioning):
        known = " and ".join(get_args(Versioning))
        raise InvalidWorkflow(f"Workflow {name!r}: versioning: expected one of {known}, found {versioning!r}.")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidWorkflow(f"Workflow {name!r}: version: expected a whole number from 1, found {version!r}.")
