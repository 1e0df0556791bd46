"""Compositions: calls of tasks combined before anything runs, in sequence, in parallel, or over many items.

    chain(fetch.s(url), group(parse.s("html"), parse.s("text")), store.s(table="pages")).start().result()

A part made with `.s(…)` receives the result of the previous part as its first argument; a part made with `.si(…)` does
not. This module defines compositions; `sdk/dag/composing.py` turns a composition into a workflow definition and starts
a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from orchestrator.errors import InvalidTask, InvalidWorkflow, OrchestratorError
from orchestrator.sdk.checks import for_message
from orchestrator.sdk.client import Client
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.waiting.async_variants import async_variant

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
O_co = TypeVar("O_co", covariant=True)

MAX_NESTING = 100
"""Nesting depth, at most. Each group may add a level of child runs, and each level uses some of Python's stack."""
Arguments = tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""The arguments of one call: all positional, or all by keyword."""


class Composition(Generic[O_co]):
    """One or several task calls that can be started as a run, or combined into a larger composition."""

    _depth = 0
    """Levels of nested chains and groups, including this one."""

    @property
    def _client(self) -> Client:
        return next(self._calls()).task._client

    def _calls(self) -> Iterator[Call[Any]]:
        """Yield all task calls, in order."""
        raise NotImplementedError

    def _restored(self, value: Any) -> Any:
        """Convert a result to the annotated types of its tasks. An exception in place of a result stays."""
        raise NotImplementedError

    def _has_same_shape(self, other: Composition[Any]) -> bool:
        """Return whether another composition differs in arguments and numbers of items only."""
        raise NotImplementedError

    def start(
        self, *, name: str | None = None, key: str | None = None, tags: Sequence[str] = (), on_success: bool = False
    ) -> CompositionHandle[O_co]:
        """Start a run of the composition. The run is durable when this returns; inside a task, the scheduler starts it.

        `name` is the name of the run, and `tags` are for searching runs. A second start with the same `key` returns
        the first run. Inside a task, `on_success` starts the run only if the task succeeds, and so exactly once.
        """
        if self._depth > MAX_NESTING:
            raise InvalidWorkflow(
                f"The composition has {self._depth:,} chains and groups within each other, and at most {MAX_NESTING} "
                f"are allowed. Start the inner ones from a task, or write a workflow as code."
            )
        first = next(self._calls(), None)
        if first is None:
            raise InvalidWorkflow(
                "An empty composition cannot be started: it names no task, and so no application. Give it a "
                "task, such as fetch.s(url); fetch.map([]) comes to an empty list."
            )
        run: CompositionHandle[O_co] = first.task._client.composer(self, name, key, tags, on_success)
        return run

    astart = async_variant(start)

    def __or__(self, other: Composition[T]) -> Chain[T]:
        return Chain([self, other])


class Composable(Protocol):
    """The attributes of a task that compositions use."""

    name: str
    _client: Client
    _call_options: Any
    _signature: Signature


class Call(Composition[O_co]):
    """One call of a task, perhaps with its first argument still missing: `resize.s(width=50)`."""

    def __init__(
        self, task: Composable, args: Sequence[Any], kwargs: Mapping[str, Any], *, immutable: bool = False
    ) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.immutable = immutable
        """Whether the call ignores the result of the previous part."""

    def __repr__(self) -> str:
        arguments = [
            *map(for_message, self.args),
            *(f"{name}={for_message(value)}" for name, value in self.kwargs.items()),
        ]
        return f"{self.task.name}.{'si' if self.immutable else 's'}({', '.join(arguments)})"

    def _calls(self) -> Iterator[Call[Any]]:
        yield self

    def _restored(self, value: Any) -> Any:
        return value if isinstance(value, OrchestratorError) else self.task._signature.convert_stored(value)

    def _has_same_shape(self, other: Composition[Any]) -> bool:
        if not isinstance(other, Call) or (self.immutable, len(self.args)) != (other.immutable, len(other.args)):
            return False
        is_same = self.task is other.task or (
            self.task.name == other.task.name and self.task._call_options == other.task._call_options
        )
        return is_same and self.kwargs.keys() == other.kwargs.keys()


class Chain(Composition[O_co]):
    """Parts that run in sequence."""

    def __init__(self, parts: Iterable[Composition[Any]]) -> None:
        self.parts: list[Composition[Any]] = []
        for part in _checked("chain", parts):
            self.parts += part.parts if isinstance(part, Chain) else [part]
        self._depth = _nesting(self.parts)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.parts))})"

    def _calls(self) -> Iterator[Call[Any]]:
        for part in self.parts:
            yield from part._calls()

    def _restored(self, value: Any) -> Any:
        return self.parts[-1]._restored(value)

    def _has_same_shape(self, other: Composition[Any]) -> bool:
        return (
            isinstance(other, Chain)
            and len(self.parts) == len(other.parts)
            and all(one._has_same_shape(two) for one, two in zip(self.parts, other.parts, strict=True))
        )


class Group(Composition[list[T]]):
    """Parts that run in parallel. The result of a group is the list of the parts' results, in order."""

    def __init__(self, parts: Iterable[Composition[T]]) -> None:
        self.parts: Sequence[Composition[T]] = list(_checked("group", parts))
        self._depth = _nesting(self.parts)

    def __repr__(self) -> str:
        return f"group({', '.join(map(repr, self.parts[:10]))}{', …' if len(self.parts) > 10 else ''})"

    @cached_property
    def _is_uniform(self) -> bool:
        """Whether the parts differ in their arguments only. Then they run as the items of one fan-out."""
        first = self._first
        return first is not None and any(first._calls()) and all(first._has_same_shape(part) for part in self.parts)

    @property
    def _first(self) -> Composition[T] | None:
        """The part that represents all parts of a uniform group."""
        return self.parts[0] if self.parts else None

    def _calls(self) -> Iterator[Call[Any]]:
        for part in self.parts:
            yield from part._calls()

    def _restored(self, value: Any) -> Any:
        if isinstance(value, OrchestratorError):
            return value
        return [part._restored(one) for part, one in zip(self.parts, value, strict=True)]

    def _has_same_shape(self, other: Composition[Any]) -> bool:
        if not isinstance(other, Group) or self._is_uniform != other._is_uniform:
            return False
        if self._first is not None and other._first is not None and self._is_uniform:
            return self._first._has_same_shape(other._first)
        return len(self.parts) == len(other.parts) and all(
            one._has_same_shape(two) for one, two in zip(self.parts, other.parts, strict=True)
        )


