"""Copy options of `@app.task` into the steps and hooks of a workflow that name the task.

The scheduler creates the tasks of a workflow, and does not know their functions. A workflow therefore copies the
options of its tasks when it is applied, as a part of that version. Options that cannot be stored are refused then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from orchestrator.domain import redaction
from orchestrator.domain.dag.definition import Definition, Hook, Registered, Step, hidden_by
from orchestrator.domain.dag.expression import parse_template
from orchestrator.domain.dag.placement import HOOK_OPTIONS, WEBHOOK_TASK
from orchestrator.domain.dag.steps import fan_out_sources
from orchestrator.domain.problems import MAX_PROBLEMS, Path, Problem
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS
from orchestrator.errors import InvalidTask, did_you_mean
from orchestrator.sdk.tasks.options import CallOptions, with_options
from orchestrator.sdk.tasks.task import Task

P = TypeVar("P", Step, Hook)
_HOOK_DEFAULTS = Registered(options=msgspec.to_builtins(HOOK_OPTIONS))


def copy_task_options(
    definition: Definition, tasks: Mapping[str, Task[..., Any]], elsewhere: Iterable[str] = ()
) -> tuple[Definition, list[Problem]]:
    """Return a definition whose steps and hooks carry the options of these tasks, and the problems found.

    If there are tasks, a step with an unknown task is a problem, unless `elsewhere` lists it as another application's.
    """
    problems: list[Problem] = []
    task_names = {*tasks, *elsewhere, WEBHOOK_TASK} if tasks else None
    steps = []
    for step in definition.steps:
        if len(problems) >= MAX_PROBLEMS:
            break  # the definition is refused anyway
        path: Path = ("tasks", step.name)
        steps.append(step)
        problems += _unknown(step.task, task_names, path)
        if (task := tasks.get(step.task or "")) is None:
            continue
        problems_of_input = list(_input_problems(task, step, path))
        problems += problems_of_input
        if problems_of_input:
            continue  # `_of_step` would repeat the problem
        try:
            steps[-1] = _with_registered(step, _of_step(task, step), unless=Registered())
        except InvalidTask as error:
            problems.append(Problem(path, str(error)))
    steps = list(inheriting_redaction(steps, _everywhere(tasks)))
    hooks: dict[str, tuple[Hook, ...]] = {}
    for name in ("on_failure", "on_success"):
        for number, hook in enumerate(getattr(definition, name)):
            problems += _unknown(hook.task, task_names, (name, number))
        try:
            hooks[name] = tuple(_with_task(hook, tasks) for hook in getattr(definition, name))
        except InvalidTask as error:
            problems.append(Problem((name,), str(error)))
    return msgspec.structs.replace(definition, steps=tuple(steps), **hooks), problems


def with_redaction(
    definition: Definition, redacted: Mapping[str, Sequence[str]], everywhere: Sequence[str] = ()
) -> Definition:
    """Return a definition whose steps redact what these tasks mark. Their functions are in another process."""
    steps = [_redacting(step, redacted.get(step.task or "", ())) for step in definition.steps]
    if steps == [*definition.steps]:
        return definition
    return msgspec.structs.replace(definition, steps=tuple(inheriting_redaction(steps, everywhere)))


def _redacting(step: Step, patterns: Sequence[str]) -> Step:
    return msgspec.structs.replace(step, registered=_named(patterns)) if patterns and step.registered is None else step


def _named(patterns: Sequence[str]) -> Registered:
    return Registered(options={"redact": list(patterns)} if patterns else {})


def _everywhere(tasks: Mapping[str, Task[..., Any]]) -> tuple[str, ...]:
    return next((redaction.split_patterns(task._client.settings.redact) for task in tasks.values()), ())


def inheriting_redaction(steps: Sequence[Step], everywhere: Sequence[str]) -> Iterator[Step]:
    """Yield steps that redact every value that any step marks, and inputs that take such a value under another name."""
    named = hidden_by(step.registered for step in steps)
    hidden = (*named, *everywhere)
    for step in steps:
        items = ("item",) if redaction.mentions(hidden, step.foreach or "") else ()
        inputs = {name: msgspec.json.encode(value).decode() for name, value in step.input.items()}
        renamed = [
            name for name, text in inputs.items() if "${" in text and redaction.mentions((*hidden, *items), text)
        ]
        registered = _inherited(step.registered or Registered(), (*named, *everywhere, *items, *renamed))
        yield _with_registered(step, registered, unless=Registered()) if step.runs_task else step


def _inherited(registered: Registered, patterns: Iterable[str]) -> Registered:
    own = registered.options.get("redact", ())
    already_inherited = registered.options.get("inherited", ())
    inherited = [pattern for pattern in dict.fromkeys((*already_inherited, *patterns)) if pattern not in own]
    options = {**registered.options, "inherited": inherited}
    return msgspec.structs.replace(registered, options=options) if inherited else registered


def _unknown(task: str | None, task_names: set[str] | None, path: Path) -> Iterator[Problem]:
    """Yield a problem if no task has this name. Workers look up functions that are named by module."""
    if task is None or task_names is None or task in task_names or ":" in task:
        return
    full_name = min((name for name in task_names if name.endswith(f".{task}")), default=None)
    advice = did_you_mean(task, task_names) if full_name is None else f" Did you mean {full_name!r}?"
    message = f"the application has no task {task!r}.{advice} If another application has it, give it as elsewhere."
    yield Problem((*path, "task"), message)


def _input_problems(task: Task[..., Any], step: Step, path: Path) -> Iterator[Problem]:
    """Yield a problem for each input that a step's task does not accept, or that is missing."""
    signature = task._signature
    accepted = signature.pick(step.input)
    for name in step.input:
        if name not in accepted:
            advice = did_you_mean(name, signature.names) or f" It has: {', '.join(signature.names) or 'none'}."
            yield Problem((*path, "input", name), f"task {task.name!r} has no such parameter.{advice}")
    constants, later = _arguments(task, step)
    for name, value in constants.items():
        try:
            signature.check_value(name, value)
        except InvalidTask as error:
            yield Problem((*path, "input", name), str(error))
    try:
        signature.check((), dict.fromkeys([*constants, *later]))
    except InvalidTask as error:
        yield Problem(path, str(error))


