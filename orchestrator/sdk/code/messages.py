"""Message methods of workflow classes, by which callers can name messages: `handle.query(Order.total)`."""

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
from orchestrator.sdk.checks import check_label, check_message
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
    """A method of class `W` that handles the messages of its name. `T` is its return type."""

    what = ""
    owner: type = object
    """The class that defines the method."""

    def __init__(self, function: Callable[Concatenate[W, P], T]) -> None:
        decorator = f"@workflow.{self.what.lower()}"
        if not callable(function):
            raise InvalidWorkflow(
                f"{decorator}: expected a method, found {function!r:.100}. A message has the name of its method: write "
                f"{decorator} without brackets."
            )
        other = sys._getframe(2).f_locals.get(function.__name__)  # the class body, which would drop the other one
        if isinstance(other, MessageMethod):
            raise InvalidWorkflow(
                f"{decorator}: the class has a {other.what.lower()} {other.name!r} already. Give the method a "
                "different name."
            )
        self.__doc__ = function.__doc__
        self.name: str = function.__name__
        self.function: Callable[..., T] = function

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner

    def __repr__(self) -> str:
        return f"<{self.what.lower()} {self.owner.__qualname__}.{self.name}>"

    @functools.cached_property
    def signature(self) -> Signature:
        """The signature of a call. It is read late, because annotations may name classes defined below."""
        return Signature(self.name, self.function, what=self.what, leading=1)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, T]: ...

    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else self.function.__get__(instance, owner)


class SignalMethod(MessageMethod[W, P, T]):
    """A method that handles signals."""

    what = "Signal"


class QueryMethod(MessageMethod[W, P, T]):
    """A method that answers queries."""

    what = "Query"


class UpdateMethod(MessageMethod[W, P, T], Generic[W, P, T, R]):
    """A method that answers updates with a value of type `R`."""

    what = "Update"
    check: Callable[..., object] | None = None

    def validator(self, function: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
        """Decorate a validator, which refuses updates before they are handled by raising: `@add.validator`."""
        self.check = function
        return function


def signal(function: Callable[Concatenate[W, P], T], /) -> SignalMethod[W, P, T]:
    """Decorate the handler of a signal: a method with one argument or none. If it raises, the run fails."""
    return SignalMethod(function)


def query(function: Callable[Concatenate[W, P], T], /) -> QueryMethod[W, P, T]:
    """Decorate the handler of a query. It may read the workflow, but change nothing."""
    return QueryMethod(function)


@overload
def update(
    function: Callable[Concatenate[W, P], Coroutine[Any, Any, R]], /
) -> UpdateMethod[W, P, Coroutine[Any, Any, R], R]: ...
@overload
def update(function: Callable[Concatenate[W, P], R], /) -> UpdateMethod[W, P, R, R]: ...


def update(function: Callable[..., Any], /) -> UpdateMethod[Any, ..., Any, Any]:
    """Decorate the handler of an update."""
    return UpdateMethod(function)


def name_of(
    kind: type[MessageMethod[Any, ..., Any]],
    message: str | MessageMethod[Any, ..., Any],
    target: WorkflowSignature | None,
) -> str:
    """Return the name of a message given by name or method.

    Raise UnknownHandler for a method of another type, or of a class that does not run the workflow.
    """
    what = kind.what.lower()
    if isinstance(message, str):
        name = check_message(what, message)
    elif not isinstance(message, kind):
        article = "an" if kind is UpdateMethod else "a"
        raise UnknownHandler(
            f"Expected {article} {what} given by its name or its method, found {message!r}. Nothing was sent."
        )
    elif target is None or any(issubclass(item, message.owner) for item in target.classes()):
        name = message.name
    else:
        runs = (
            ", ".join(item.__qualname__ for item in target.classes())
            or "a function, whose messages are addressed by name"
        )
        raise UnknownHandler(f"Workflow {target.name!r} has no {message!r}: it is {runs}. Nothing was sent.")
    if target is not None and kind is UpdateMethod:
        target.check_update(name)
    elif target is not None and kind is SignalMethod and isinstance(message, str):
        target.check_signal(name)
    return name


def signal_value(
    signal: str | SignalMethod[Any, ..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    limit: int,
    target: WorkflowSignature | None = None,
) -> tuple[str, Any]:
    """Return the name and value of a signal. Raise InvalidArguments if they do not fit its method."""
    name = name_of(SignalMethod, signal, target)
    if isinstance(signal, str):
        if len(args) > 1 or not {*kwargs} <= ({"value"} if not args else set()):
            raise InvalidArguments(
                f"Signal {name!r}: expected one value or none, found {len(args)} and the names {sorted(kwargs)}. "
                "Pass several as a list or an object. Nothing was sent."
            )
        return name, next(iter([*args, *kwargs.values()]), None)
    if list(args) == [None] and not signal.signature.names:
        args = []  # the method takes no value
    try:
        signal.signature.check(args, kwargs)
        signal.signature.check_types(args, kwargs, encode_call(signal.name, args, kwargs, limit, "signal"))
    except InvalidTask as error:
        raise InvalidArguments(f"{error} Nothing was sent.") from None
    return name, next(iter(signal.signature.named(args, kwargs).values()), None)


def answer_of(message: str | QueryMethod[Any, ..., Any] | UpdateMethod[Any, ..., Any, Any], data: bytes) -> Any:
    """Decode an answer, using the return annotation if the message is a method."""
    return restored(message, decode_value(data))


def restored(message: str | QueryMethod[Any, ..., Any] | UpdateMethod[Any, ..., Any, Any], value: Any) -> Any:
    """Convert an answer's value, using the return annotation if the message is a method."""
    return value if isinstance(message, str) else message.signature.restore_result(value)


def raised(what: str, error: TaskError) -> OrchestratorError:
    if error.kind == WrongState.__name__:
        exception: OrchestratorError = WrongState(error.message)
        exception.data = error.attributes
        return exception
    is_complete = error.phase in ("unknown", "arguments") and error.kind.endswith(InvalidTask.__name__)
    text = error.message if is_complete else f"{what} failed: {error_text(error.kind, error.message)}"
    exception = HANDLER_ERRORS.get(error.phase, OrchestratorError)(text)
    exception.data = error.attributes
    return exception


def request_id(run: bytes, what: str, id: str) -> bytes:
    """Return the internal id of a signal or update that was sent with an id of the sender's own."""
    return uuid5(UUID(bytes=run), f"{what} {check_label('message id', id)}").bytes


def next_try(request: bytes) -> bytes:
    """Return the id for sending an update again after it was refused, and so not applied."""
    return uuid5(UUID(bytes=request), "again").bytes


def with_legible_errors(steps: Steps[bytes]) -> Steps[bytes]:
    """Run steps. In their error messages, replace undecryptable values by a note that they are encrypted."""
    try:
        return (yield from steps)
    except OrchestratorError as error:
        error.args = tuple(legible(part) if isinstance(part, str) else part for part in error.args)
        raise
