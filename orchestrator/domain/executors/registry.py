"""The registry of executors.

Three are part of the core. All others are plugins, in `orchestrator/plugins/executors` or in other packages, loaded on
demand by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.domain.executors.builtin import Http, Process, Pull
from orchestrator.domain.executors.options import ExecutorOptions, ExecutorPlugin, Problems
from orchestrator.domain.executors.record import ExecutorCall
from orchestrator.domain.plain import unstorable
from orchestrator.entry_points import EXECUTORS, load, own_plugins, plugins
from orchestrator.errors import ConfigurationError, did_you_mean

IN_WORKER = "python"
"""The name for the worker's own Python, which runs tasks that name no executor."""
_CORE = {
    "http": ExecutorPlugin(options=Http, driver="orchestrator.workers.executors.http:HttpExecutor"),
    "process": ExecutorPlugin(options=Process, driver="orchestrator.workers.executors.process:ProcessExecutor"),
    "pull": ExecutorPlugin(options=Pull, driver="orchestrator.workers.executors.pull:PullExecutor"),
}
_REASON = " - at `$"


def executor_names() -> list[str]:
    """Return the names of all executors, without the worker's own Python."""
    return sorted({*_CORE, *plugins(EXECUTORS)})


def built_in(name: str) -> type[ExecutorOptions] | None:
    """Return the options class of an executor that comes with the package, or None."""
    return options_of(name) if name in _CORE or name in own_plugins(EXECUTORS) else None


def all_built_in() -> dict[str, type[ExecutorOptions]]:
    """Return the options class of each executor that comes with the package."""
    options = {name: options_of(name) for name in sorted({*_CORE, *own_plugins(EXECUTORS)})}
    return {name: kind for name, kind in options.items() if kind is not None}


def plugin_of(name: str) -> ExecutorPlugin | None:
    """Return the executor of this name, or None."""
    if (core := _CORE.get(name)) is not None:
        return core
    point = plugins(EXECUTORS).get(name)
    if point is None:
        return None
    loaded = load(point, "Executor", "a class with `options`, a subclass of ExecutorOptions, or an ExecutorPlugin")
    plugin = loaded if isinstance(loaded, ExecutorPlugin) else _of_class(loaded)
    if plugin is None or plugin.options.executor != name:
        flaw = "has no `options`" if plugin is None else f"gives its name as {plugin.options.executor!r}"
        raise ConfigurationError(f"Executor {name!r}: the entry point {point.value!r} {flaw}. Give both the same name.")
    return plugin


def options_of(name: str) -> type[ExecutorOptions] | None:
    """Return the options class of an executor, or None if there is no executor of this name."""
    plugin = plugin_of(name)
    return None if plugin is None else plugin.options


def task_name(executor: str) -> str:
    """Return the name of the task of a step that names an executor but no task."""
    return f"executor:{executor}"


def call_of(options: ExecutorOptions) -> ExecutorCall:
    """Return options as an executor call."""
    wants = options.wants
    return ExecutorCall(options.executor, msgspec.to_builtins(options), "" if wants == options.executor else wants)


def call_from(executor: str, options: Mapping[str, Any]) -> ExecutorCall:
    """Return validated options as an executor call.

    The scheduler calls this without loading plugins of other packages: their only requirement is the executor itself.
    """
    kind = built_in(executor)
    return ExecutorCall(executor, dict(options)) if kind is None else call_of(msgspec.convert(options, kind))


def find_problems(name: str, options: Mapping[str, Any]) -> Problems:
    """Return what is wrong with an executor's options, by option. Problems of the executor itself have the key ``."""
    kind = options_of(name)
    return [("", unknown_executor(name))] if kind is None else option_problems(kind, options)


def unknown_executor(name: str) -> str:
    """Return the message that an executor does not exist."""
    names = sorted({*executor_names(), IN_WORKER})
    return f"unknown executor {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}."


def option_problems(kind: type[ExecutorOptions], options: Mapping[str, Any]) -> Problems:
    """Return what is wrong with options, by option. Problems that concern all of them have an empty name."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    problems: Problems = []
    for name, value in options.items():
        if name not in fields:
            advice = did_you_mean(name, fields) or f" Known: {', '.join(fields)}."
            problems.append((name, f"executor {kind.executor} has no such option.{advice}"))
            continue
        try:
            msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(_REASON)
            problems.append((name, f"{reason[:1].lower()}{reason[1:]}{f' at {path[:-1]}' if path[:-1] else ''}."))
            continue
        if (why := unstorable(value)) is not None:
            problems.append((name, f"{why}."))
    problems += [
        ("", f"option {name!r} of executor {kind.executor} is missing.")
        for name, field in fields.items()
        if field.required and name not in options
    ]
    return problems or msgspec.convert(options, kind).problems()


def _of_class(kind: Any) -> ExecutorPlugin | None:
    options = getattr(kind, "options", None)
    return None if options is None else ExecutorPlugin(options=options, driver=kind)
