"""Dependencies: values that are opened for parameters of a task when it runs, and closed when it has ended.

    @app.resource(scope="process")
    def engine() -> Iterator[Engine]: …

    def session(engine: Engine = Depends(engine)) -> Iterator[Session]: …

    @app.task
    def place(order: int, db: Session = Depends(session)) -> None: …

`Resources.injected` wraps the function of a task: the wrapper opens the dependencies, calls the function, and closes
them. Workers, child processes and plain calls run the wrapper, and know nothing of dependencies.

There is one implementation, for `async def`. A synchronous task has no asynchronous dependencies, so the coroutine
around it never suspends, and `_completed` runs the coroutine without an event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, TypeVar, get_args, overload

from orchestrator.errors import InvalidTask
from orchestrator.sdk.waiting.per_process import PerLoop, PerProcess, ProcessLock
from orchestrator.telemetry import get_logger

log = get_logger("worker")

T = TypeVar("T")
Scope = Literal["task", "process"]
Function = Callable[..., Any]
_CLOSE_TIMEOUT = 10.0
"""Seconds for closing the asynchronous resources of a process, at most."""


class _Dependency(NamedTuple):
    function: Function


@overload
def Depends(function: Callable[..., Iterator[T]], /) -> T: ...
@overload
def Depends(function: Callable[..., AsyncIterator[T]], /) -> T: ...
@overload
def Depends(function: Callable[..., AbstractContextManager[T]], /) -> T: ...
@overload
def Depends(function: Callable[..., AbstractAsyncContextManager[T]], /) -> T: ...
@overload
def Depends(function: Callable[..., Awaitable[T]], /) -> T: ...
@overload
def Depends(function: Callable[..., T], /) -> T: ...


def Depends(function: Function, /) -> Any:  # noqa: N802  # as FastAPI calls it
    """Declare a dependency of a task, which is opened when the task runs: `db: Session = Depends(session)`.

    The function yields the value and closes it after the `yield`, returns the value, or returns a context manager to
    enter. `Annotated[Session, Depends(session)]` also works, but type checkers then require the argument in `enqueue`.
    """
    if not callable(function):
        raise InvalidTask(f"Depends(…): expected a function that yields or returns the value, found {function!r:.200}.")
    return _Dependency(function)


@cache
def dependencies_of(function: Function) -> dict[str, Function]:
    """Return the dependencies of a function, by parameter name."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        hints = {}
    dependencies: dict[str, Function] = {}
    for parameter in inspect.signature(function).parameters.values():
        markers = (parameter.default, *getattr(hints.get(parameter.name), "__metadata__", ()))
        if (marker := next((marker for marker in markers if isinstance(marker, _Dependency)), None)) is not None:
            dependencies[parameter.name] = marker.function
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise InvalidTask(f"{_name(function)}: {parameter} cannot be given by name, so it has no Depends.")
    return dependencies


class _OpenResources:
    """The open resources of one attempt. Each sees how the attempt ends, in reverse order of opening."""

    def __init__(self, *, on_event_loop: bool) -> None:
        self.values: dict[Function, Any] = {}
        self.stack = AsyncExitStack()
        self.on_event_loop = on_event_loop
        """Whether the resources are opened on an event loop."""

    def stack_for(self, function: Function) -> AsyncExitStack:  # noqa: ARG002
        return self.stack


