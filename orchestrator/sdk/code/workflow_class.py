"""Workflows as classes. `from orchestrator import workflow` gives the decorators of their methods.

@app.workflow
class Order:
    def __init__(self, ctx: WorkflowContext) -> None: ...

    @workflow.run
    async def run(self, order_id: str) -> Receipt: ...

    @workflow.update
    async def add(self, item: Item) -> float: ...

A class is converted to a function. For each run, the function makes an instance, registers its methods with
`ctx.signal`, `ctx.query` and `ctx.update`, and runs it. Everything documented for functions therefore applies to
classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.code.context import WorkflowContext
from orchestrator.sdk.code.handlers import ONE_VALUE, check_query, check_validator, signal_signature
from orchestrator.sdk.code.known_handlers import SIGNAL_METHODS, WORKFLOW_CLASS
from orchestrator.sdk.code.messages import MessageMethod, QueryMethod, SignalMethod, UpdateMethod, query, signal, update
from orchestrator.sdk.code.workflow import CodeWorkflow

__all__ = ["query", "run", "signal", "update"]

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")
_WORKFLOW = "_code_workflow"
"""The attribute of a registered class that holds its workflow."""


class RunMethod(Generic[P, R]):
    """The main method of a workflow class. On a registered class it is the workflow: `Order.run.start("o-1")`."""

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        self.__doc__ = function.__doc__
        self.function = function

    def __get__(self, instance: object | None, owner: type[W]) -> CodeWorkflow[P, R, W]:
        workflow: CodeWorkflow[P, R, W] | None = vars(owner).get(_WORKFLOW)
        if workflow is None:
            raise AttributeError(f"Class {owner.__qualname__!r} is not registered: put @app.workflow above it.")
        return workflow


def run(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> RunMethod[P, R]:
    """Mark the `async def` method that each run executes. It gets the arguments of the start."""
    return RunMethod(function)


def function_of(kind: type) -> Callable[..., Any]:
    members = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}.values()
    runs = [member for member in members if isinstance(member, RunMethod)]
    messages: list[MessageMethod[Any, ..., Any]] = [base for base in members if isinstance(base, MessageMethod)]
    if len(runs) != 1:
        names = ", ".join(member.function.__name__ for member in runs) or "none"
        raise InvalidWorkflow(
            f"Workflow class {kind.__qualname__!r}: expected one @workflow.run method, found {names}."
        )
    try:
        inspect.signature(kind).bind(None)
    except TypeError:
        raise InvalidWorkflow(
            f"Workflow class {kind.__qualname__!r}: an instance is made for each run, with its context as the one "
            f"argument. Write `def __init__(self, ctx: WorkflowContext)`, or a dataclass with the field `ctx`."
        ) from None
    for message in messages:
        _check(message)
    method = runs[0].function

    @functools.wraps(method)
    async def function(ctx: WorkflowContext, /, *args: Any, **kwargs: Any) -> Any:
        instance = kind(ctx)
        for message in messages:
            _register(ctx, message, instance)
        ctx._handlers.is_complete = True
        return await method(instance, *args, **kwargs)

    setattr(function, WORKFLOW_CLASS, kind)
    setattr(function, SIGNAL_METHODS, frozenset(base.name for base in messages if isinstance(base, SignalMethod)))
    return function if inspect.iscoroutinefunction(method) else method


def registered(kind: type, workflow: CodeWorkflow[..., Any]) -> None:
    setattr(kind, _WORKFLOW, workflow)


def workflow_of(target: Any) -> Any:
    """Return the workflow of a registered class. Return any other object unchanged."""
    return vars(target).get(_WORKFLOW, target) if isinstance(target, type) else target


def _check(message: MessageMethod[Any, ..., Any]) -> None:
    if isinstance(message, SignalMethod):
        accepted = signal_signature(message.name, message.function, leading=1).takes
        if accepted is None or len(accepted) > 1:  # a caller could pass more than is sent
            raise InvalidWorkflow(
                f"Signal {message.name!r}: expected one parameter or none, found "
                f"{inspect.signature(message.function)}. {ONE_VALUE}"
            )
    elif isinstance(message, QueryMethod):
        check_query(message.name, message.function)
    elif isinstance(message, UpdateMethod) and message.check is not None:
        check_validator(message.name, message.function, message.check)


def _register(ctx: WorkflowContext, message: MessageMethod[Any, ..., Any], instance: object) -> None:
    handler = message.__get__(instance, type(instance))
    if isinstance(message, UpdateMethod):
        ctx.update(message.name, validate=message.check and message.check.__get__(instance))(handler)
    else:
        getattr(ctx, message.what.lower())(message.name)(handler)
