"""Dependencies: what parameters of a task are given when it runs, and what is closed when it has ended.

    @app.resource(scope="process")
    def engine() -> Iterator[Engine]: …

    def session(engine: Engine = Depends(engine)) -> Iterator[Session]: …

    @app.task
    def place(order: int, db: Session = Depends(session)) -> None: …

`Resources.injected` makes a function of a task's own that opens them, calls it, and closes them. Workers, child
processes and plain calls run that function, and know nothing of dependencies; a task without any stays as it is.

There is one implementation, for `async def`. A task that is not asynchronous has no asynchronous dependencies, so the
coroutine around it never waits, and `_completed` runs it from its beginning to its end.
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
_CLOSING = 10.0
"""Seconds that the asynchronous resources of a process have to close."""


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
    """Say what a parameter is given when the task runs: `db: Session = Depends(session)`.

    The function yields it, and closes it after the `yield`; or it returns it, or a context manager, which is entered.
    `Annotated[Session, Depends(session)]` is the same, but type checkers then want it in `enqueue`, too.
    """
    if not callable(function):
        raise InvalidTask(f"Depends(…): expected a function that yields or returns the value, found {function!r:.200}.")
    return _Dependency(function)


@cache
def dependencies_of(function: Function) -> dict[str, Function]:
    """Return the functions on which parameters of a function depend, by name."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        hints = {}
    found: dict[str, Function] = {}
    for parameter in inspect.signature(function).parameters.values():
        said = (parameter.default, *getattr(hints.get(parameter.name), "__metadata__", ()))
        if (one := next((one for one in said if isinstance(one, _Dependency)), None)) is not None:
            found[parameter.name] = one.function
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise InvalidTask(f"{_name(function)}: {parameter} cannot be given by name, so it has no Depends.")
    return found


class _Opened:
    """What is open for one attempt. Each of them sees how the attempt ends, the last that was opened first."""

    def __init__(self, *, may_wait: bool) -> None:
        self.values: dict[Function, Any] = {}
        self.stack = AsyncExitStack()
        self.may_wait = may_wait
        """It is opened on an event loop."""

    def entering(self, function: Function) -> AsyncExitStack:  # noqa: ARG002
        return self.stack