class _Shared(_OpenResources):
    """The open resources of a process or an event loop. If a resource fails to close, the others are still closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(on_event_loop=loop is not None)
        self.lock = asyncio.Lock()
        self.stacks: list[tuple[Function, AsyncExitStack]] = []

    def stack_for(self, function: Function) -> AsyncExitStack:
        stack = AsyncExitStack()
        self.stacks.append((function, stack))
        return stack

    async def close(self, closing: list[str]) -> None:
        """Close all resources in reverse order. `closing` holds the name of the resource that is being closed."""
        self.values.clear()
        while self.stacks:
            function, stack = self.stacks.pop()
            closing.append(_name(function))
            try:
                await stack.aclose()
            except Exception:
                log.exception("resource.close_failed: closing the others")
            closing.remove(_name(function))


class _Override:
    """A value that replaces a dependency, and the resources of the process that were opened with the value."""

    def __init__(self, function: Function, value: Any, on_loop: Callable[[asyncio.AbstractEventLoop], _Shared]) -> None:
        self.function = function
        self.value = value
        self.process: PerProcess[_Shared] = PerProcess(_Shared)
        self.loop = PerLoop(on_loop)


class Resources:
    """The dependencies of one application: their scopes, overrides and open resources."""

    def __init__(self) -> None:
        self._scopes: dict[Function, Scope] = {}
        self._overrides: list[_Override] = []
        """Active overrides; the last wins. They may end in any order, because coroutines overlap."""
        self._known: set[Function] = set()
        """All dependencies of tasks, and all declared resources."""
        self.closing: list[str] = []
        self._lifespans: list[Function] = []
        self._locks: dict[Function, ProcessLock] = {}
        """A lock for each resource of the process, so that tasks wait only for the resource they need."""
        self.process = PerProcess(self._begin)
        self.loop = PerLoop(_Shared)

    def declare(self, function: Function, scope: Scope) -> None:
        """Set the scope of a resource."""
        if scope not in get_args(Scope):
            raise InvalidTask(f"app.resource(scope=…): expected 'task' or 'process', found {scope!r}.")
        self._scopes[function] = scope
        self._locks[function] = ProcessLock()
        for name, other in dependencies_of(function).items():
            if scope == "process" and self._scopes.get(other) != "process":
                raise InvalidTask(
                    f"Resource {_name(function)}: it is open as long as its process, and {name!r} only as long as a "
                    f"task. Declare {_name(other)} with @app.resource(scope='process'), too."
                )
        _check(function)
        self._known |= {function, *_all_needed(function)}

    def declare_lifespan(self, function: Function) -> None:
        """Declare a resource that each worker process opens when it starts."""
        if _is_async(function):
            raise InvalidTask(
                f"app.lifespan: expected a function with `yield`, found {_name(function)}, which is asynchronous. "
                f"Make it a resource of asynchronous tasks: @app.resource(scope='process')."
            )
        self.declare(function, "process")
        self._lifespans.append(function)

    @contextmanager
    def override(self, function: Function, value: Any) -> Iterator[None]:
        """Replace a dependency with a value for the length of a `with` block.

        Resources of the process that depend on it are opened anew, and closed at the end of the block. Asynchronous
        resources are closed with the others of their event loop.
        """
        if function not in self._known:
            raise InvalidTask(
                f"app.override: no task depends on {_name(function)}. Give the function that Depends(…) names, and "
                f"import the tasks first."
            )
        override = _Override(function, value, self._loop_resources)
        self._overrides.append(override)
        try:
            yield
        finally:
            self._overrides.remove(override)
            if (opened := override.process.take()) is not None:
                _completed(opened.close(self.closing))

    def _loop_resources(self, loop: asyncio.AbstractEventLoop) -> _Shared:
        """Return the resources of an override on the running event loop. They close together with the others there."""
        resources = _Shared(loop)
        resources.stacks = self.loop().stacks
        return resources

    def injected(self, function: Function) -> Function:
        """Wrap a function so that its dependencies are opened and closed around each call, if it has any."""
        needed = dependencies_of(function)
        if not needed or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            return function
        _check(function)
        self._known |= _all_needed(function)
        signature = inspect.signature(function)
        positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        slots = [(index, p.name) for index, p in enumerate(positional) if p.name in needed]

        async def call(args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            opened, failure, arguments = _OpenResources(on_event_loop=is_async), None, list(args)
            async with opened.stack:
                for name, other in needed.items():
                    if name not in keywords:
                        keywords[name] = await self._value(other, opened)
                for index, name in slots:
                    if index < len(arguments):  # arguments follow it: `def resize(db=Depends(session), path="")`
                        arguments.insert(index, keywords.pop(name))
                try:
                    result = function(*arguments, **keywords)
                    if is_async:
                        result = await result
                except BaseException as error:
                    failure = error
                    raise
            if failure is not None:
                raise failure  # a dependency has swallowed the exception, but the task failed all the same
            return result

        @wraps(function)
        def run(*args: Any, **keywords: Any) -> Any:
            return _completed(call(args, keywords))

        @wraps(function)
        async def run_async(*args: Any, **keywords: Any) -> Any:
            return await call(args, keywords)

        is_async = inspect.iscoroutinefunction(function)
        chosen: Any = run_async if is_async else run
        visible = [parameter for parameter in signature.parameters.values() if parameter.name not in needed]
        chosen.__signature__ = signature.replace(parameters=visible)
        chosen.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if name not in needed}
        return chosen  # type: ignore[no-any-return]

    def start(self) -> None:
        """Open the lifespan resources of a worker process."""
        for function in self._lifespans:
            _completed(self._value(function, self.process()))

    def close(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Close the resources of this process and of a running event loop, in reverse order."""
        try:
            if loop is not None and loop.is_running():
                asyncio.run_coroutine_threadsafe(self.close_on_loop(), loop).result(_CLOSE_TIMEOUT)
        except TimeoutError:
            log.warning("resource.close_timeout seconds=%g: asynchronous resources are left open", _CLOSE_TIMEOUT)
        if (opened := self.process.take()) is not None:
            atexit.unregister(self.close)
            _completed(opened.close(self.closing))

    async def close_on_loop(self) -> None:
        """Close the resources of the running event loop."""
        await self.loop().close(self.closing)

    def _begin(self) -> _Shared:
        atexit.register(self.close)  # for programs other than workers; a forked process finds nothing to close
        return _Shared()

    async def _value(self, function: Function, opened: _OpenResources) -> Any:
        """Return the value of a dependency: its override, an open resource, or a newly opened one."""
        owner: Resources | _Override = self
        for override in self._overrides[::-1]:
            if override.function == function:
                return override.value
            if owner is self and override.function in _all_needed(function):
                owner = override
        if self._scopes.get(function) != "process":
            return await self._open(function, opened)
        if _is_async(function):
            on_loop = owner.loop()
            if function in on_loop.values or opened is on_loop:
                return await self._open(function, on_loop)
            async with on_loop.lock:
                return await self._open(function, on_loop)
        shared = owner.process()
        value = shared.values.get(function, self)
        if value is not self:
            return value
        if opened.on_event_loop:  # do not block the event loop
            return await asyncio.to_thread(self._open_in_process, function, shared)
        return self._open_in_process(function, shared)

    def _open_in_process(self, function: Function, shared: _Shared) -> Any:
        with self._locks[function]:
            return _completed(self._open(function, shared))

    async def _open(self, function: Function, opened: _OpenResources) -> Any:
        if function in opened.values:
            return opened.values[function]
        needed = {name: await self._value(other, opened) for name, other in dependencies_of(function).items()}
        value = _context(function)(**needed)
        if inspect.iscoroutinefunction(function):
            value = await value
        if _is_async(function) and isinstance(value, AbstractAsyncContextManager):
            value = await opened.stack_for(function).enter_async_context(value)
        elif isinstance(value, AbstractContextManager):
            value = opened.stack_for(function).enter_context(value)
        opened.values[function] = value
        return value


@cache
def _all_needed(function: Function) -> frozenset[Function]:
    needed = dependencies_of(function).values()
    return frozenset(needed).union(*map(_all_needed, needed))


def _context(function: Function) -> Function:
    if inspect.isgeneratorfunction(function):
        return contextmanager(function)
    return asynccontextmanager(function) if inspect.isasyncgenfunction(function) else function


def _is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(inspect.unwrap(function))


def _check(function: Function) -> None:
    """Refuse asynchronous dependencies of a synchronous function."""
    for needed in dependencies_of(function).values():
        _check(needed)
        if _is_async(needed) and not _is_async(function):
            raise InvalidTask(
                f"{_name(function)} depends on {_name(needed)}, which is asynchronous. Make {_name(function)} an "
                f"`async def`, too."
            )


def _completed(work: Coroutine[Any, Any, T]) -> T:
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise InvalidTask("A dependency waits for something asynchronous outside of an event loop.")


def _name(function: Function) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
