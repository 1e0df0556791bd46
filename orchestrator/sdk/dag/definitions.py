"""Read workflow definitions from YAML or JSON files.

All problems of a file are reported together, each with its line:

    nightly.yaml:12: tasks.report.depends_on: unknown task 'proces'. Did you mean 'process'?
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.domain.dag.checks import IDENTIFIER, RESERVED, STEP_NAME, check
from orchestrator.domain.dag.definition import Concurrency, Definition, EventTrigger, Hook, Param, Step, Trigger
from orchestrator.domain.dag.expression import parse_template
from orchestrator.domain.dag.operators import KEYWORDS, shortened
from orchestrator.domain.executors.registry import IN_WORKER, all_built_in, find_problems
from orchestrator.domain.problems import Path as KeyPath
from orchestrator.domain.problems import Problem
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.dag import document
from orchestrator.sdk.dag.document import Node
from orchestrator.sdk.dag.fields import (
    BAD,
    Bad,
    Field,
    Fields,
    Schema,
    Table,
    choice,
    holds,
    line_of,
    mapping_schema,
    plain_object,
    problem_text,
    refusal,
    refuse,
    table_of,
    unreadable_text,
)
from orchestrator.sdk.dag.schedule_fields import FIELD as SCHEDULE

Complete = Callable[[Definition], tuple[Definition, list[Problem]]]
"""Completes a definition, and returns it with the problems found."""


def load(path: str | Path, complete: Complete | None = None) -> Definition:
    """Read a workflow from a file."""
    return loads(document.text_of(path), str(path), complete)


def loads(text: str, source: str = "<text>", complete: Complete | None = None) -> Definition:
    """Read a workflow from a string. `source` names it in messages."""
    root, flaws = document.read(text)
    if root is None:
        raise unreadable_text(source, flaws, "a workflow")
    definition, problems = _read(root)
    if complete is not None:
        definition, further_problems = complete(_without_invalid_parts(definition, problems))
        problems += _independent(further_problems, problems)
    refuse(source, flaws, ((line_of(root, problem.path), problem_text(problem)) for problem in problems))
    return definition


def from_data(data: Any, source: str = "workflow") -> Definition:
    """Read a workflow from plain data with the structure of a file."""
    try:
        root = document.from_plain(data)
    except InvalidWorkflow as error:
        raise InvalidWorkflow(f"{source}: {error}") from None
    definition, problems = _read(root)
    if problems:
        raise refusal(f"{source}: {problem_text(problem)}" for problem in problems)
    return definition


def checked(definition: Definition) -> Definition:
    """Check a definition that was built in code. Raise InvalidWorkflow with all its problems."""
    if problems := check(definition):
        raise refusal(f"workflow {shortened(definition.name)}: {problem_text(problem)}" for problem in problems)
    return definition


def completed(definition: Definition, source: str, complete: Complete) -> Definition:
    """Complete a definition. Raise InvalidWorkflow with all its problems."""
    definition, problems = complete(definition)
    if problems:
        raise refusal(f"{source}: {problem_text(problem)}" for problem in problems)
    return definition


def schema() -> Schema:
    """Return the JSON schema of workflow files, for editors. This loads all executors of the package."""
    executors = all_built_in()
    _, options = msgspec.json.schema_components(executors.values(), ref_template="#/$defs/{name}")
    schema = deepcopy(mapping_schema(_WORKFLOW, required=["name", "tasks"]))
    step = schema["properties"]["tasks"]["additionalProperties"]
    step["properties"]["executor"]["examples"] = list(executors)
    step["allOf"] = [
        {
            "if": {"required": ["executor"], "properties": {"executor": {"const": name}}},
            "then": {
                "properties": {"with": {"$ref": f"#/$defs/{kind.__name__}"}},
                "required": ["with"] if any(field.required for field in msgspec.structs.fields(kind)) else [],
            },
        }
        for name, kind in executors.items()
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Workflow",
        "description": "A workflow of orchestrator: tasks and what they depend on.",
        "$defs": options,
        **schema,
    }


# -- reading


def _param(reader: Fields, node: Node, path: KeyPath) -> Param:
    return Param(**reader.read(node, path, "a mapping such as {type: date, default: today}", _PARAM))


def _params(reader: Fields, node: Node, path: KeyPath) -> dict[str, Param] | Bad:
    if not isinstance(node.value, dict):
        return reader.mismatch(node, path, "a mapping of parameters by name")
    return {name: _param(reader, entry.node, (*path, name)) for name, entry in node.value.items()}


def _concurrency(reader: Fields, node: Node, path: KeyPath) -> Concurrency | Bad:
    if isinstance(node.value, int) and not isinstance(node.value, bool):
        return Concurrency(limit=node.value)
    values = reader.read(node, path, "a whole number, or a mapping with limit and key", _CONCURRENCY)
    if "limit" in values:
        return Concurrency(**values)
    if isinstance(node.value, dict) and "limit" not in node.value:
        return reader.problem(path, "limit is missing: the number of runs that may run at once.")
    return BAD


def _each(make: Callable[..., Any], expected: str, table: Table, kinds: tuple[str, ...]) -> Field:
    """Return the field for one mapping or a list of mappings. Each mapping has exactly one of the keys `kinds`."""

    def convert(reader: Fields, node: Node, path: KeyPath) -> tuple[Any, ...]:
        items = node.value if isinstance(node.value, list) else [node]
        return tuple(make(**reader.read(item, (*path, index), expected, table)) for index, item in enumerate(items))

    item_schema = mapping_schema(table, one_of=kinds)
    return Field(convert, {"oneOf": [item_schema, {"type": "array", "items": item_schema}]})


def _executor(reader: Fields, node: Node, path: KeyPath) -> str | Bad:
    """Read the name of an executor. Its options are checked when the whole step has been read."""
    if node.value == IN_WORKER:
        return reader.problem(path, f"{IN_WORKER} runs registered functions: set `task` on the step instead.")
    if not isinstance(node.value, str):
        return reader.mismatch(node, path, "the name of an executor, such as process")
    return node.value


def _tasks(reader: Fields, node: Node, path: KeyPath) -> dict[str, dict[str, Any]] | Bad:
    if not isinstance(node.value, dict):
        return reader.mismatch(node, path, "a mapping of tasks by name")
    expected = "a mapping such as {task: etl.discover}"
    return {name: reader.read(entry.node, (*path, name), expected, _STEP) for name, entry in node.value.items()}


def _defaults(reader: Fields, node: Node, path: KeyPath) -> dict[str, Any]:
    return reader.read(node, path, "a mapping of options for every task", _DEFAULTS)


_PARAM = table_of(Param)
_CONCURRENCY = table_of(Concurrency)
_STEP = table_of(Step, executor=Field(_executor, {"type": "string"}), with_=Field(plain_object, {"type": "object"}))
_DEFAULTS = {key: _STEP[key] for key in ("retries", "timeout", "queue", "priority", "trigger")}
_on_failure = choice(("run", "skip"))
_STEP["on_failure"] = Field(
    _on_failure.read,
    _on_failure.schema | {"description": "run: start once all dependencies have ended, regardless of their outcome."},
)
_hooks = _each(Hook, "a mapping with task or webhook, or a list of such", table_of(Hook), ("task", "webhook"))
_TASKS: Schema = {
    "type": "object",
    "description": "The tasks by name.",
    "minProperties": 1,
    "propertyNames": {"pattern": f"^{STEP_NAME.pattern}$", "not": {"enum": sorted(RESERVED | KEYWORDS)}},
    "additionalProperties": mapping_schema(
        _STEP,
        one_of=("task", "workflow", "executor"),
        dependentSchemas={"concurrency": {"anyOf": [{"required": ["foreach"]}, {"required": ["parallel"]}]}},
        dependentRequired={"with": ["executor"]},
        **{"not": {"required": ["foreach", "parallel"]}},
    ),
}
_WORKFLOW = table_of(
    Definition,
    params=Field(
        _params,
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{IDENTIFIER.pattern}$"},
            "additionalProperties": mapping_schema(_PARAM),
        },
    ),
    schedule=SCHEDULE,
    concurrency=Field(
        _concurrency, {"oneOf": [{"type": "integer", "minimum": 1}, mapping_schema(_CONCURRENCY, required=["limit"])]}
    ),
    on=_each(
        EventTrigger,
        "a mapping with workflow or event, or a list of such",
        table_of(EventTrigger),
        ("workflow", "event"),
    ),
    on_failure=_hooks,
    on_success=_hooks,
) | {
    "defaults": Field(_defaults, mapping_schema(_DEFAULTS, description="Default options of the tasks.")),
    "tasks": Field(_tasks, _TASKS),
}
"""The keys of a file: those declared by the structs of `domain.dag.definition`, and those that only files have."""
_TRIGGERS: dict[str, Trigger] = {"run": "all_ended", "skip": "all_success"}


def _read(root: Node) -> tuple[Definition, list[Problem]]:
    reader = Fields()
    values = reader.read(root, (), "a workflow: a mapping with name and tasks", _WORKFLOW)
    if isinstance(root.value, dict) and "name" not in root.value:
        reader.problem(("name",), "is missing: every workflow has a name.")
    defaults = values.pop("defaults", {})
    steps = [_step(reader, name, defaults, own) for name, own in values.pop("tasks", {}).items()]
    definition = Definition(**{"name": "", **values}, steps=tuple(steps))
    return definition, [*reader.problems, *_consequences(root, definition, reader.problems)]


def _step(reader: Fields, name: str, defaults: dict[str, Any], own: dict[str, Any]) -> Step:
    on_failure = own.pop("on_failure", None)
    if on_failure is not None:
        trigger = _TRIGGERS[on_failure]
        if own.setdefault("trigger", trigger) != trigger:
            message = (
                f"on_failure: {on_failure} means trigger: {trigger}, but trigger is {own['trigger']}: keep one of them."
            )
            reader.problem(("tasks", name, "on_failure"), message)
    options = own.pop("with", {})
    executor = own.get("executor")
    if executor is not None:
        path: KeyPath = ("tasks", name)
        for option, value in options.items():
            if not parse_template(value).is_constant:
                message = "expected a constant, found an expression: pass values that differ between runs as input."
                reader.problem((*path, "with", option), message)
        for option, message in find_problems(executor, options):
            reader.problem((*path, "with", option) if option else (*path, "executor"), message)
    return Step(name=name, with_=options, **{**defaults, **own})


def _consequences(root: Node, definition: Definition, known: list[Problem]) -> Iterator[Problem]:
    """Yield problems between parts of a definition, except consequences of parts that could not be read."""
    bad = {problem.path for problem in known}
    around_bad = {path[:length] for path in bad for length in range(len(path) + 1)}
    if bad & {(), ("params",), ("tasks",)}:
        return
    seen: set[Problem] = set()
    for problem in check(definition):
        path = problem.path
        if len(path) == 3 and path[0] == "tasks" and path[2] in _DEFAULTS and not holds(root, path):
            path = ("defaults", path[2]) if holds(root, ("defaults", path[2])) else path
        reported = Problem(path, problem.message)
        inside_bad = any(path[:length] in bad for length in range(len(path) + 1))
        if path not in around_bad and not inside_bad and reported not in seen:
            seen.add(reported)
            yield reported


def _without_invalid_parts(definition: Definition, problems: Iterable[Problem]) -> Definition:
    """Return a definition without the invalid parts of its steps, so that the rest can be checked."""
    of_all: list[KeyPath] = []
    wrong: dict[str | int, list[KeyPath]] = defaultdict(list)
    for problem in problems:
        match problem.path:
            case ("tasks", name, *part) if part:
                wrong[name].append(tuple(part))
            case ("defaults", *part) if part:
                of_all.append(tuple(part))
    steps = (_without(step, [*of_all, *wrong.get(step.name, ())]) for step in definition.steps)
    return msgspec.structs.replace(definition, steps=tuple(steps))


def _without(step: Step, parts: Iterable[KeyPath]) -> Step:
    bare = Step(name=step.name)
    for field, *rest in parts:
        if field == "input" and rest:
            inputs = {name: value for name, value in step.input.items() if name != rest[0]}
            step = msgspec.structs.replace(step, input=inputs)
        elif field == "with":
            step = msgspec.structs.replace(step, with_={})
        elif field in step.__struct_fields__:
            step = msgspec.structs.replace(step, **{str(field): getattr(bare, str(field))})
    return step


def _independent(additional: Iterable[Problem], problems: Iterable[Problem]) -> list[Problem]:
    """Return the additional problems, except those that may follow from an earlier one."""
    bad = {problem.path for problem in problems}
    deciding = {path for path in bad if not (len(path) == 3 and path[2] in _DEFAULTS)}
    around = {path[:length] for path in deciding for length in range(1, len(path) + 1)}
    if ("tasks",) in bad:
        return []
    return [
        problem
        for problem in additional
        if problem.path not in around
        and not any(problem.path[:length] in bad for length in range(len(problem.path) + 1))
    ]
