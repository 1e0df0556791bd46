"""Which executors there are, and what is said to them: those of the package, and those of others by entry point."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from orchestrator.domain.executors.call import ExecutorCall
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.registry import BUILT_IN, IN_WORKER, call_of, option_problems, unknown_executor
from orchestrator.domain.plain import REFUSALS
from orchestrator.errors import ConfigurationError, InvalidTask

GROUP = "orchestrator.executors"
"""The entry points under which packages offer executors: a name, and the class."""


def offered() -> dict[str, EntryPoint]:
    """Return the executors that installed packages offer, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load_executor(point: EntryPoint) -> Any:
    """Return the class that an entry point names, or say what is wrong with it."""
    try:
        kind = point.load()
        options = kind.options
    except Exception as error:
        raise ConfigurationError(
            f"Executor {point.name!r}: the entry point {point.value!r} cannot be loaded: {type(error).__name__}: "
            f"{error}. It names a class with `options`, a subclass of ExecutorOptions."
        ) from error
    if options.executor != point.name:
        raise ConfigurationError(
            f"Executor {point.name!r}: the options of {point.value!r} say that it is called {options.executor!r}. "
            f"Give both the same name."
        )
    return kind


def options_type(name: str) -> type[ExecutorOptions] | None:
    """Return what can be said to an executor; None if there is none of that name."""
    if (known := BUILT_IN.get(name)) is not None:
        return known
    point = offered().get(name)
    return None if point is None else load_executor(point).options


def executor_names() -> list[str]:
    """Return all executors but the worker's own Python."""
    return sorted({*BUILT_IN, *offered()})


def find_problems(name: str, given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is wrong with an executor and its options, by option; the executor itself is the option ``."""
    kind = options_type(name)
    return [("", unknown_executor(name, executor_names()))] if kind is None else option_problems(kind, given)


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
    kind = options_type(executor)
    if kind is None:
        raise InvalidTask(f"Option executor: {unknown_executor(executor, executor_names())}")
    for option, problem in option_problems(kind, given or {}):
        raise InvalidTask(f"Option executor{f', {option}' if option else ''}: {problem}")
    return call_of(msgspec.convert(given or {}, kind))


def _plain(options: ExecutorOptions) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = msgspec.to_builtins(options)
    except REFUSALS as error:
        raise InvalidTask(f"Option executor: {type(options).__name__} holds what is no plain data: {error}.") from None
    return plain