class _Kept(_Opened):
    """What is open in a process, or on an event loop. One that cannot be closed is no concern of the others."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(may_wait=loop is not None)
        self.lock = asyncio.Lock()
        self.stacks: list[tuple[Function, AsyncExitStack]] = []

    def entering(self, function: Function) -> AsyncExitStack:
        stack = AsyncExitStack()
        self.stacks.append((function, stack))
        return stack

    async def close(self, closing: list[str]) -> None:
        """Close all, the last that was opened first; `closing` names the one that is being closed."""
        self.values.clear()
        while self.stacks:
            function, stack = self.stacks.pop()
            closing.append(_name(function))
            try:
                await stack.aclose()
            except Exception:
                log.exception("resource.close_failed: the others are closed all the same")
            closing.remove(_name(function))


class _Override:
    """What stands in for a dependency, and resources of the process that depend on it, opened for this time only."""

    def __init__(self, function: Function, value: Any, on_loop: Callable[[asyncio.AbstractEventLoop], _Kept]) -> None:
        self.function = function
        self.value = value
        self.process: PerProcess[_Kept] = PerProcess(_Kept)
        self.loop = PerLoop(on_loop)


class Resources:
    """The dependencies of one application: their scopes, what stands in for them, and what is open."""

    def __init__(self) -> None:
        self._scopes: dict[Function, Scope] = {}
        self._overrides: list[_Override] = []
        """The last one counts. Of two coroutines, the first may also be the first to end."""
        self._known: set[Function] = set()
        """Dependencies of tasks, and all that is declared."""
        self.closing: list[str] = []
        """The names of those that are being closed."""
        self._lifespans: list[Function] = []
        self._locks: dict[Function, ProcessLock] = {}
        """Of resources of the process: while one is opened, tasks that need another one do not wait."""
        self.process = PerProcess(self._begin)
        self.loop = PerLoop(_Kept)

    def declare(self, function: Function, scope: Scope) -> None:
        """Say how long what a function yields is open."""
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
        """Open a resource when a worker process starts."""
        if _is_async(function):
            raise InvalidTask(
                f"app.lifespan: expected a function with `yield`, found {_name(function)}, which is asynchronous. "
                f"Make it a resource of asynchronous tasks: @app.resource(scope='process')."
            )
        self.declare(function, "process")
        self._lifespans.append(function)

    @contextmanager
    def override(self, function: Function, value: Any) -> Iterator[None]:
        """Let a value stand in for what a function yields.

        Resources of the process that depend on it are opened anew, and closed at the end. Asynchronous ones are closed
        with those of their event loop.
        """
        if function not in self._known:
            raise InvalidTask(
                f"app.override: no task depends on {_name(function)}. Give the function that Depends(…) names, and "
                f"import the tasks first."
            )
        override = _Override(function, value, self._beside)
        self._overrides.append(override)
        try:
            yield
        finally:
            self._overrides.remove(override)
            if (opened := override.process.take()) is not None:
                _completed(opened.close(self.closing))

    def _beside(self, loop: asyncio.AbstractEventLoop) -> _Kept:
        """Return what an override has open on the running loop, to be closed with all that is open there."""
        kept = _Kept(loop)
        kept.stacks = self.loop().stacks
        return kept

    def injected(self, function: Function) -> Function:
        """Return a function that opens what another depends on, calls it, and closes that; without any, the same."""
        needed = dependencies_of(function)
        if not needed or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            return function
        _check(function)
        self._known |= _all_needed(function)
        signature = inspect.signature(function)
        by_place = [one for one in signature.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
        places = [(place, one.name) for place, one in enumerate(by_place) if one.name in needed]

        async def call(args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            opened, failure, arguments = _Opened(may_wait=is_async), None, list(args)
            async with opened.stack:
                for name, other in needed.items():
                    if name not in keywords:
                        keywords[name] = await self._value(other, opened)
                for place, name in places:
                    if place < len(arguments):  # others come behind it: `def resize(db=Depends(session), path="")`
                        arguments.insert(place, keywords.pop(name))
                try:
                    result = function(*arguments, **keywords)
                    if is_async:
                        result = await result
                except BaseException as error:
                    failure = error
                    raise
            if failure is not None:
                raise failure  # a dependency has kept it to itself, and the task has failed all the same
            return result

        @wraps(function)
        def run(*args: Any, **keywords: Any) -> Any:
            return _completed(call(args, keywords))

        @wraps(function)
        async def run_async(*args: Any, **keywords: Any) -> Any:
            return await call(args, keywords)

        is_async = inspect.iscoroutinefunction(function)
        chosen: Any = run_async if is_async else run
        visible = [one for one in signature.parameters.values() if one.name not in needed]
        chosen.__signature__ = signature.replace(parameters=visible)
        chosen.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if name not in needed}
        return chosen  # type: ignore[no-any-return]

    def start(self) -> None:
        """Open what a worker process has from its start to its end."""
        for function in self._lifespans:
            _completed(self._value(function, self.process()))

    def close(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Close what is open in this process, and on an event loop that runs; the last that was opened first."""
        try:
            if loop is not None and loop.is_running():
                asyncio.run_coroutine_threadsafe(self.close_on_loop(), loop).result(_CLOSING)
        except TimeoutError:
            log.warning("resource.close_timeout seconds=%g: asynchronous resources are left open", _CLOSING)
        if (opened := self.process.take()) is not None:
            atexit.unregister(self.close)
            _completed(opened.close(self.closing))

    async def close_on_loop(self) -> None:
        """Close what is open on the running event loop."""
        await self.loop().close(self.closing)

    def _begin(self) -> _Kept:
        atexit.register(self.close)  # for programs that are no workers; a fork finds nothing of its own to close
        return _Kept()

    async def _value(self, function: Function, opened: _Opened) -> Any:
        """Return what a function yields: what stands in for it, what is open, or what is opened now."""
        held: Resources | _Override = self
        for override in self._overrides[::-1]:
            if override.function == function:
                return override.value
            if held is self and override.function in _all_needed(function):
                held = override
        if self._scopes.get(function) != "process":
            return await self._open(function, opened)
        if _is_async(function):
            on_loop = held.loop()
            if function in on_loop.values or opened is on_loop:
                return await self._open(function, on_loop)
            async with on_loop.lock:
                return await self._open(function, on_loop)
        kept = held.process()
        found = kept.values.get(function, self)
        if found is not self:
            return found
        if opened.may_wait:  # the loop goes on meanwhile
            return await asyncio.to_thread(self._open_in_process, function, kept)
        return self._open_in_process(function, kept)

    def _open_in_process(self, function: Function, kept: _Kept) -> Any:
        with self._locks[function]:
            return _completed(self._open(function, kept))

    async def _open(self, function: Function, opened: _Opened) -> Any:
        if function in opened.values:
            return opened.values[function]
        needed = {name: await self._value(other, opened) for name, other in dependencies_of(function).items()}
        made = _context(function)(**needed)
        if inspect.iscoroutinefunction(function):
            made = await made
        if _is_async(function) and isinstance(made, AbstractAsyncContextManager):
            made = await opened.entering(function).enter_async_context(made)
        elif isinstance(made, AbstractContextManager):
            made = opened.entering(function).enter_context(made)
        opened.values[function] = made
        return made


@cache
def _all_needed(function: Function) -> frozenset[Function]:
    """Return all functions on which one depends, and those on which they do."""
    needed = dependencies_of(function).values()
    return frozenset(needed).union(*map(_all_needed, needed))


def _context(function: Function) -> Function:
    if inspect.isgeneratorfunction(function):
        return contextmanager(function)
    return asynccontextmanager(function) if inspect.isasyncgenfunction(function) else function


def _is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(inspect.unwrap(function))


def _check(function: Function) -> None:
    """Refuse asynchronous dependencies of what is not asynchronous."""
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