class Map(Group[T]):
    """Calls of one task, one for each item.

    A map that is started alone is a run of many tasks, whose items are read while they are stored. A map inside a
    composition is a group.
    """

    _depth = 1

    def __init__(self, task: Composable, calls: Callable[[], Iterable[Arguments]]) -> None:
        self.task = task
        self.calls = calls
        """Returns an iterator over the arguments of all calls."""

    def __repr__(self) -> str:
        return f"{self.task.name}.map(…)"

    @cached_property
    def parts(self) -> Sequence[Composition[T]]:  # type: ignore[override]
        """The calls. This reads all items."""
        return [Call(self.task, *arguments_of(self.task.name, *call)) for call in enumerate(self.calls())]

    @property
    def _first(self) -> Composition[T]:
        return self.parts[0] if self.parts else Call(self.task, (), {})

    def _calls(self) -> Iterator[Call[Any]]:
        yield Call(self.task, (), {})  # the items may be readable only once, and are not needed to name the task


def _nesting(parts: Iterable[Composition[Any]]) -> int:
    return 1 + max((part._depth for part in parts), default=0)


def _checked(what: str, parts: Iterable[Any]) -> Iterator[Composition[Any]]:
    for position, part in enumerate(parts, 1):
        if not isinstance(part, Composition):
            raise InvalidWorkflow(
                f"{what}, part {position}: expected a call such as resize.s('a.png'), or a composition, found "
                f"{for_message(part) if not isinstance(getattr(part, 'name', None), str) else f'{part.name} without .s(…)'}."  # noqa: E501
            )
        yield part


