"""The retry policy of a task, as users write it, and the check of its executor options."""

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
_UNSET: Any = None
_DEFAULT_RETRIES = 3
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
    """A retry policy: how often a task is retried, with which backoff, and after which errors."""

    max: int = _UNSET
    """Retries after the first attempt: the default of 3 allows four attempts. A list of waits sets its own length."""
    backoff: Backoff = "exponential"
    """How the wait grows, or a list of waits in seconds, or a function of the number of failures so far."""
    base: float = 1.0
    """Seconds before the first retry."""
    cap: float = 600.0
    """The longest wait, in seconds."""
    jitter: float = 0.1
    """The random share of each wait, so that a thousand failed tasks do not all retry at once."""
    on: Errors = ()
    """Exceptions to retry, as types or names such as `"requests.exceptions.Timeout"`. By default, all are retried."""
    give_up_on: Errors = ()
    """Exceptions that are never retried."""

    def __post_init__(self) -> None:
        for name in ("on", "give_up_on"):
            value = getattr(self, name)
            kinds = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
            if not all(map(_is_error, kinds)):
                raise InvalidTask(
                    f"Retry: expected types of exceptions, or their names such as 'package.module.Error', in {name}=, "
                    f"found {value!r}."
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
        if self.max is _UNSET:
            object.__setattr__(self, "max", len(self.backoff) if isinstance(self.backoff, tuple) else _DEFAULT_RETRIES)
        try:
            msgspec.convert(msgspec.structs.asdict(self._policy), RetryPolicy)  # a struct does not check its arguments
        except msgspec.ValidationError as error:
            field = next((name for name in _EXPECTED if f"`$.{name}" in str(error)), "backoff")
            raise InvalidTask(
                f"Retry: expected {_EXPECTED[field]} in {field}=, found {getattr(self, field)!r}."
            ) from None

    @property
    def _policy(self) -> RetryPolicy:
        """The policy as data that travels with the task: error names instead of types, and no function."""
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


def _is_error(error_type: object) -> bool:
    if isinstance(error_type, str):
        return bool(error_type) and all(part.isidentifier() for part in error_type.split("."))
    return isinstance(error_type, type) and issubclass(error_type, BaseException)


def _names(kinds: Errors) -> tuple[str, ...]:
    assert isinstance(kinds, tuple)
    return tuple(kind if isinstance(kind, str) else type_name(kind) for kind in kinds)


def executor_call(executor: object, options: Mapping[str, Any] | None) -> ExecutorCall | None:
    """Return the executor call that travels with a task; None if the worker's own Python runs the task."""
    if executor is None or executor == IN_WORKER:
        if options:
            raise InvalidTask(
                "Option executor_options: name the executor that they belong to, for example executor='process'."
            )
        return None
    if isinstance(executor, ExecutorOptions):
        if options is not None:
            raise InvalidTask(
                "Option executor_options: they belong to an executor given by name, but this one is given with options."
            )
        options, executor = _plain(executor), executor.executor  # a struct does not check its arguments
    if not isinstance(executor, str):
        raise InvalidTask(
            f"Option executor: expected options such as Process(command=[…]), or the name of an executor, found "
            f"{executor!r:.100}."
        )
    if options is not None and not isinstance(options, Mapping):
        raise InvalidTask(f"Option executor_options: expected a mapping, found {options!r:.100}.")
    kind = options_of(executor)
    if kind is None:
        raise InvalidTask(f"Option executor: {unknown_executor(executor)}")
    for option, problem in option_problems(kind, options or {}):
        raise InvalidTask(f"Option executor{f', {option}' if option else ''}: {problem}")
    return call_of(msgspec.convert(options or {}, kind))


def _plain(options: ExecutorOptions) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = msgspec.to_builtins(options)
    except REFUSALS as error:
        raise InvalidTask(
            f"Option executor: {type(options).__name__} holds a value that is not plain data: {error}."
        ) from None
    return plain
