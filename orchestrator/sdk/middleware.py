"""Middleware: hooks of an application around every enqueue, every attempt of a task and every turn of a workflow.

A hook is a method that is called before, or a generator: before, `yield`, after. Exceptions arrive at the `yield`. The
middleware that was added first stands outermost. Without any, `client.middleware` is None and nothing is called.
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
from orchestrator.sdk.checks import shown
from orchestrator.sdk.tasks.context import TaskContext, current_task
from orchestrator.telemetry import get_logger

log = get_logger("middleware")

_CARRIED = "context."
"""Before the name of a context variable, in the header that carries it."""


@dataclass(kw_only=True)
class EnqueueCall:
    """One call that is about to be stored: of a task, or the start of a workflow or flow."""

    kind: Literal["task", "workflow", "flow"]
    """What is called."""
    name: str
    """The name of the task, workflow or flow."""
    args: Sequence[Any] = ()
    """Its arguments, which a hook may read."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Those by name; of a workflow or flow, its parameters."""
    options: dict[str, Any] = field(default_factory=dict)
    """The options that were given to a task; a hook may set others: `call.options["priority"] = 5`."""
    headers: dict[str, str] = field(default_factory=dict)
    """Texts that travel with it, with those of the task around this code; a hook may add to them."""
    id: str | None = None
    """The id of the task, once it is stored; None where many are stored together."""
    parts: Sequence[EnqueueCall] = ()
    """The calls of tasks in a composition, which a hook may read; a map in it is one, without its items."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt has ended, as the worker process sees that reports it."""

    outcome: Literal["success", "retry", "failure", "cancelled", "lost"]
    """`retry` if it failed and will be tried again; `lost` if its child process died."""
    error: TaskError | None = None
    """What went wrong: `kind`, `message` and `traceback`."""
    seconds: float = 0.0
    """How long it ran."""


@dataclass(frozen=True, kw_only=True)
class TurnContext:
    """One turn of a workflow as code."""

    workflow: str
    """The name of the workflow."""
    run_id: UUID
    """The run that the turn belongs to."""
    headers: Mapping[str, str]
    """The headers of the run."""
    is_replay: bool
    """The code runs again from its beginning, over what it has done before."""


class Middleware:
    """The hooks of an application; override those that you need.

    `enqueue`, `execute` and `turn` may be generators with one `yield`, around which the call, attempt or turn happens.
    """

    def enqueue(self, call: EnqueueCall) -> Any:
        """Act before a call is stored: change its options and headers, or raise to refuse it."""

    def aenqueue(self, call: EnqueueCall) -> Any:
        """Do the same as `enqueue`, as `async def`, for `aenqueue`; without it, `enqueue` is called."""

    def execute(self, ctx: TaskContext) -> Any:
        """Act around an attempt of a task, in its thread, on its event loop or in its child process."""

    def aexecute(self, ctx: TaskContext) -> Any:
        """Do the same as `execute`, as `async def`, for asynchronous tasks; without it, `execute` is called."""

    def turn(self, ctx: TurnContext) -> Any:
        """Act around a turn of a workflow, outside of its code: it cannot change what the code decides."""

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        """Act after the end of an attempt was reported, whether a thread, a child process or an executor ran it."""


_HOOKS = [name for name in vars(Middleware) if not name.startswith("_")]


class Chain:
    """The middleware of an application, in order: what each of its hooks is has been looked up."""

    def __init__(self, members: Sequence[Middleware]) -> None:
        self._enqueue = _hooks(members, "enqueue")
        self._aenqueue = _hooks(members, "aenqueue", "enqueue")
        self._execute = _hooks(members, "execute")
        self._aexecute = _hooks(members, "aexecute", "execute")
        self._turn = _hooks(members, "turn")
        self._ended = _hooks(members, "ended")

    def enqueuing(self, call: EnqueueCall) -> AbstractContextManager[None]:
        """Stand around one enqueue of a task."""
        return _around(self._enqueue, call)

    def aenqueuing(self, call: EnqueueCall) -> AbstractAsyncContextManager[None]:
        """Do the same on an event loop."""
        return _async_around(self._aenqueue, call)

    def enter_enqueue(self, stack: ExitStack, call: EnqueueCall) -> None:
        """Begin to stand around one enqueue of many; the stack ends it."""
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
        """Stand around the start of a run, which has the headers of the call."""
        call = EnqueueCall(kind=kind, name=name, args=args, kwargs=kwargs, headers=headers_here(), parts=parts)
        with _around(self._enqueue, call):
            if call.options:
                raise InvalidWorkflow(
                    f"Middleware has set {', '.join(call.options)} for {kind} {name!r}: options are those of tasks. "
                    f'Look at call.kind == "task" before.'
                )
            token = of_start.set(check_headers(call.headers))
            try:
                yield call
            finally:
                of_start.reset(token)

    def executing(self, ctx: TaskContext) -> AbstractContextManager[None]:
        """Stand around an attempt."""
        return _around(self._execute, ctx)

    def aexecuting(self, ctx: TaskContext) -> AbstractAsyncContextManager[None]:
        """Stand around an attempt of an asynchronous task."""
        return _async_around(self._aexecute, ctx)

    def turning(self, ctx: TurnContext) -> AbstractContextManager[None]:
        return _around(self._turn, ctx)

    @property
    def sees_ends(self) -> bool:
        """Say whether anybody is told of the ends of attempts."""
        return bool(self._ended)

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        """Tell of the end of an attempt; what a hook raises is logged, for the report is on its way."""
        for hook in self._ended:
            try:
                hook(ctx, end)
            except Exception:
                log.exception("middleware.failed hook=%s: the end of the attempt was reported", hook.__qualname__)