def check_allowed_in_workflow(task: Task[..., Any]) -> None:
    """Raise InvalidTask for a task whose options cannot apply in a workflow."""
    options = task._call_options
    for name in ("unique_key", "idempotency_key"):
        if getattr(options, name) is not None:
            raise InvalidTask(
                f"Task {task.name!r} has the option {name}, and a run needs all its tasks. Omit it, or run "
                "another task that enqueues this one. To limit runs, see `concurrency` of a workflow and "
                "`overlap` of a schedule."
            )
    for name in ("eta", "expires"):
        if isinstance(getattr(options, name), datetime):
            raise InvalidTask(
                f"Task {task.name!r}: option {name} is a fixed moment, but runs may start at any time. Give "
                f"{'delay' if name == 'eta' else name} in seconds."
            )
    if options.on_success is True:
        raise InvalidTask(f"Task {task.name!r}: option on_success=True is for calls inside a task only.")


def _of_step(task: Task[..., Any], step: Step) -> Registered:
    check_allowed_in_workflow(task)
    values = {name: getattr(step, name) for name in ("retries", "timeout", "queue", "priority")}
    options_of_step = {name: value for name, value in values.items() if value is not None}
    with_options(task._call_options, options_of_step)  # raises for conflicting options
    constants, later = _arguments(task, step)
    options = task._redacting_options
    if step.concurrency_key is not None:
        options = dataclasses.replace(options, concurrency_key=None)
    advice = 'Give the step a concurrency_key of its own, such as "${params.customer}"; a schedule, constant params.'
    registered = _registered(task, options, constants, ", ".join(later), advice)
    return msgspec.structs.replace(registered, ignored=_ignored(task, step))


def options_of_node(task: Task[..., Any]) -> Registered:
    """Return the options of a task that a flow's node runs, regardless of its input."""
    check_allowed_in_workflow(task)
    return _registered(task, task._redacting_options, {}, "the input of a node", "Give it a fixed one.")


def options_of_part(task: Task[..., Any]) -> Registered:
    """Return the options of a task in a composition. A computed concurrency key is stored separately."""
    check_allowed_in_workflow(task)
    options = task._redacting_options
    if callable(options.concurrency_key):
        options = dataclasses.replace(options, concurrency_key=None)
    return _registered(task, options, {}, "the arguments of a part", "")


