"""Calls of tasks that are put together before anything runs: one after another, side by side, over many items.

    chain(fetch.s(url), group(parse.s("html"), parse.s("text")), store.s(table="pages")).start().result()

A part with `.s(…)` is given the result of the part before it as its first argument; one with `.si(…)` is not. Here
stands what a composition is; `sdk/dag/composing.py` makes a definition of it, and starts a run of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from orchestrator.errors import InvalidTask, InvalidWorkflow, OrchestratorError
from orchestrator.sdk.checks import shown
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

MOST_NESTED = 100
"""Chains and groups within each other: each group may be a level of child runs, and each takes a part of the stack."""
Arguments = tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""The arguments of one call: all positional, or all by name."""


class Composition(Generic[O_co]):
    """Calls that are put together: it takes the result of what comes before it, and comes to a result itself."""

    _depth = 0
    """Chains and groups within each other, itself included."""

    @property
    def _client(self) -> Client:
        return next(self._calls()).task._client

    def _calls(self) -> Iterator[Call[Any]]:
        """Yield the calls in it, in order."""
        raise NotImplementedError

    def _restored(self, value: Any) -> Any:
        """Return a result in the types that its tasks say; an error in the place of one stays."""
        raise NotImplementedError

    def _like(self, other: Composition[Any]) -> bool:
        """Say whether it differs from another in nothing but arguments, and numbers of items."""
        raise NotImplementedError

    def start(
        self, *, name: str | None = None, key: str | None = None, tags: Sequence[str] = (), on_success: bool = False
    ) -> CompositionHandle[O_co]:
        """Start a run of it, which is durable when this returns; inside a task, the scheduler starts it.

        `name` is what the run is called. A second start with the same `key` returns the first run. Runs are found by
        their `tags`. Inside a task, `on_success` lets it exist only if that succeeds, and so exactly once.
        """
        if self._depth > MOST_NESTED:
            raise InvalidWorkflow(
                f"The composition has {self._depth:,} chains and groups within each other, and at most {MOST_NESTED} "
                f"are allowed. Start the inner ones from a task, or write a workflow as code."
            )
        first = next(self._calls(), None)
        if first is None:
            raise InvalidWorkflow(
                "A composition of nothing cannot be started: it names no task, and so no application. Give it a task, "
                "such as fetch.s(url); fetch.map([]) comes to an empty list."
            )
        run: CompositionHandle[O_co] = first.task._client.composer(self, name, key, tags, on_success)
        return run

    astart = async_variant(start)

    def __or__(self, other: Composition[T]) -> Chain[T]:
        return Chain([self, other])


class Composable(Protocol):
    """The task of a call, as far as it matters before it is started."""

    name: str
    _client: Client
    _call_options: Any
    _signature: Signature


class Call(Composition[O_co]):
    """One call of a task, perhaps without its first argument: `resize.s(width=50)`."""

    def __init__(
        self, task: Composable, args: Sequence[Any], kwargs: Mapping[str, Any], *, immutable: bool = False
    ) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.immutable = immutable
        """It is not given the result of the part before it."""

    def __repr__(self) -> str:
        given = [*map(shown, self.args), *(f"{name}={shown(value)}" for name, value in self.kwargs.items())]
        return f"{self.task.name}.{'si' if self.immutable else 's'}({', '.join(given)})"

    def _calls(self) -> Iterator[Call[Any]]:
        yield self

    def _restored(self, value: Any) -> Any:
        return value if isinstance(value, OrchestratorError) else self.task._signature.restore_kept(value)

    def _like(self, other: Composition[Any]) -> bool:
        if not isinstance(other, Call) or (self.immutable, len(self.args)) != (other.immutable, len(other.args)):
            return False
        is_same = self.task is other.task or (
            self.task.name == other.task.name and self.task._call_options == other.task._call_options
        )
        return is_same and self.kwargs.keys() == other.kwargs.keys()


