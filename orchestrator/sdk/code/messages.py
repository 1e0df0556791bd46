"""Methods of workflow classes that handle messages, by which callers name them: `handle.query(Order.total)`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload
from uuid import UUID, uuid5

from orchestrator.domain.tasks.task import TaskError, error_text
from orchestrator.errors import (
    HANDLER_ERRORS,
    InvalidArguments,
    InvalidTask,
    InvalidWorkflow,
    OrchestratorError,
    UnknownHandler,
    WrongState,
)
from orchestrator.sdk.code.known_handlers import WorkflowSignature
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.values.payload import decode_value, encode_call
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.sealing import legible

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W", contravariant=True)


class MessageMethod(Generic[W, P, T]):
    """A method of class `W` that handles messages of its name; `T` is what a call of it returns."""

    what = ""
    owner: type = object
    """The class whose method it is."""

    def __init__(self, function: Callable[Concatenate[W, P], T]) -> None:
        decorator = f"@workflow.{self.what.lower()}"
        if not callable(function):
            raise InvalidWorkflow(
                f"{decorator}: expected a method, found {function!r:.100}. A message has the name of its method: write "
                f"{decorator} without brackets."
            )
        other = sys._getframe(2).f_locals.get(function.__name__)  # the body of the class, which would drop it
        if isinstance(other, MessageMethod):
            raise InvalidWorkflow(
                f"{decorator}: the class has a {other.what.lower()} {other.name!r} already. Give the method another "
                f"name."
            )
        self.__doc__ = function.__doc__
        self.name: str = function.__name__
        """The name of the message."""
        self.function: Callable[..., T] = function

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner

    def __repr__(self) -> str:
        return f"<{self.what.lower()} {self.owner.__qualname__}.{self.name}>"

    @functools.cached_property
    def signature(self) -> Signature:
        """What a call must look like; read late, for an annotation may name what is defined below."""
        return Signature(self.name, self.function, what=self.what, leading=1)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, T]: ...

    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else self.function.__get__(instance, owner)


class SignalMethod(MessageMethod[W, P, T]):
    """A method that takes signals."""

    what = "Signal"


class QueryMethod(MessageMethod[W, P, T]):
    """A method that answers queries."""

    what = "Query"


class UpdateMethod(MessageMethod[W, P, T], Generic[W, P, T, R]):
    """A method that answers updates, with a value of type `R`."""

    what = "Update"
    check: Callable[..., object] | None = None
    """The validator."""

    def validator(self, function: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
        """Let a method refuse updates before they are handled, by raising: `@add.validator`."""
        self.check = function
        return function


def signal(function: Callable[Concatenate[W, P], T], /) -> SignalMethod[W, P, T]:
    """Let a method take the signals of its name, with one argument or none. If it raises, the run fails."""
    return SignalMethod(function)


def query(function: Callable[Concatenate[W, P], T], /) -> QueryMethod[W, P, T]:
    """Let a method answer the queries of its name. It may look, but change nothing."""
    return QueryMethod(function)


@overload
def update(
    function: Callable[Concatenate[W, P], Coroutine[Any, Any, R]], /
) -> UpdateMethod[W, P, Coroutine[Any, Any, R], R]: ...
@overload
def update(function: Callable[Concatenate[W, P], R], /) -> UpdateMethod[W, P, R, R]: ...


def update(function: Callable[..., Any], /) -> UpdateMethod[Any, ..., Any, Any]:
    """Let a method answer the updates of its name."""
    return UpdateMethod(function)


def name_of(
    kind: type[MessageMethod[Any, ..., Any]], message: str | MessageMethod[Any, ..., Any], to: WorkflowSignature | None
) -> str:
    """Return the name of a message, which may be given by its method.

    A method of another kind, or of a class that does not run the workflow, is refused before anything is sent.
    """
    what = kind.what.lower()
    if isinstance(message, str):
        name = message
    elif not isinstance(message, kind):
        article = "an" if kind is UpdateMethod else "a"
        raise UnknownHandler(
            f"Expected {article} {what} by its name or its method, found {message!r}. Nothing was sent."
        )
    elif to is None or any(issubclass(one, message.owner) for one in to.classes()):
        name = message.name
    else:
        runs = ", ".join(one.__qualname__ for one in to.classes()) or "a function, whose messages go by their names"
        raise UnknownHandler(f"Workflow {to.name!r} has no {message!r}: it is {runs}. Nothing was sent.")
    if to is not None and kind is UpdateMethod:
        to.check_update(name)
    elif to is not None and kind is SignalMethod and isinstance(message, str):
        to.check_signal(name)
    return name


def signal_value(
    signal: str | SignalMethod[Any, ..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    limit: int,
    to: WorkflowSignature | None = None,
) -> tuple[str, Any]:
    """Return the name and the value of a signal; InvalidArguments if that does not fit the method."""
    name = name_of(SignalMethod, signal, to)
    if isinstance(signal, str):
        return name, _value(*args, **kwargs)
    if list(args) == [None] and not signal.signature.names:
        args = []  # it takes no value
    try:
        signal.signature.check(args, kwargs)
        signal.signature.check_types(args, kwargs, encode_call(signal.name, args, kwargs, limit, "signal"))
    except InvalidTask as error:
        raise InvalidArguments(f"{error} Nothing was sent.") from None
    return name, next(iter(signal.signature.named(args, kwargs).values()), None)


def _value(value: Any = None) -> Any:
    return value


def answer_of(message: str | QueryMethod[Any, ..., Any] | UpdateMethod[Any, ..., Any, Any], data: bytes) -> Any:
    """Return an answer; that to a method in the type of its annotation."""
    return restored(message, decode_value(data))


def restored(message: str | QueryMethod[Any, ..., Any] | UpdateMethod[Any, ..., Any, Any], value: Any) -> Any:
    """Return the value of an answer; that to a method in the type of its annotation."""
    return value if isinstance(message, str) else message.signature.restore_result(value)


def raised(what: str, error: TaskError) -> OrchestratorError:
    """Return the exception for a query or an update that has no answer."""
    if error.kind == WrongState.__name__:
        found: OrchestratorError = WrongState(error.message)
        found.data = error.attributes
        return found
    says_all = error.phase in ("unknown", "arguments") and error.kind.endswith(InvalidTask.__name__)
    text = error.message if says_all else f"{what} failed: {error_text(error.kind, error.message)}"
    found = HANDLER_ERRORS.get(error.phase, OrchestratorError)(text)
    found.data = error.attributes
    return found


def request_id(run: bytes, what: str, id: str) -> bytes:
    """Return the id of a signal or update whose sender has one of its own."""
    return uuid5(UUID(bytes=run), f"{what} {id}").bytes


def next_try(request: bytes) -> bytes:
    """Return the id of an update that is sent again under the id of one that was refused, and so not applied."""
    return uuid5(UUID(bytes=request), "again").bytes


def legibly(steps: Steps[bytes]) -> Steps[bytes]:
    """Take steps; an error of theirs says of what is sealed with a key that is not here that it is sealed."""
    try:
        return (yield from steps)
    except OrchestratorError as error:
        error.args = tuple(legible(part) if isinstance(part, str) else part for part in error.args)
        raise
