"""Middleware: hooks of an application around every enqueue, every attempt of a task and every turn of a workflow.

A hook is a plain method, called before the action, or a generator with code before and after its `yield`. Exceptions
of the action arrive at the `yield`. The first middleware added is the outermost. Without middleware,
`client.middleware` is None and no hook is called.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from orchestrator.domain.tasks.headers import check_headers, of_start
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import ConfigurationError, InvalidTask, InvalidWorkflow
from orchestrator.sdk.checks import for_message
from orchestrator.sdk.tasks.context import TaskContext, current_task
from orchestrator.telemetry import get_logger

log = get_logger("middleware")

_HEADER_PREFIX = "context."
"""The prefix of headers that carry context variables; the name of the variable follows."""


@dataclass(kw_only=True)
class EnqueueCall:
    """One enqueue of a task, or one start of a workflow or flow, before it is stored."""

    kind: Literal["task", "workflow", "flow"]
    """The type of the call."""
    name: str
    """The name of the task, workflow or flow."""
    args: Sequence[Any] = ()
    """The positional arguments, which a hook may read."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The keyword arguments; for a workflow or flow, its parameters."""
    options: dict[str, Any] = field(default_factory=dict)
    """The task options that the caller set. A hook may set more: `call.options["priority"] = 5`."""
    headers: dict[str, str] = field(default_factory=dict)
    """Text headers that travel with the call, including those of the calling task. A hook may add headers."""
    id: str | None = None
    """The id of the task after it was stored; None when many calls are stored together."""
    parts: Sequence[EnqueueCall] = ()
    """The task calls of a composition, which a hook may read. A map counts as one call, without its items."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """The outcome of an attempt, as the worker process reports it."""

    outcome: Literal["success", "retry", "failure", "cancelled", "lost"]
    """`retry` if the attempt failed and the task will be retried; `lost` if the child process of the attempt died."""
    error: TaskError | None = None
    """The error, with `kind`, `message` and `traceback`."""
    seconds: float = 0.0
    """Run time of the attempt in seconds."""


@dataclass(frozen=True, kw_only=True)
class TurnContext:
    """One turn of a workflow as code."""

    workflow: str
    """The name of the workflow."""
    run_id: UUID
    """The run of the turn."""
    headers: Mapping[str, str]
    """The headers of the run."""
    is_replay: bool
    """Whether the code is replayed from its beginning."""


class Middleware:
    """The base class of middleware; override the hooks that you need.

    `enqueue`, `execute` and `turn` may be generators with one `yield`, which stands for the call, attempt or turn.
    """

    def enqueue(self, call: EnqueueCall) -> Any:
        """Run before a call is stored. The hook may change its options and headers, or raise to refuse the call."""

    def aenqueue(self, call: EnqueueCall) -> Any:
        """Run in place of `enqueue` for `aenqueue` calls, as an `async def`. Without this hook, `enqueue` runs."""

    def execute(self, ctx: TaskContext) -> Any:
        """Run around an attempt of a task, in the thread, event loop or child process of the attempt."""

    def aexecute(self, ctx: TaskContext) -> Any:
        """Run in place of `execute` for asynchronous tasks, as an `async def`. Without this hook, `execute` runs."""

    def turn(self, ctx: TurnContext) -> Any:
        """Run around a turn of a workflow, outside of its code. The hook cannot change the decisions of the code."""

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        """Run after the end of an attempt was reported, in the worker process, wherever the attempt itself ran."""


_HOOKS = [name for name in vars(Middleware) if not name.startswith("_")]


class Chain:
    """The middleware of an application, in order, with the methods of each hook looked up in advance."""

    def __init__(self, members: Sequence[Middleware]) -> None:
        self._enqueue = _hooks(members, "enqueue")
        self._aenqueue = _hooks(members, "aenqueue", "enqueue")
        self._execute = _hooks(members, "execute")
        self._aexecute = _hooks(members, "aexecute", "execute")
        self._turn = _hooks(members, "turn")
        self._ended = _hooks(members, "ended")

    def enqueuing(self, call: EnqueueCall) -> AbstractContextManager[None]:
        """Call the hooks around one enqueue of a task."""
        return _around(self._enqueue, call)

    def aenqueuing(self, call: EnqueueCall) -> AbstractAsyncContextManager[None]:
        """Call the hooks around one enqueue of a task on an event loop."""
        return _async_around(self._aenqueue, call)

    def enter_enqueue(self, stack: ExitStack, call: EnqueueCall) -> None:
        """Call the hooks before one of many enqueues. Closing the stack runs the parts after their `yield`."""
        _enter(stack, self._enqueue, call)

    @contextmanager
    def starting(
        self,
        kind: Literal["workflow", "flow"],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parts: Sequence[EnqueueCall] = (),
    ) -> Iterator[EnqueueCall]:
        """Call the hooks around the start of a run. The run gets the headers of the call."""
        call = EnqueueCall(kind=kind, name=name, args=args, kwargs=kwargs, headers=headers_here(), parts=parts)
        with _around(self._enqueue, call):
            if call.options:
                raise InvalidWorkflow(
                    f"Middleware has set {', '.join(call.options)} for {kind} {name!r}: only tasks have "
                    'options. Check call.kind == "task" first.'
                )
            token = of_start.set(check_headers(call.headers))
            try:
                yield call
            finally:
                of_start.reset(token)

    def executing(self, ctx: TaskContext) -> AbstractContextManager[None]:
        """Call the hooks around an attempt."""
        return _around(self._execute, ctx)

    def aexecuting(self, ctx: TaskContext) -> AbstractAsyncContextManager[None]:
        """Call the hooks around an attempt of an asynchronous task."""
        return _async_around(self._aexecute, ctx)

    def turning(self, ctx: TurnContext) -> AbstractContextManager[None]:
        return _around(self._turn, ctx)

    @property
    def has_ended_hook(self) -> bool:
        """Whether any middleware has an `ended` hook."""
        return bool(self._ended)

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        """Call the `ended` hooks. Log their exceptions: the report of the attempt was already sent."""
        for hook in self._ended:
            try:
                hook(ctx, end)
            except Exception:
                log.exception("middleware.failed hook=%s: the end of the attempt was reported", hook.__qualname__)


class MiddlewareList(Sequence[Middleware]):
    """`app.middleware`: the middleware of an application, outermost first."""

    def __init__(self, install: Callable[[Chain], object]) -> None:
        self._install = install
        self._members: list[Middleware] = []

    def add(self, *members: Middleware) -> None:
        """Add middleware inside the existing one. Do this before the first call."""
        for member in members:
            _check(member)
        self._members += members
        if self._members:
            self._install(Chain(self._members))

    def __getitem__(self, index: Any) -> Any:
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)


class CarriedContext(Middleware):
    """Middleware that carries context variables from a caller to the task, and on to all tasks and runs it starts."""

    def __init__(self, variables: Iterable[ContextVar[Any]]) -> None:
        self.variables: dict[str, ContextVar[Any]] = {}
        for variable in each_of("context", variables):
            if not isinstance(variable, ContextVar) or self.variables.setdefault(variable.name, variable) != variable:
                raise ConfigurationError(
                    f"Orchestrator(context=…): expected context variables, each with a name of its own, found "
                    f"{for_message(variable)}."
                )

    def enqueue(self, call: EnqueueCall) -> None:
        """Put the variables that have a value into the headers."""
        for name, variable in self.variables.items():
            value = variable.get(...)
            if value is ...:
                continue
            try:
                call.headers[_HEADER_PREFIX + name] = json.dumps(value, allow_nan=False, separators=(",", ":"))
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidTask(
                    f"Context variable {name!r}: expected JSON data, found {value!r:.200}: {error}."
                ) from None

    def execute(self, ctx: TaskContext | TurnContext) -> None:
        """Set the variables from the headers."""
        for name, variable in self.variables.items():
            text = ctx.headers.get(_HEADER_PREFIX + name)
            if text is not None:
                variable.set(json.loads(text))

    turn = execute  # a run's headers stay the same, so its code sees the same values on every replay


# -- calling hooks

_Hook = Callable[..., Any]


def _hooks(members: Iterable[Middleware], *names: str) -> tuple[_Hook, ...]:
    method_names = (next((name for name in names if _has(member, name)), None) for member in members)
    return tuple(getattr(member, name) for member, name in zip(members, method_names, strict=True) if name is not None)


def _has(member: Middleware, name: str) -> bool:
    return getattr(type(member), name) is not getattr(Middleware, name)


def each_of(option: str, values: Iterable[Any]) -> Iterable[Any]:
    """Return the values of an option of `Orchestrator`. Refuse a value that is not iterable."""
    if not isinstance(values, Iterable):
        raise ConfigurationError(f"Orchestrator({option}=…): expected a list, found {for_message(values)}.")
    return values


def _check(member: object) -> None:
    if not isinstance(member, Middleware):
        raise ConfigurationError(
            f"Middleware: expected an object of a class below Middleware, found {for_message(member)}."
        )
    from difflib import get_close_matches  # only processes with middleware need it

    class_name = type(member).__name__
    for name, _ in inspect.getmembers(type(member), inspect.isroutine):
        nearest = [] if name.startswith("_") else get_close_matches(name, _HOOKS, n=1, cutoff=0.82)
        if nearest and name not in _HOOKS:
            raise ConfigurationError(
                f"Middleware {class_name}.{name} is never called. Did you mean {nearest[0]!r}? "
                f"If it is a method of your own, begin its name with an underscore."
            )
    for name in ("enqueue", "execute", "turn", "ended"):
        hook = getattr(member, name)
        if inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook):
            raise ConfigurationError(
                f"Middleware {class_name}.{name} is called from code that cannot await: make it a plain def."
            )
    for name, plain in (("aenqueue", "enqueue"), ("aexecute", "execute")):
        if _has(member, name) and not _has(member, plain):
            raise ConfigurationError(
                f"Middleware {class_name} has {name} and no {plain}: blocking calls would bypass it. Add {plain}."
            )


def headers_here() -> dict[str, str]:
    """Return the headers of the running task; outside of a task, none."""
    task = current_task()
    return {} if task is None else dict(task.headers)


class HookStack(ExitStack):
    """Runs the parts of hooks after their `yield`. A hook may replace an exception, but cannot swallow it."""

    def __exit__(self, *raised: Any) -> Literal[False]:
        super().__exit__(*raised)
        return False


class _AsyncHookStack(AsyncExitStack):
    async def __aexit__(self, *raised: Any) -> Literal[False]:
        await super().__aexit__(*raised)
        return False


@contextmanager
def _around(hooks: Iterable[_Hook], subject: object) -> Iterator[None]:
    with HookStack() as stack:
        _enter(stack, hooks, subject)
        yield


def _enter(stack: ExitStack, hooks: Iterable[_Hook], subject: object) -> None:
    for hook in hooks:
        if (entered := hook(subject)) is not None:
            stack.enter_context(_manager(entered))


@asynccontextmanager
async def _async_around(hooks: Iterable[_Hook], subject: object) -> AsyncIterator[None]:
    async with _AsyncHookStack() as stack:
        for hook in hooks:
            entered = hook(subject)
            if inspect.iscoroutine(entered):
                entered = await entered
            if inspect.isasyncgen(entered):
                await stack.enter_async_context(asynccontextmanager(lambda made=entered: made)())
            elif entered is not None:
                stack.enter_context(_manager(entered))
        yield


def _manager(entered: Any) -> Any:
    return contextmanager(lambda: entered)() if isinstance(entered, Generator) else entered
