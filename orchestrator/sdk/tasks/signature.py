"""The signature of a task: the check of calls, and the conversion of arguments to the annotated types."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.errors import InvalidTask, PayloadError, did_you_mean
from orchestrator.sdk.tasks.context import TaskContext, current_task
from orchestrator.sdk.values.conversion import accepted_types, can_convert, conversion_problem, convert, unchanged_types
from orchestrator.sdk.values.payload import Payload, decode_call, decode_value, encode_value, is_payload, loaded

_CONVERSION_ERRORS = (msgspec.ValidationError, TypeError, ValueError)
"""Errors of data that does not fit a type, including those of pydantic."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signature:
    """Checks calls in the caller, and converts their arguments in the worker."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        what: str = "Task",
        leading: int = 0,
        options: Collection[str] = (),
    ) -> None:
        """Read the signature of a function. Callers do not pass the first `leading` parameters.

        If a call passes one of the `options` as an argument, the error explains how to set an option.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidTask(
                f"{what} {name!r}: expected a function that returns its result, found a generator, which has `yield`: "
                f"a call of it would run nothing. Return a list."
            )
        self.name = name
        self._options = options
        self._what = what
        hints = _hints(function)
        parameters = list(inspect.signature(function).parameters.values())[leading:]
        self._context = next(((index, p) for index, p in enumerate(parameters) if _is_context(hints.get(p.name))), None)
        self.wants_context = self._context is not None
        """Whether the function has a parameter for the `TaskContext`."""
        visible = [p for p in parameters if not _is_context(hints.get(p.name))]
        self._signature = inspect.Signature(visible)
        for named in (*(p.name for p in visible), "return"):
            if (reason := conversion_problem(hints.get(named, Any))) is not None:
                raise InvalidTask(
                    f"{what} {name!r}, {'its result' if named == 'return' else f'argument {named!r}'}: data cannot be "
                    f"turned into {_describe(hints[named])}: {reason}."
                )
        self._kinds = {p.name: hints[p.name] for p in visible if can_convert(hints.get(p.name, Any))}
        self.result_label = f"The result of {what.lower()} {name!r}"
        """How errors refer to the result of the function."""
        self._payload_parameters = frozenset(p.name for p in visible if is_payload(hints.get(p.name)))
        self.wants_payload = bool(self._payload_parameters)
        """Whether the function has a parameter annotated with `Payload`, whose value is not loaded."""
        self._result = hints["return"] if can_convert(hints.get("return", Any)) else Any
        self._unchanged = {name: unchanged_types(kind) for name, kind in self._kinds.items()}
        self._accepted = {name: accepted_types(kind) for name, kind in self._kinds.items()}
        self._accepted_results = accepted_types(self._result)
        positional = [p for p in visible if p.kind in _POSITIONAL]
        self._positional = [p.name for p in positional]
        self._accepted_by_position = [self._accepted.get(name) for name in self._positional]
        self._unchanged_by_position = [self._unchanged.get(name) for name in self._positional]
        self._arities = _arities(visible)
        self._star = next((p.name for p in visible if p.kind is p.VAR_POSITIONAL), None)
        self._double_star = next((p.name for p in visible if p.kind is p.VAR_KEYWORD), None)

    def check(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Refuse a call whose arguments do not match the parameters of the function."""
        count = len(arguments)
        if count < len(self._arities):
            missing, possible = self._arities[count]
            if (missing <= keywords.keys() <= possible) if keywords else not missing:
                return
        try:
            self._signature.bind(*arguments, **keywords)
        except TypeError as error:
            parameters = self._signature.parameters.values()
            public = [p for p in parameters if p.kind is not p.KEYWORD_ONLY or p.name[0] != "_"]
            raise InvalidTask(
                f"{self._what} {self.name!r}: {error}.{self._advice(keywords)} Expected {self.name}"
                f"{inspect.Signature(public)}."
            ) from None

    def _advice(self, keywords: Mapping[str, Any]) -> str:
        """Return a hint about an unknown keyword argument; empty if there is none."""
        parameters = self._signature.parameters
        unknown = None if self._double_star else next((name for name in keywords if name not in parameters), None)
        if not isinstance(unknown, str):
            return ""
        if unknown in self._options:
            return f" That is an option: give it with .options({unknown}=…)."
        return did_you_mean(unknown, parameters)

    def check_types(self, arguments: Sequence[Any], keywords: Mapping[str, Any], payload: bytes) -> None:
        """Refuse a call whose arguments the worker cannot convert to the annotated types.

        For simple types, a look at the types of the arguments is enough; otherwise, decode the payload as the worker
        does.
        """
        if self._kinds and not (
            self._arities and _have_types(self._accepted_by_position, self._accepted, arguments, keywords)
        ):
            self.restore(*decode_call(payload))

    def check_keys(self, options: Mapping[str, Any]) -> None:
        """Refuse a key that is a parameter's name, which all calls would share, and an unsuitable key function."""
        for option in ("unique_key", "concurrency_key"):
            key = options.get(option)
            if isinstance(key, str) and key in self._signature.parameters:
                rest = ", **_" if len(self._signature.parameters) > 1 else ""
                raise InvalidTask(
                    f"{self._what} {self.name!r}, option {option}: expected a function of the arguments, found "
                    f"{key!r}, the name of an argument, which as a string is one key for all calls. Write "
                    f"{option}=lambda {key}{rest}: {key}."
                )
        self.check_key_functions(options)

    def check_key_functions(self, options: Mapping[str, Any]) -> None:
        """Refuse a function that computes an option but cannot be called with the task's arguments by keyword."""
        for option in ("unique_key", "concurrency_key", "weight"):
            if not callable(function := options.get(option)):
                continue
            try:
                target = inspect.signature(function)
            except (TypeError, ValueError):  # of some that are written in C
                continue
            names = [name for name in self.names if name != self._double_star]
            try:
                (target.bind_partial if self._double_star else target.bind)(**dict.fromkeys(names))
            except TypeError as error:
                first = next((name for name in target.parameters if name in names), names[0] if names else "")
                form = f"lambda {first}, **_: {first}" if first else "lambda: 'key'"
                raise InvalidTask(
                    f"{self._what} {self.name!r}, option {option}: expected a function that can be called with the "
                    f"task's arguments by name ({', '.join(names) or 'none'}), found one with the parameters {target}: "
                    f"{error}. Write {option}={form}."
                ) from None

    def check_partial(self, arguments: Sequence[Any], keywords: Mapping[str, Any], payload: bytes) -> None:
        """Refuse a call that is invalid for any value of its first argument, which is not known yet."""
        self.check((None, *arguments), keywords)
        if self._kinds and not (
            self._arities and _have_types(self._accepted_by_position[1:], self._accepted, arguments, keywords)
        ):
            positional, by_name = decode_call(payload)
            for index, value in enumerate(positional, 1):
                self._restore(self._positional[index] if index < len(self._positional) else self._star, value)
            for name, value in by_name.items():
                self.check_value(name, value)

    @property
    def names(self) -> list[str]:
        return list(self._signature.parameters)

    def check_value(self, name: str, value: Any) -> None:
        """Refuse a keyword argument, as data, that the worker cannot convert to the annotated type."""
        self._restore(name if name in self._signature.parameters else self._double_star, value)

    def check_result(self, value: Any, data: bytes) -> None:
        """Refuse a result that a caller cannot convert to the annotated type."""
        if self._result is not Any and type(value) not in self._accepted_results:
            self.restore_result(decode_value(data))

    def named(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, including defaults."""
        if not keywords and len(arguments) == len(self._positional) == len(self._signature.parameters):
            return dict(zip(self._positional, arguments, strict=True))  # binding takes ten times as long
        bound = self._signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        named = dict(bound.arguments)
        extra = named.pop(self._double_star, {}) if self._double_star else {}
        return {**named, **extra}

    def by_name(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the `*args` of a call, and all its other arguments by name, including defaults."""
        bound = self._signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        named = dict(bound.arguments)
        extra = named.pop(self._double_star, {}) if self._double_star else {}
        return named.pop(self._star, ()) if self._star else (), {**named, **extra}

    def data_by_name(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any], limit: int
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Do the same as `by_name` with encoded arguments: encode the defaults, and keep a call by name as it is."""
        if self._signature.parameters.keys() - {self._star, self._double_star} <= keywords.keys():
            return arguments, keywords
        self.check(arguments, keywords)
        present = {*keywords, *self._positional[: len(arguments)]}
        rest, named = self.by_name(arguments, keywords)
        what = f"A default of {self._what.lower()} {self.name!r}"
        return rest, {
            name: value if name in present else decode_value(encode_value(value, what, limit))
            for name, value in named.items()
        }

    def normal(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return a call in normal form, so that equal calls compare equal: positional where possible."""
        bound = self._signature.bind(*arguments, **keywords)
        return bound.args, bound.kwargs

    @property
    def takes(self) -> tuple[str, ...] | None:
        """The names of the parameters; None if the function has `**kwargs`."""
        if self._double_star is not None:
            return None
        return tuple(name for name in self._signature.parameters if name != self._star)

    def pick(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those values for which the function has a parameter; all of them if it has `**kwargs`."""
        if self._double_star is not None:
            return dict(values)
        parameters = self._signature.parameters
        return {name: value for name, value in values.items() if name in parameters and name != self._star}

    def load(self, arguments: list[Any], keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Load values from the payload store, except for parameters annotated with `Payload`."""
        names = self._positional
        return [
            self._load(names[index] if index < len(names) else self._star, value)
            for index, value in enumerate(arguments)
        ], {name: self._load(name, value) for name, value in keywords.items()}

    def _load(self, name: str | None, value: Any) -> Any:
        if name not in self._payload_parameters:
            return loaded(value)
        return value if value is None or isinstance(value, Payload) else Payload(value)

    def restore(self, arguments: list[Any], keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Convert decoded arguments to the annotated types."""
        self.check(arguments, keywords)
        if not self._kinds or (
            self._arities and _have_types(self._unchanged_by_position, self._unchanged, arguments, keywords)
        ):
            return arguments, keywords
        names = self._positional
        restored = [
            self._restore(names[index] if index < len(names) else self._star, value)
            for index, value in enumerate(arguments)
        ]
        parameters = self._signature.parameters
        return restored, {
            name: self._restore(name if name in parameters else self._double_star, value)
            for name, value in keywords.items()
        }

    def plain_defaults(self, beside: int = 0) -> dict[str, Any]:
        """Return the defaults that are plain data, of all parameters after the first `beside`."""
        parameters = list(self._signature.parameters.values())[beside:]
        defaults = ((p.name, p.default) for p in parameters if p.default is not p.empty)
        return {name: value for name, value in defaults if isinstance(value, (str, int, float, bool, type(None)))}

    def add_context(self, context: TaskContext, arguments: list[Any], keywords: dict[str, Any]) -> None:
        """Insert the context into the arguments."""
        assert self._context is not None
        index, parameter = self._context
        if parameter.kind in _POSITIONAL and index <= len(arguments):
            arguments.insert(index, context)
        else:
            keywords[parameter.name] = context

    def with_context(
        self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Add a context to the arguments of a plain call, if the function requires one and the caller passed none."""
        values = (*arguments, *keywords.values())
        needed = self._context is not None and self._context[1].default is inspect.Parameter.empty
        if not needed or any(isinstance(value, TaskContext) for value in values):
            return arguments, keywords
        positional, named = list(arguments), dict(keywords)
        self.add_context(current_task() or TaskContext(task_name=name), positional, named)
        return positional, named

    def restore_result(self, value: Any) -> Any:
        """Convert a decoded result to the annotated type."""
        try:
            return convert(value, self._result)
        except _CONVERSION_ERRORS as error:
            problem = f"does not match its annotation: expected {_describe(self._result)}: {_reason(error)}."
            payload_error = PayloadError(f"{self.result_label} {problem}")
            payload_error.data = {"returned": value}
            raise payload_error from error

    def convert_stored(self, value: Any) -> Any:
        """Convert the stored result of a task. Accept None for any type: it means that no result was stored."""
        try:
            return self.restore_result(value)
        except PayloadError:
            if value is None or (isinstance(value, bytes) and self._result is types.NoneType):
                return value  # written with ctx.open_output()
            raise

    def _restore(self, name: str | None, value: Any) -> Any:
        kind = self._kinds.get(name, Any) if name and name not in self._payload_parameters else Any
        try:
            return convert(value, kind)
        except _CONVERSION_ERRORS as error:
            raise InvalidTask(
                f"{self._what} {self.name!r}, argument {name!r}: expected {_describe(kind)}: {_reason(error)}."
            ) from error


_Types = frozenset[type]


def _have_types(
    by_position: Sequence[_Types | None],
    by_name: Mapping[str, _Types],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> bool:
    """Return whether each argument of a checked call has one of the types listed for its parameter.

    Arguments of parameters without a list may have any type.
    """
    for value, types_ in zip(arguments, by_position):  # noqa: B905  # half of the time goes into `strict`
        if types_ is not None and type(value) not in types_:
            return False
    if keywords:
        for name, value in keywords.items():
            if (types_ := by_name.get(name)) is not None and type(value) not in types_:
                return False
    return True


def _arities(parameters: Sequence[inspect.Parameter]) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Return the required and the possible keywords for each number of positional arguments.

    Return an empty list for a function with `*args` or `**kwargs`.
    """
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return []
    positional = sum(p.kind in _POSITIONAL for p in parameters)  # they precede all others
    return [
        (
            frozenset(p.name for p in parameters[count:] if p.default is p.empty),
            frozenset(p.name for p in parameters[count:] if p.kind is not p.POSITIONAL_ONLY),
        )
        for count in range(positional + 1)
    ]


def return_type(function: Callable[..., Any]) -> Any:
    kind = _hints(function).get("return", Any)
    return kind if can_convert(kind) else Any


def _is_context(kind: Any) -> bool:
    """Return whether an annotation is `TaskContext`, or `TaskContext | None`."""
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return set(typing.get_args(kind)) == {TaskContext, types.NoneType}
    return kind is TaskContext


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that cannot be resolved here leave arguments as plain data


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).removesuffix(".")


def _describe(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)
