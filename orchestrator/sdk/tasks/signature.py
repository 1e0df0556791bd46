"""A task's signature: what a call must look like, and which types the worker turns arguments into."""

from __future__ import annotations

import dis
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.errors import InvalidTask, PayloadError, did_you_mean
from orchestrator.sdk.tasks.context import TaskContext, current_task
from orchestrator.sdk.values.conversion import can_convert, convert, same_types, sure_types, why_not
from orchestrator.sdk.values.payload import Payload, decode_call, decode_value, encode_value, is_payload, loaded

_MISFITS = (msgspec.ValidationError, TypeError, ValueError)
"""Errors of data that does not fit a type, pydantic's own errors included."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signature:
    """Checks calls in the caller and rebuilds them in the worker."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        what: str = "Task",
        leading: int = 0,
        options: Collection[str] = (),
    ) -> None:
        """Read a function's signature; callers do not pass the `leading` parameters.

        An option among the arguments raises an error that says where `options` are given.
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
        self._context = next(((place, p) for place, p in enumerate(parameters) if _is_context(hints.get(p.name))), None)
        self.wants_context = self._context is not None
        """The function has a parameter for its context."""
        visible = [p for p in parameters if not _is_context(hints.get(p.name))]
        self._signature = inspect.Signature(visible)
        for named in (*(p.name for p in visible), "return"):
            if (reason := why_not(hints.get(named, Any))) is not None:
                raise InvalidTask(
                    f"{what} {name!r}, {'its result' if named == 'return' else f'argument {named!r}'}: data cannot be "
                    f"turned into {_describe(hints[named])}: {reason}."
                )
        self._kinds = {p.name: hints[p.name] for p in visible if can_convert(hints.get(p.name, Any))}
        self.result_words = f"The result of {what.lower()} {name!r}"
        """The name of its result in errors."""
        self._unread = frozenset(p.name for p in visible if is_payload(hints.get(p.name)))
        self.wants_unread = bool(self._unread)
        """The function has a parameter for a value that was not read."""
        self._result = hints["return"] if can_convert(hints.get("return", Any)) else Any
        self._same = {name: same_types(kind) for name, kind in self._kinds.items()}
        self._sure = {name: sure_types(kind) for name, kind in self._kinds.items()}
        self._sure_results = sure_types(self._result)
        positional = [p for p in visible if p.kind in _POSITIONAL]
        self._positional = [p.name for p in positional]
        self._sure_by_place = [self._sure.get(name) for name in self._positional]
        self._same_by_place = [self._same.get(name) for name in self._positional]
        self._forms = _forms(visible)
        self._star = next((p.name for p in visible if p.kind is p.VAR_POSITIONAL), None)
        self._double_star = next((p.name for p in visible if p.kind is p.VAR_KEYWORD), None)

    def check(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Refuse a call that the function would refuse."""
        given = len(arguments)
        if given < len(self._forms):
            missing, possible = self._forms[given]
            if (missing <= keywords.keys() <= possible) if keywords else not missing:
                return
        try:
            self._signature.bind(*arguments, **keywords)
        except TypeError as error:
            known = self._signature.parameters.values()
            public = [one for one in known if one.kind is not one.KEYWORD_ONLY or one.name[0] != "_"]
            raise InvalidTask(
                f"{self._what} {self.name!r}: {error}.{self._advice(keywords)} Expected {self.name}"
                f"{inspect.Signature(public)}."
            ) from None

    def _advice(self, keywords: Mapping[str, Any]) -> str:
        """Say what was meant by an argument that the function does not have."""
        known = self._signature.parameters
        unknown = None if self._double_star else next((name for name in keywords if name not in known), None)
        if not isinstance(unknown, str):
            return ""
        if unknown in self._options:
            return f" That is an option: give it with .options({unknown}=…)."
        return did_you_mean(unknown, known)

    def check_types(self, arguments: Sequence[Any], keywords: Mapping[str, Any], payload: bytes) -> None:
        """Refuse a call whose arguments the worker could not turn into the annotated types.

        Types that are what they travel as are seen at once; for all others, the payload is read as the worker reads it.
        """
        if self._kinds and not (self._forms and _are_among(self._sure_by_place, self._sure, arguments, keywords)):
            self.restore(*decode_call(payload))

    def check_keys(self, options: Mapping[str, Any]) -> None:
        """Refuse the name of a parameter as a key, which would be one for all calls, and functions that do not fit."""
        for option in ("unique_key", "concurrency_key"):
            key = options.get(option)
            if isinstance(key, str) and key in self._signature.parameters:
                rest = ", **_" if len(self._signature.parameters) > 1 else ""
                raise InvalidTask(
                    f"{self._what} {self.name!r}, option {option}: expected a function of the arguments, found "
                    f"{key!r}, the name of an argument, which as a text is one key for all calls. "
                    f"Write {option}=lambda {key}{rest}: {key}."
                )
        self.check_key_functions(options)

    def check_key_functions(self, options: Mapping[str, Any]) -> None:
        """Refuse a function that computes an option, but cannot be called with the arguments by name."""
        for option in ("unique_key", "concurrency_key", "weight"):
            if not callable(function := options.get(option)):
                continue
            try:
                wanted = inspect.signature(function)
            except (TypeError, ValueError):  # of some that are written in C
                continue
            given = [name for name in self.names if name != self._double_star]
            try:
                (wanted.bind_partial if self._double_star else wanted.bind)(**dict.fromkeys(given))
            except TypeError as error:
                first = next((name for name in wanted.parameters if name in given), given[0] if given else "")
                form = f"lambda {first}, **_: {first}" if first else "lambda: 'key'"
                raise InvalidTask(
                    f"{self._what} {self.name!r}, option {option}: expected a function that can be called with the "
                    f"task's arguments by name ({', '.join(given) or 'none'}), found one with the parameters {wanted}: "
                    f"{error}. Write {option}={form}."
                ) from None

    def check_partial(self, arguments: Sequence[Any], keywords: Mapping[str, Any], payload: bytes) -> None:
        """Refuse a call that the function would refuse, or the worker, whatever its first argument will be."""
        self.check((None, *arguments), keywords)
        if self._kinds and not (self._forms and _are_among(self._sure_by_place[1:], self._sure, arguments, keywords)):
            by_place, by_name = decode_call(payload)
            for place, value in enumerate(by_place, 1):
                self._restore(self._positional[place] if place < len(self._positional) else self._star, value)
            for name, value in by_name.items():
                self.check_value(name, value)

    @property
    def names(self) -> list[str]:
        return list(self._signature.parameters)

    def check_value(self, name: str, value: Any) -> None:
        """Refuse the data of one argument, given by name, that the worker could not turn into the annotated type."""
        self._restore(name if name in self._signature.parameters else self._double_star, value)

    def check_result(self, value: Any, data: bytes) -> None:
        """Refuse a result that could not be decoded into the annotated type."""
        if self._result is not Any and type(value) not in self._sure_results:
            self.restore_result(decode_value(data))

    def named(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, defaults included."""
        if not keywords and len(arguments) == len(self._positional) == len(self._signature.parameters):
            return dict(zip(self._positional, arguments, strict=True))  # to bind them takes ten times as long
        bound = self._signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        named = dict(bound.arguments)
        extra = named.pop(self._double_star, {}) if self._double_star else {}
        return {**named, **extra}

    def by_name(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return a call with its arguments by name, as far as they have names, and with defaults: all that is known."""
        bound = self._signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        named = dict(bound.arguments)
        extra = named.pop(self._double_star, {}) if self._double_star else {}
        return named.pop(self._star, ()) if self._star else (), {**named, **extra}

    def data_by_name(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any], limit: int
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the data of a call as `by_name` would have had it travel; one that is by name already as it is."""
        if self._signature.parameters.keys() - {self._star, self._double_star} <= keywords.keys():
            return arguments, keywords
        self.check(arguments, keywords)
        given = {*keywords, *self._positional[: len(arguments)]}
        rest, named = self.by_name(arguments, keywords)
        what = f"A default of {self._what.lower()} {self.name!r}"
        return rest, {
            name: value if name in given else decode_value(encode_value(value, what, limit))
            for name, value in named.items()
        }

    def normal(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return a call in the one form that all its spellings share: positional where that is possible."""
        bound = self._signature.bind(*arguments, **keywords)
        return bound.args, bound.kwargs

    @property
    def takes(self) -> tuple[str, ...] | None:
        """Return what it has parameters for; None if it takes whatever it is given."""
        if self._double_star is not None:
            return None
        return tuple(name for name in self._signature.parameters if name != self._star)

    def pick(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the given values that the function has parameters for; `**kwargs` takes them all."""
        if self._double_star is not None:
            return dict(given)
        known = self._signature.parameters
        return {name: value for name, value in given.items() if name in known and name != self._star}

    def load(self, arguments: list[Any], keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Read what was stored elsewhere, but for parameters that want it unread."""
        names = self._positional
        return [
            self._load(names[place] if place < len(names) else self._star, value)
            for place, value in enumerate(arguments)
        ], {name: self._load(name, value) for name, value in keywords.items()}

    def _load(self, name: str | None, value: Any) -> Any:
        if name not in self._unread:
            return loaded(value)
        return value if value is None or isinstance(value, Payload) else Payload(value)

    def restore(self, arguments: list[Any], keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Turn decoded arguments into the annotated types."""
        self.check(arguments, keywords)
        if not self._kinds or (self._forms and _are_among(self._same_by_place, self._same, arguments, keywords)):
            return arguments, keywords
        names = self._positional
        restored = [
            self._restore(names[place] if place < len(names) else self._star, value)
            for place, value in enumerate(arguments)
        ]
        known = self._signature.parameters
        return restored, {
            name: self._restore(name if name in known else self._double_star, value) for name, value in keywords.items()
        }

    def plain_defaults(self, beside: int = 0) -> dict[str, Any]:
        """Return the defaults of parameters that are plain data, `beside` so many positional arguments of a call."""
        known = list(self._signature.parameters.values())[beside:]
        found = ((p.name, p.default) for p in known if p.default is not p.empty)
        return {name: value for name, value in found if isinstance(value, (str, int, float, bool, type(None)))}

    def add_context(self, context: TaskContext, arguments: list[Any], keywords: dict[str, Any]) -> None:
        """Put the context where the function wants it."""
        assert self._context is not None
        place, parameter = self._context
        if parameter.kind in _POSITIONAL and place <= len(arguments):
            arguments.insert(place, context)
        else:
            keywords[parameter.name] = context

    def with_context(
        self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of a plain call with the context that the function needs, if the caller gave none."""
        given = (*arguments, *keywords.values())
        needed = self._context is not None and self._context[1].default is inspect.Parameter.empty
        if not needed or any(isinstance(value, TaskContext) for value in given):
            return arguments, keywords
        positional, named = list(arguments), dict(keywords)
        self.add_context(current_task() or TaskContext(task_name=name), positional, named)
        return positional, named

    def restore_result(self, value: Any) -> Any:
        """Turn a decoded result into the annotated type."""
        try:
            return convert(value, self._result)
        except _MISFITS as error:
            said = f"does not fit its annotation: expected {_describe(self._result)}: {_reason(error)}."
            misfit = PayloadError(f"{self.result_words} {said}")
            misfit.data = {"returned": value}
            raise misfit from error

    def restore_kept(self, value: Any) -> Any:
        """Turn the decoded result of a task into the annotated type; None, which fits none, says that none was kept."""
        try:
            return self.restore_result(value)
        except PayloadError:
            if value is None or (isinstance(value, bytes) and self._result is types.NoneType):
                return value  # which it has written with ctx.open_output()
            raise

    def _restore(self, name: str | None, value: Any) -> Any:
        kind = self._kinds.get(name, Any) if name and name not in self._unread else Any
        try:
            return convert(value, kind)
        except _MISFITS as error:
            raise InvalidTask(
                f"{self._what} {self.name!r}, argument {name!r}: expected {_describe(kind)}: {_reason(error)}."
            ) from error


_Types = frozenset[type]


def _are_among(
    by_place: Sequence[_Types | None],
    by_name: Mapping[str, _Types],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> bool:
    """Say whether every value of a call that `check` let pass is of one of the types of its parameter, if that has any.

    What is no parameter of a known kind may be anything.
    """
    for value, types_ in zip(arguments, by_place):  # noqa: B905  # half of the time goes into `strict`
        if types_ is not None and type(value) not in types_:
            return False
    if keywords:
        for name, value in keywords.items():
            if (types_ := by_name.get(name)) is not None and type(value) not in types_:
                return False
    return True


def _forms(parameters: Sequence[inspect.Parameter]) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Return, by the number of positional arguments, which must be named beside them, and which can be.

    There is no such list for a function that takes any number.
    """
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return []
    places = sum(p.kind in _POSITIONAL for p in parameters)  # which come before all others
    return [
        (
            frozenset(p.name for p in parameters[given:] if p.default is p.empty),
            frozenset(p.name for p in parameters[given:] if p.kind is not p.POSITIONAL_ONLY),
        )
        for given in range(places + 1)
    ]


def return_type(function: Callable[..., Any]) -> Any:
    kind = _hints(function).get("return", Any)
    return kind if can_convert(kind) else Any


def _is_context(kind: Any) -> bool:
    """Say whether a parameter is annotated as the context: plainly, or as one that a caller may leave out."""
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


_NOTHING = frozenset(
    (
        "COPY_FREE_VARS",
        "NOP",
        "POP_TOP",
        "RESUME",
        "RETURN_GENERATOR",  # what every `async def` begins with
        "RETURN_VALUE",
        "CALL_INTRINSIC_1",  # and how it ends where it raises StopIteration
        "RERAISE",
    )
)
_CONSTANT = frozenset(("LOAD_CONST", "RETURN_CONST"))


def is_empty(function: Callable[..., Any]) -> bool:
    """Say whether the body of a function is `...`, `pass`, a docstring, or returns None and does nothing else."""
    code = getattr(function, "__code__", None)
    return code is not None and all(
        step.opname in _NOTHING or (step.opname in _CONSTANT and step.argval is None)
        for step in dis.get_instructions(code)
    )