class Chain(Composition[O_co]):
    """Parts that run one after another."""

    def __init__(self, parts: Iterable[Composition[Any]]) -> None:
        self.parts: list[Composition[Any]] = []
        for part in _checked("chain", parts):
            self.parts += part.parts if isinstance(part, Chain) else [part]
        self._depth = _deeper(self.parts)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.parts))})"

    def _calls(self) -> Iterator[Call[Any]]:
        for part in self.parts:
            yield from part._calls()

    def _restored(self, value: Any) -> Any:
        return self.parts[-1]._restored(value)

    def _like(self, other: Composition[Any]) -> bool:
        return (
            isinstance(other, Chain)
            and len(self.parts) == len(other.parts)
            and all(one._like(two) for one, two in zip(self.parts, other.parts, strict=True))
        )


class Group(Composition[list[T]]):
    """Parts that run side by side; its result is the list of theirs, in order."""

    def __init__(self, parts: Iterable[Composition[T]]) -> None:
        self.parts: Sequence[Composition[T]] = list(_checked("group", parts))
        self._depth = _deeper(self.parts)

    def __repr__(self) -> str:
        return f"group({', '.join(map(repr, self.parts[:10]))}{', …' if len(self.parts) > 10 else ''})"

    @cached_property
    def _is_uniform(self) -> bool:
        """Say whether its parts differ in nothing but arguments: then they are the items of one fan-out."""
        first = self._first
        return first is not None and any(first._calls()) and all(first._like(part) for part in self.parts)

    @property
    def _first(self) -> Composition[T] | None:
        """The part that stands for all if they are alike."""
        return self.parts[0] if self.parts else None

    def _calls(self) -> Iterator[Call[Any]]:
        for part in self.parts:
            yield from part._calls()

    def _restored(self, value: Any) -> Any:
        if isinstance(value, OrchestratorError):
            return value
        return [part._restored(one) for part, one in zip(self.parts, value, strict=True)]

    def _like(self, other: Composition[Any]) -> bool:
        if not isinstance(other, Group) or self._is_uniform != other._is_uniform:
            return False
        if self._first is not None and other._first is not None and self._is_uniform:
            return self._first._like(other._first)
        return len(self.parts) == len(other.parts) and all(
            one._like(two) for one, two in zip(self.parts, other.parts, strict=True)
        )


class Map(Group[T]):
    """Calls of one task, one for each item.

    Started by itself it is a run of many tasks, whose items are read as they are stored; within a composition it is a
    group.
    """

    _depth = 1

    def __init__(self, task: Composable, calls: Callable[[], Iterable[Arguments]]) -> None:
        self.task = task
        self.calls = calls
        """Goes through the arguments of each call."""

    def __repr__(self) -> str:
        return f"{self.task.name}.map(…)"

    @cached_property
    def parts(self) -> Sequence[Composition[T]]:  # type: ignore[override]
        """The calls, for which all items are read."""
        return [Call(self.task, *arguments_of(self.task.name, *call)) for call in enumerate(self.calls())]

    @property
    def _first(self) -> Composition[T]:
        return self.parts[0] if self.parts else Call(self.task, (), {})

    def _calls(self) -> Iterator[Call[Any]]:
        yield Call(self.task, (), {})  # the items may come only once, so they are not read to see which task it is


def _deeper(parts: Iterable[Composition[Any]]) -> int:
    return 1 + max((part._depth for part in parts), default=0)


def _checked(what: str, parts: Iterable[Any]) -> Iterator[Composition[Any]]:
    for place, part in enumerate(parts, 1):
        if not isinstance(part, Composition):
            raise InvalidWorkflow(
                f"{what}, part {place}: expected a call such as resize.s('a.png'), or a composition, found "
                f"{shown(part) if not isinstance(getattr(part, 'name', None), str) else f'{part.name} without .s(…)'}."
            )
        yield part


