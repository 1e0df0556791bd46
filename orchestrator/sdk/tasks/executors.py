"""The executor of a task, as its options name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.domain.executors.call import ExecutorCall
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.registry import IN_WORKER, call_of, option_problems, options_of, unknown_executor
from orchestrator.domain.plain import REFUSALS
from orchestrator.errors import InvalidTask


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
