"""Workflows as classes: `from orchestrator import workflow` gives the decorators of their methods.

@app.workflow
class Order:
    def __init__(self, ctx: WorkflowContext) -> None: ...

    @workflow.run
    async def run(self, order_id: str) -> Receipt: ...

    @workflow.update
    async def add(self, item: Item) -> float: ...

A class is turned into a function that makes an instance for each run, registers its methods with `ctx.signal`,
`ctx.query` and `ctx.update`, and then runs it. So all that holds for functions holds for classes.
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
"""Where a registered class has its workflow."""


class RunMethod(Generic[P, R]):
    """The method that a run calls. Of a registered class it is the workflow: `Order.run.start("o-1")`."""

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        self.__doc__ = function.__doc__
        self.function = function

    def __get__(self, instance: object | None, owner: type[W]) -> CodeWorkflow[P, R, W]:
        found: CodeWorkflow[P, R, W] | None = vars(owner).get(_WORKFLOW)
        if found is None:
            raise AttributeError(f"Class {owner.__qualname__!r} is not registered: put @app.workflow above it.")
        return found


def run(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> RunMethod[P, R]:
    """Mark the `async def` method that a run calls; its arguments are those of the start."""
    return RunMethod(function)


def function_of(kind: type) -> Callable[..., Any]:
    members = {name: value for one in reversed(kind.__mro__) for name, value in vars(one).items()}.values()
    runs = [member for member in members if isinstance(member, RunMethod)]
    messages: list[MessageMethod[Any, ..., Any]] = [one for one in members if isinstance(one, MessageMethod)]
    if len(runs) != 1:
        found = ", ".join(member.function.__name__ for member in runs) or "none"
        raise InvalidWorkflow(
            f"Workflow class {kind.__qualname__!r}: expected one @workflow.run method, found {found}."
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
        ctx._handlers.are_all_known = True
        return await method(instance, *args, **kwargs)

    setattr(function, WORKFLOW_CLASS, kind)
    setattr(function, SIGNAL_METHODS, frozenset(one.name for one in messages if isinstance(one, SignalMethod)))
    return function if inspect.iscoroutinefunction(method) else method


def registered(kind: type, workflow: CodeWorkflow[..., Any]) -> None:
    setattr(kind, _WORKFLOW, workflow)


def workflow_of(given: Any) -> Any:
    """Return the workflow of a registered class; anything else as it is."""
    return vars(given).get(_WORKFLOW, given) if isinstance(given, type) else given


def _check(message: MessageMethod[Any, ..., Any]) -> None:
    """Refuse a method that could not handle its messages."""
    if isinstance(message, SignalMethod):
        taken = signal_signature(message.name, message.function, leading=1).takes
        if taken is None or len(taken) > 1:  # a caller could give what is not sent
            raise InvalidWorkflow(
                f"Signal {message.name!r}: expected one parameter or none, found "
                f"{inspect.signature(message.function)}. {ONE_VALUE}"
            )
    elif isinstance(message, QueryMethod):
        check_query(message.name, message.function)
    elif isinstance(message, UpdateMethod) and message.check is not None:
        check_validator(message.name, message.function, message.check)


def _register(ctx: WorkflowContext, message: MessageMethod[Any, ..., Any], instance: object) -> None:
    """Let an instance handle the messages of its run."""
    handler = message.__get__(instance, type(instance))
    if isinstance(message, UpdateMethod):
        ctx.update(message.name, validate=message.check and message.check.__get__(instance))(handler)
    else:
        getattr(ctx, message.what.lower())(message.name)(handler)
