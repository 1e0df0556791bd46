"""When a failed attempt is tried again, as a user says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import msgspec

from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.record import ExecutorCall
from orchestrator.domain.executors.registry import IN_WORKER, call_of, option_problems, options_of, unknown_executor
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.tasks.retry import RetryPolicy
from orchestrator.errors import InvalidTask, did_you_mean
from orchestrator.sdk.names import type_name

Seconds = float | timedelta
Backoff = Literal["exponential", "linear", "constant"] | Sequence[Seconds] | Callable[[int], float]
Errors = Sequence[type[BaseException] | str] | type[BaseException] | str
_NOT_SAID: Any = None
_RETRIES = 3
_BACKOFFS = ("exponential", "linear", "constant")
_EXPECTED = {
    "max": "a whole number from 0 to 1,000,000",
    "base": "a number of seconds above zero",
    "cap": "a number of seconds above zero",
    "jitter": "a number from 0 to 1",
    "backoff": "up to 1,000 waits of zero or more seconds",
}


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often a task is tried again, how long it waits before each try, and after which errors."""

    max: int = _NOT_SAID
    """Retries after the first try: 3, the default, means up to four tries. Of listed waits, as many as these."""
    backoff: Backoff = "exponential"
    """How the wait grows; or a list of waits in seconds; or a function of the number of failures so far."""
    base: float = 1.0
    """Seconds before the first retry."""
    cap: float = 600.0
    """Longest wait in seconds."""
    jitter: float = 0.1
    """Share of the wait by which it varies, so that a thousand failures do not come back at once."""
    on: Errors = ()
    """Exceptions, or their names (`"requests.exceptions.Timeout"`), after which alone it is tried again; none: all."""
    give_up_on: Errors = ()
    """Exceptions after which it is never tried again."""

    def __post_init__(self) -> None:
        for name in ("on", "give_up_on"):
            given = getattr(self, name)
            kinds = given if isinstance(given, (tuple, list, set, frozenset)) else (given,)
            if not all(map(_is_error, kinds)):
                raise InvalidTask(
                    f"Retry: expected types of exceptions, or their names such as 'package.module.Error', in {name}=, "
                    f"found {given!r}."
                )
            object.__setattr__(self, name, tuple(kinds))
        if isinstance(self.backoff, (list, tuple)):
            waits = [wait.total_seconds() if isinstance(wait, timedelta) else wait for wait in self.backoff]
            if not waits:
                raise InvalidTask("Retry: expected one wait or more in backoff=, found an empty list.")
            object.__setattr__(self, "backoff", tuple(waits))
        elif not callable(self.backoff) and self.backoff not in _BACKOFFS:
            near = did_you_mean(self.backoff, _BACKOFFS) if isinstance(self.backoff, str) else ""
            raise InvalidTask(
                f"Retry: expected {', '.join(map(repr, _BACKOFFS))}, a list of seconds or a function in backoff=, "
                f"found {self.backoff!r}.{near}"
            )
        if self.max is _NOT_SAID:
            object.__setattr__(self, "max", len(self.backoff) if isinstance(self.backoff, tuple) else _RETRIES)
        try:
            msgspec.convert(msgspec.structs.asdict(self._policy), RetryPolicy)  # a struct does not check its arguments
        except msgspec.ValidationError as error:
            field = next((name for name in _EXPECTED if f"`$.{name}" in str(error)), "backoff")
            raise InvalidTask(
                f"Retry: expected {_EXPECTED[field]} in {field}=, found {getattr(self, field)!r}."
            ) from None

    @property
    def _policy(self) -> RetryPolicy:
        """Return what travels with the task: names instead of types, and not the function."""
        backoff: Any = "computed" if callable(self.backoff) else self.backoff
        listed = isinstance(backoff, tuple)
        return RetryPolicy(
            max=self.max,
            backoff="listed" if listed else backoff,
            intervals=backoff if listed else (),
            base=self.base,
            cap=self.cap,
            jitter=self.jitter,
            on=_names(self.on),
            give_up_on=_names(self.give_up_on),
        )


def _is_error(kind: object) -> bool:
    if isinstance(kind, str):
        return bool(kind) and all(part.isidentifier() for part in kind.split("."))
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _names(kinds: Errors) -> tuple[str, ...]:
    assert isinstance(kinds, tuple)
    return tuple(kind if isinstance(kind, str) else type_name(kind) for kind in kinds)


def executor_call(executor: object, given: Mapping[str, Any] | None) -> ExecutorCall | None:
    """Return what travels with a task of these options; None where the worker's own Python runs it."""
    if executor is None or executor == IN_WORKER:
        if given:
            raise InvalidTask("Option executor_options: name the executor that they are for: executor='process'.")
        return None
    if isinstance(executor, ExecutorOptions):
        if given is not None:
            raise InvalidTask("Option executor_options: they go with the name of an executor, and this has options.")
        given, executor = _plain(executor), executor.executor  # a struct does not check its arguments
    if not isinstance(executor, str):
        raise InvalidTask(
            f"Option executor: expected options such as Process(command=[…]), or the name of an executor, found "
            f"{executor!r:.100}."
        )
    if given is not None and not isinstance(given, Mapping):
        raise InvalidTask(f"Option executor_options: expected a mapping, found {given!r:.100}.")
    kind = options_of(executor)
    if kind is None:
        raise InvalidTask(f"Option executor: {unknown_executor(executor)}")
    for option, problem in option_problems(kind, given or {}):
        raise InvalidTask(f"Option executor{f', {option}' if option else ''}: {problem}")
    return call_of(msgspec.convert(given or {}, kind))


def _plain(options: ExecutorOptions) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = msgspec.to_builtins(options)
    except REFUSALS as error:
        raise InvalidTask(f"Option executor: {type(options).__name__} holds what is no plain data: {error}.") from None
    return plain