def redacting_functions(names: Iterable[str], redacted: Mapping[str, Sequence[str]]) -> dict[str, Registered]:
    """Return functions of a flow that redact what these tasks mark. The tasks' functions are in another process."""
    functions = redacting_alike({name: _named(redacted.get(name, ())) for name in names})
    return {name: function for name, function in functions.items() if function != Registered()}


def redacting_alike(functions: Mapping[str, Registered]) -> dict[str, Registered]:
    """Return functions of a flow that all redact what any of them marks: values pass through the shared state."""
    named = hidden_by(functions.values())
    return {name: _inherited(function, named) for name, function in functions.items()}


def _ignored(task: Task[..., Any], step: Step) -> tuple[str, ...]:
    """Return the implicit inputs of a step that its task has no parameter for."""
    inputs = {name: None for name in step.depends_on if name not in fan_out_sources(step)}
    if step.foreach is not None:
        inputs["item"] = None
    accepted = task._signature.pick(inputs)
    return tuple(name for name in inputs if name not in accepted)


def _with_task(hook: Hook, tasks: Mapping[str, Task[..., Any]]) -> Hook:
    task = tasks.get(hook.task or "")
    if task is None:
        return hook
    check_allowed_in_workflow(task)
    hook_defaults: dict[str, Any] = {"retries": HOOK_OPTIONS.retry.max}
    if task._call_options.soft_timeout is None:
        hook_defaults["timeout"] = HOOK_OPTIONS.timeout
    options = with_options(
        task._redacting_options, {name: value for name, value in hook_defaults.items() if name not in task._chosen}
    )
    advice = "Give it a fixed one, or let the hook run a task that enqueues this one."
    registered = _registered(task, options, {}, "the end of a run", advice)
    return _with_registered(hook, registered, unless=_HOOK_DEFAULTS)


def _with_registered(part: P, registered: Registered, *, unless: Registered) -> P:
    """Return a step or hook with its task's options, unless these are the defaults, as for an unknown task."""
    return msgspec.structs.replace(part, registered=registered if registered != unless else None)


def _registered(
    task: Task[..., Any], options: CallOptions, constants: Mapping[str, Any], unknown: str, advice: str
) -> Registered:
    """Return a task's options, given its constant arguments. `unknown` describes the rest in messages."""
    if options.is_computed:
        if unknown:
            name = "concurrency_key" if callable(options.concurrency_key) else "weight"
            remedy = advice if name == "concurrency_key" else "Give it a number."
            raise InvalidTask(
                f"Task {task.name!r}: option {name} is a function, and its arguments are known only while a run "
                f"executes: {unknown}. {remedy}"
            )
        task._signature.check((), constants)
        options = _fixed(task, options, constants)
    key = options.concurrency_key
    task_options = options.to_task_options(float(options.weight))  # type: ignore[arg-type]
    return Registered(
        options={} if task_options == DEFAULT_OPTIONS else msgspec.to_builtins(task_options),
        queue=task._own_queue,
        priority=options.priority,
        delay=options.delay_seconds or None,
        expires=options.expiry_seconds,
        key=None if key is None else str(key),
        callbacks=task._callbacks,
    )


def _fixed(task: Task[..., Any], options: CallOptions, values: Mapping[str, Any]) -> CallOptions:
    try:
        return options.fixed(task._signature.named((), values))
    except InvalidTask:
        raise
    except Exception as error:
        raise InvalidTask(
            f"Task {task.name!r}: its concurrency_key or weight cannot be computed from the arguments "
            f"{dict(values)!r:.200}: {type(error).__name__}: {error}."
        ) from error


def _arguments(task: Task[..., Any], step: Step) -> tuple[dict[str, Any], list[str]]:
    """Return the constant arguments of a step's task, and the names of the rest."""
    templates = {name: parse_template(value) for name, value in step.input.items()}
    later = {name for name, template in templates.items() if not template.is_constant}
    later |= {name for name in step.depends_on if name not in fan_out_sources(step)} - templates.keys()
    if step.foreach is not None and "item" not in templates:
        later.add("item")
    constants = {name: template.render({}) for name, template in templates.items() if template.is_constant}
    return task._signature.pick(constants), sorted(task._signature.pick(dict.fromkeys(later)))