class Parts(Generic[P, R]):
    """The methods of a task that make compositions."""

    name: str
    _client: Client
    _call_options: Any
    _signature: Signature

    @overload
    def s(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...
    @overload
    def s(self: Parts[Concatenate[A, Q], R], /, *args: Q.args, **kwargs: Q.kwargs) -> Call[R]: ...

    def s(self, /, *args: Any, **kwargs: Any) -> Call[R]:
        """Return a call for a composition. The result of the previous part becomes its first argument."""
        return Call(self, args, kwargs)

    def si(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Return a call for a composition that ignores the result of the previous part (immutable signature)."""
        return Call(self, args, kwargs, immutable=True)

    def map(self, items: Iterable[Any]) -> Map[R]:
        """Return one call for each item, with the item as its argument: `resize.map(paths).start().results()`."""
        return Map(self, partial(zip, _items(self.name, items)))

    def starmap(self, calls: Iterable[Arguments]) -> Map[R]:
        """Return one call for each tuple of positional arguments or mapping of keyword arguments."""
        return Map(self, partial(iter, _items(self.name, calls)))

    def chunks(self, items: Iterable[Any], size: int) -> Map[R]:
        """Return one call for every `size` items. The task takes a list of items."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidWorkflow(
                f"Task {self.name!r}, chunks: expected a size of 1 or more, found {for_message(size)}."
            )
        return Map(self, partial(_chunks, _items(self.name, items), size))


def _chunks(items: Iterable[T], size: int) -> Iterator[tuple[list[T]]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield (chunk,)


def _items(name: str, items: Iterable[T]) -> Iterable[T]:
    if not isinstance(items, Iterable) or isinstance(items, _SCALAR_SEQUENCES):
        raise InvalidWorkflow(f"Task {name!r}: expected items to go through, found {for_message(items)}.")
    return _Once(name, items) if isinstance(items, Iterator) else items


class _Once(Generic[T]):
    """Items that can be read only once, such as those of a generator. A second read raises InvalidWorkflow."""

    def __init__(self, task: str, items: Iterator[T]) -> None:
        self._task = task
        self._items: Iterator[T] | None = items

    def __iter__(self) -> Iterator[T]:
        items, self._items = self._items, None
        if items is None:
            raise InvalidWorkflow(
                f"Task {self._task!r}: the items of this map come from an iterator, which an earlier start has "
                "consumed. Pass a list to start the map more than once, or make a new map for each start."
            )
        return items


def arguments_of(task: str, position: int, call: Arguments) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the positional and keyword arguments of one of many calls."""
    if type(call) is tuple:
        return call, _NO_ARGUMENTS
    if isinstance(call, Mapping):
        return (), call
    if isinstance(call, Sequence) and not isinstance(call, _SCALAR_SEQUENCES):  # such as a row of a query
        return tuple(call), _NO_ARGUMENTS
    raise InvalidTask(
        f"Task {task!r}, calls[{position}]: expected the arguments of one call, as a tuple or as a mapping of "
        f"named ones; found {for_message(call)}. A call with a single argument is a tuple of one: (value,)."
    )


_NO_ARGUMENTS: Mapping[str, Any] = {}
_SCALAR_SEQUENCES = (str, bytes, bytearray, memoryview)


def _listed(parts: tuple[Any, ...]) -> Iterable[Any]:
    """Return the parts, which are passed as separate arguments or as one iterable."""
    if len(parts) == 1 and not isinstance(parts[0], Composition) and isinstance(parts[0], Iterable):
        return parts[0]
    return parts


Part = Composition[Any]


@overload
def chain(*parts: *tuple[*tuple[Part, ...], Composition[T]]) -> Chain[T]: ...
@overload
def chain(parts: Iterable[Part], /) -> Chain[Any]: ...


def chain(*parts: Any) -> Any:  # type: ignore[misc]  # any length; the last part has the type
    """Run parts in sequence, each with the result of the previous part. The result is that of the last part."""
    return Chain(_listed(parts))


@overload
def group(*parts: Composition[T]) -> Group[T]: ...
@overload
def group(parts: Iterable[Composition[T]], /) -> Group[T]: ...


def group(*parts: Any) -> Any:
    """Run parts in parallel. The result is the list of the parts' results, in order."""
    return Group(_listed(parts))


def chord(header: Part | Iterable[Part], callback: Composition[T]) -> Chain[T]:
    """Run the parts of the header in parallel, then the callback once with the list of their results."""
    return Chain([header if isinstance(header, Composition) else Group(header), callback])