class MiddlewareList(Sequence[Middleware]):
    """`app.middleware`: the middleware of an application, the outermost first."""

    def __init__(self, install: Callable[[Chain], object]) -> None:
        self._install = install
        self._members: list[Middleware] = []

    def add(self, *members: Middleware) -> None:
        """Add middleware, inside that which is there; before the first call is made."""
        for member in members:
            _check(member)
        self._members += members
        if self._members:
            self._install(Chain(self._members))

    def __getitem__(self, place: Any) -> Any:
        return self._members[place]

    def __len__(self) -> int:
        return len(self._members)


class CarriedContext(Middleware):
    """Context variables that travel from a caller to the task, and on to all that comes of it."""

    def __init__(self, variables: Iterable[ContextVar[Any]]) -> None:
        self.variables: dict[str, ContextVar[Any]] = {}
        for variable in each_of("context", variables):
            if not isinstance(variable, ContextVar) or self.variables.setdefault(variable.name, variable) != variable:
                raise ConfigurationError(
                    f"Orchestrator(context=…): expected context variables, each with a name of its own, found "
                    f"{shown(variable)}."
                )

    def enqueue(self, call: EnqueueCall) -> None:
        """Put the variables that have a value into the headers."""
        for name, variable in self.variables.items():
            value = variable.get(...)
            if value is ...:
                continue
            try:
                call.headers[_CARRIED + name] = json.dumps(value, allow_nan=False, separators=(",", ":"))
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidTask(
                    f"Context variable {name!r}: expected JSON data, found {value!r:.200}: {error}."
                ) from None

    def execute(self, ctx: TaskContext | TurnContext) -> None:
        """Set the variables that came along."""
        for name, variable in self.variables.items():
            text = ctx.headers.get(_CARRIED + name)
            if text is not None:
                variable.set(json.loads(text))

    turn = execute  # a run's headers stay the same, so its code sees the same values on every replay


# -- calling hooks

_Hook = Callable[..., Any]


def _hooks(members: Iterable[Middleware], *names: str) -> tuple[_Hook, ...]:
    found = (next((name for name in names if _has(member, name)), None) for member in members)
    return tuple(getattr(member, name) for member, name in zip(members, found, strict=True) if name is not None)


def _has(member: Middleware, name: str) -> bool:
    return getattr(type(member), name) is not getattr(Middleware, name)


def each_of(option: str, values: Iterable[Any]) -> Iterable[Any]:
    """Return the values of an option of `Orchestrator`; refuse one that is no list."""
    if not isinstance(values, Iterable):
        raise ConfigurationError(f"Orchestrator({option}=…): expected a list, found {shown(values)}.")
    return values


def _check(member: object) -> None:
    if not isinstance(member, Middleware):
        raise ConfigurationError(f"Middleware: expected an object of a class below Middleware, found {shown(member)}.")
    from difflib import get_close_matches  # which a process without middleware does without

    whose = type(member).__name__
    for name, _ in inspect.getmembers(type(member), inspect.isroutine):
        nearest = [] if name.startswith("_") else get_close_matches(name, _HOOKS, n=1, cutoff=0.82)
        if nearest and name not in _HOOKS:
            raise ConfigurationError(
                f"Middleware {whose}.{name} is never called. Did you mean {nearest[0]!r}? "
                f"If it is a method of your own, begin its name with an underscore."
            )
    for name in ("enqueue", "execute", "turn", "ended"):
        hook = getattr(member, name)
        if inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook):
            raise ConfigurationError(
                f"Middleware {whose}.{name} is called where nothing can be awaited: make it a def."
            )
    for name, plain in (("aenqueue", "enqueue"), ("aexecute", "execute")):
        if _has(member, name) and not _has(member, plain):
            raise ConfigurationError(
                f"Middleware {whose} has {name} and no {plain}: blocking calls would pass it by. Add {plain}."
            )


def headers_here() -> dict[str, str]:
    """Return the headers of the task around the current code."""
    task = current_task()
    return {} if task is None else dict(task.headers)


class HookStack(ExitStack):
    """What hooks do afterwards: they may replace an exception, and do not swallow it."""

    def __exit__(self, *raised: Any) -> Literal[False]:
        super().__exit__(*raised)
        return False


class _AsyncHookStack(AsyncExitStack):
    """The async variant of `HookStack`."""

    async def __aexit__(self, *raised: Any) -> Literal[False]:
        await super().__aexit__(*raised)
        return False


@contextmanager
def _around(hooks: Iterable[_Hook], about: object) -> Iterator[None]:
    with HookStack() as stack:
        _enter(stack, hooks, about)
        yield


def _enter(stack: ExitStack, hooks: Iterable[_Hook], about: object) -> None:
    for hook in hooks:
        if (entered := hook(about)) is not None:
            stack.enter_context(_manager(entered))


@asynccontextmanager
async def _async_around(hooks: Iterable[_Hook], about: object) -> AsyncIterator[None]:
    async with _AsyncHookStack() as stack:
        for hook in hooks:
            entered = hook(about)
            if inspect.iscoroutine(entered):
                entered = await entered
            if inspect.isasyncgen(entered):
                await stack.enter_async_context(asynccontextmanager(lambda made=entered: made)())
            elif entered is not None:
                stack.enter_context(_manager(entered))
        yield


def _manager(entered: Any) -> Any:
    return contextmanager(lambda: entered)() if isinstance(entered, Generator) else entered