class Parts(Generic[P, R]):
    """What a task has for compositions."""

    name: str
    _client: Client
    _call_options: Any
    _signature: Signature

    @overload
    def s(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...
    @overload
    def s(self: Parts[Concatenate[A, Q], R], /, *args: Q.args, **kwargs: Q.kwargs) -> Call[R]: ...

    def s(self, /, *args: Any, **kwargs: Any) -> Call[R]:
        """Return a call for a composition, which is given the result of the part before it as its first argument."""
        return Call(self, args, kwargs)

    def si(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Return a call for a composition that is given nothing by the part before it."""
        return Call(self, args, kwargs, immutable=True)

    def map(self, items: Iterable[Any]) -> Map[R]:
        """Return a call for each item, which is its argument: `resize.map(paths).start().results()`."""
        return Map(self, partial(zip, _items(self.name, items)))

    def starmap(self, calls: Iterable[Arguments]) -> Map[R]:
        """Return many calls, each from a tuple of all its arguments or a mapping of named ones."""
        return Map(self, partial(iter, _items(self.name, calls)))

    def chunks(self, items: Iterable[Any], size: int) -> Map[R]:
        """Return a call for every `size` items: the task takes a list of them."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidWorkflow(f"Task {self.name!r}, chunks: expected a size of 1 or more, found {shown(size)}.")
        return Map(self, partial(_chunks, _items(self.name, items), size))


def _chunks(items: Iterable[T], size: int) -> Iterator[tuple[list[T]]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield (chunk,)


def _items(name: str, items: Iterable[T]) -> Iterable[T]:
    if not isinstance(items, Iterable) or isinstance(items, _TEXTS):
        raise InvalidWorkflow(f"Task {name!r}: expected items to go through, found {shown(items)}.")
    return _Once(name, items) if isinstance(items, Iterator) else items


class _Once(Generic[T]):
    """Items that can be read only once, such as those of a generator: a second read would find none, or the rest."""

    def __init__(self, task: str, items: Iterator[T]) -> None:
        self._task = task
        self._items: Iterator[T] | None = items

    def __iter__(self) -> Iterator[T]:
        items, self._items = self._items, None
        if items is None:
            raise InvalidWorkflow(
                f"Task {self._task!r}: the items of this map come from an iterator, and a start has read it already. "
                f"Give it a list to start it more than once, or make a new map for each start."
            )
        return items


def arguments_of(task: str, position: int, call: Arguments) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of one of many calls, positional and by name."""
    if type(call) is tuple:
        return call, _NONE
    if isinstance(call, Mapping):
        return (), call
    if isinstance(call, Sequence) and not isinstance(call, _TEXTS):  # such as a row of a query
        return tuple(call), _NONE
    raise InvalidTask(
        f"Task {task!r}, calls[{position}]: expected the arguments of one call, as a tuple or as a mapping of "
        f"named ones; found {shown(call)}. A call with a single argument is a tuple of one: (value,)."
    )


_NONE: Mapping[str, Any] = {}
_TEXTS = (str, bytes, bytearray, memoryview)
"""Sequences that are meant as one value."""


def _listed(parts: tuple[Any, ...]) -> Iterable[Any]:
    """Return the parts that were given one by one, or as one iterable."""
    if len(parts) == 1 and not isinstance(parts[0], Composition) and isinstance(parts[0], Iterable):
        return parts[0]
    return parts


Part = Composition[Any]


@overload
def chain(*parts: *tuple[*tuple[Part, ...], Composition[T]]) -> Chain[T]: ...
@overload
def chain(parts: Iterable[Part], /) -> Chain[Any]: ...


def chain(*parts: Any) -> Any:  # type: ignore[misc]  # of any length, the last of which counts
    """Run parts one after another; each is given the result of the one before it. Its result is that of the last."""
    return Chain(_listed(parts))


@overload
def group(*parts: Composition[T]) -> Group[T]: ...
@overload
def group(parts: Iterable[Composition[T]], /) -> Group[T]: ...


def group(*parts: Any) -> Any:
    """Run parts side by side; the result is the list of theirs, in order."""
    return Group(_listed(parts))


def chord(header: Part | Iterable[Part], callback: Composition[T]) -> Chain[T]:
    """Run the header side by side, then the callback once, which is given the list of all results."""
    return Chain([header if isinstance(header, Composition) else Group(header), callback])
