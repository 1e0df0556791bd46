"""Validation of a workflow definition as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from orchestrator.domain.dag.definition import Definition, Param, Step, mismatch, queueing_problem, unknown_param
from orchestrator.domain.dag.expression import Template, parse, parse_template
from orchestrator.domain.dag.grammar import Path as ExpressionPath
from orchestrator.domain.dag.graph import certain_children, certain_triggers
from orchestrator.domain.dag.operators import KEYWORDS, describe
from orchestrator.domain.problems import Path, Problem, first_problems
from orchestrator.errors import ExpressionError, did_you_mean

RESERVED = frozenset({"params", "run", "item", "index", "count"})
"""Names in expressions that are not steps."""
_OF_ITEM = frozenset({"item", "index", "count"})
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,127}")
STEP_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
NAME = re.compile(r"[\w.:/-]{1,128}")
_CENTURY = 100 * 365 * 86_400
MAX_STEPS = 10_000
"""Tasks of a workflow, at most. Planning takes linear time, and a tick has a second."""
MAX_DEPENDENCIES = 200_000
MAX_HOOKS = 20
"""Hooks for one outcome of a run, at most: each gets a copy of all parameters."""
_MAX_CYCLES = 10


def check(definition: Definition) -> list[Problem]:
    """Return the problems of a definition, or the first of very many."""
    if size := _too_large(definition):
        return [Problem(("tasks",), size)]
    return first_problems(_problems(definition))


def _too_large(definition: Definition) -> str | None:
    """Return why a definition is too large for the leader to plan in time, or None."""
    steps, edges = len(definition.steps), sum(len(step.depends_on) for step in definition.steps)
    if steps > MAX_STEPS:
        return (
            f"{steps:,} tasks; a workflow may have at most {MAX_STEPS:,}: let one task fan out with foreach, or let "
            f"tasks start workflows of their own."
        )
    if edges > MAX_DEPENDENCIES:
        return f"{edges:,} dependencies in depends_on; a workflow may have at most {MAX_DEPENDENCIES:,}."
    return None


def _problems(definition: Definition) -> Iterator[Problem]:
    yield from _workflow(definition)
    yield from _params(definition)
    yield from _starts(definition)
    if not definition.steps:
        yield Problem(("tasks",), "a workflow needs at least one task.")
    for step in certain_children(definition):
        if step.workflow == definition.name:
            message = f"every run of {definition.name!r} would start another, forever. Add a when."
            yield Problem(("tasks", step.name, "workflow"), message)
    graph = _Graph(definition.steps)
    seen: set[str] = set()
    for step in definition.steps:
        if step.name in seen:
            yield Problem(("tasks", step.name), f"two tasks are named {step.name!r}.")
        seen.add(step.name)
        yield from _step(step)
        yield from _dependencies(step, graph)
        yield from _expressions(step, definition, graph)
    yield from graph.cycles()


# -- the workflow


def _workflow(definition: Definition) -> Iterator[Problem]:
    yield from _name(("name",), definition.name)
    yield from _name(("queue",), definition.queue)
    yield from _timeout(("timeout",), definition.timeout)
    if definition.version is not None and definition.version < 1:
        yield Problem(("version",), f"expected 1 or more, found {definition.version}.")
    for index, tag in enumerate(definition.tags):
        if not 1 <= len(tag) <= 128 or not tag.isprintable():
            yield Problem(("tags", index), f"a tag has 1 to 128 printable characters, found {describe(tag)}.")
    if definition.concurrency is not None:
        if definition.concurrency.limit < 1:
            yield Problem(("concurrency", "limit"), f"expected 1 or more, found {definition.concurrency.limit}.")
        scope = _Scope(frozenset({"params"}), definition.params)
        yield from _template(("concurrency", "key"), definition.concurrency.key, scope)
    for key, hooks in (("on_failure", definition.on_failure), ("on_success", definition.on_success)):
        if len(hooks) > MAX_HOOKS:
            yield Problem(
                (key,), f"{len(hooks):,} hooks; at most {MAX_HOOKS} are allowed: let one task do several things."
            )
        for index, hook in enumerate(hooks):
            if (hook.task is None) is (hook.webhook is None):
                yield Problem((key, index), "expected either task or webhook.")
            if hook.task is not None:
                yield from _name((key, index, "task"), hook.task)
            if hook.webhook is not None and not re.match(r"https?://[^/\s]", hook.webhook):
                actual = describe(hook.webhook)
                yield Problem((key, index, "webhook"), f"expected an http:// or https:// address, found {actual}.")


def _params(definition: Definition) -> Iterator[Problem]:
    for name, param in definition.params.items():
        if not IDENTIFIER.fullmatch(name):
            yield Problem(("params", name), _NOT_A_NAME.format("", describe(name)))
        if param.default not in (UNSET, None) and (problem := mismatch(param.type, param.default)):
            yield Problem(("params", name, "default"), f"{problem}.")


def _starts(definition: Definition) -> Iterator[Problem]:
    """Check triggers and the schedule: each must give the parameters that have no default."""
    if definition.schedule is not None:
        yield from _start_params(("schedule",), definition.schedule.get("params", {}), "run", definition.params)
        if definition.schedule.get("overlap") == "queue" and (problem := queueing_problem(definition)):
            yield Problem(("schedule", "overlap"), problem)
    certain = certain_triggers(definition)
    for index, trigger in enumerate(definition.on):
        path: Path = ("on", index)
        if trigger.workflow == definition.name and trigger in certain:
            message = (
                f"every run of {definition.name!r} that ends this way would start the next, forever. Add a filter."
            )
            yield Problem(path, message)
        if (trigger.workflow is None) is (trigger.event is None):
            yield Problem(path, "expected either workflow or event.")
        if trigger.workflow is not None:
            yield from _name((*path, "workflow"), trigger.workflow)
        elif trigger.state != "success":
            yield Problem((*path, "state"), "state can be given only with workflow; an event has none.")
        if trigger.event is not None:
            yield from _name((*path, "event"), trigger.event)
        if trigger.filter is not None:
            scope = _Scope(frozenset({"event"}), definition.params)
            yield from _expression((*path, "filter"), trigger.filter, scope)
        yield from _start_params(path, trigger.params, "event", definition.params)


def _start_params(path: Path, provided: Mapping[str, Any], root: str, params: Mapping[str, Param]) -> Iterator[Problem]:
    for name in provided:
        if name not in params:
            yield Problem((*path, "params", name), unknown_param(name, params))
    yield from _template((*path, "params"), provided, _Scope(frozenset({root}), params))
    for name, param in params.items():
        if param.required and name not in provided:
            yield Problem(path, f"parameter {name!r} has no default: pass it here, under params.")


# -- steps


def _step(step: Step) -> Iterator[Problem]:
    path: Path = ("tasks", step.name)
    if not STEP_NAME.fullmatch(step.name):
        yield Problem(path, _NOT_A_NAME.format(" .", describe(step.name)))
    elif step.name in RESERVED | KEYWORDS:
        yield Problem(path, f"{step.name!r} has a special meaning in expressions: choose a different name.")
    kinds = [kind for kind in ("task", "workflow", "executor") if getattr(step, kind) is not None]
    if len(kinds) != 1:
        actual = " and ".join(kinds) or "none of them"
        yield Problem(path, f"expected exactly one of task, workflow and executor, found {actual}.")
    if step.with_ and step.executor is None:
        yield Problem((*path, "with"), "with is only for an executor; a task takes its arguments from input.")
    for kind in kinds:
        yield from _name((*path, kind), getattr(step, kind))
    if step.foreach is not None and step.parallel is not None:
        yield Problem((*path, "parallel"), "foreach and parallel cannot be combined: keep one of them.")
    if isinstance(step.parallel, int) and step.parallel < 1:
        yield Problem((*path, "parallel"), f"expected 1 or more, found {step.parallel}.")
    if step.concurrency is not None and step.concurrency < 1:
        yield Problem((*path, "concurrency"), f"expected 1 or more, found {step.concurrency}.")
    if step.concurrency is not None and step.foreach is None and step.parallel is None:
        yield Problem((*path, "concurrency"), "concurrency limits a fan-out: add foreach or parallel, or remove it.")
    if step.trigger.startswith("any_") and not step.depends_on:
        yield Problem((*path, "trigger"), f"{step.trigger} waits for other tasks: add depends_on.")
    if step.concurrency_key is not None and not step.runs_task:
        yield Problem((*path, "concurrency_key"), "concurrency_key is only for tasks: remove it.")
    if step.retries is not None and not 0 <= step.retries <= 1_000_000:
        yield Problem((*path, "retries"), f"expected 0 or more, up to a million, found {step.retries}.")
    if step.priority is not None and not -100 <= step.priority <= 100:
        yield Problem((*path, "priority"), f"expected a whole number from -100 to 100, found {step.priority}.")
    yield from _timeout((*path, "timeout"), step.timeout)
    if step.queue is not None:
        yield from _name((*path, "queue"), step.queue)


def _dependencies(step: Step, graph: _Graph) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, name in enumerate(step.depends_on):
        path: Path = ("tasks", step.name, "depends_on", index)
        if name in seen:
            yield Problem(path, f"{name!r} occurs twice.")
        elif name not in graph.steps:
            yield Problem(path, f"unknown task {name!r}.{graph.hint(name)}")
        seen.add(name)


def _expressions(step: Step, definition: Definition, graph: _Graph) -> Iterator[Problem]:
    path: Path = ("tasks", step.name)
    names = frozenset({"params", "run"})
    scope = _Scope(names, definition.params, step, graph)
    for key in ("when", "foreach", "parallel"):
        text = getattr(step, key)
        if isinstance(text, str):
            yield from _expression((*path, key), text, scope)
    if step.foreach is not None:
        names |= _OF_ITEM
    elif step.parallel is not None:
        names |= _OF_ITEM - {"item"}
    task_scope = _Scope(names, definition.params, step, graph)
    yield from _template((*path, "input"), step.input, task_scope)
    yield from _template((*path, "concurrency_key"), step.concurrency_key, task_scope)


def _name(path: Path, name: str) -> Iterator[Problem]:
    if not NAME.fullmatch(name):
        yield Problem(path, f"expected 1 to 128 letters, digits, or any of _ . : / -, found {describe(name)}.")


def _timeout(path: Path, seconds: float | None) -> Iterator[Problem]:
    if seconds is not None and not 0 < seconds <= _CENTURY:
        yield Problem(path, f"expected more than 0 seconds and at most a hundred years, found {seconds:g}.")


_NOT_A_NAME = (
    "a name has 1 to 128 characters, starts with one of a-z, A-Z and _ and continues with these, digits and any of "
    "-{}, found {}."
)


# -- expressions


@dataclass(frozen=True)
class _Scope:
    """The names that an expression may use."""

    names: frozenset[str]
    params: Mapping[str, Param]
    step: Step | None = None
    graph: _Graph | None = None

    def problems(self, paths: Iterable[ExpressionPath]) -> Iterator[str]:
        """Yield an error message for each path that does not exist."""
        steps = self.graph.steps if self.graph else {}
        for root, field in sorted(paths, key=str):
            if root in self.names:
                if root == "params" and field is not None and field not in self.params:
                    yield unknown_param(field, self.params)
            elif self.step is None or self.graph is None or (root not in steps and root not in _OF_ITEM):
                spacing = " A minus needs spaces around it." if "-" in root else ""
                hint = self._quoting(root, steps) or did_you_mean(root, self.names)
                hint = hint or (self.graph.hint(root) if self.graph else "")
                yield f"unknown name {root!r}.{hint}{spacing}"
            elif root in _OF_ITEM:
                owner = "foreach" if root == "item" else "foreach or parallel"
                yield f"{root!r} can be used only in the input and the concurrency_key of a task with {owner}."
            elif root == self.step.name:
                yield f"{root!r} is this task itself; its output is not known before it ends."
            elif not self.graph.is_above(root, self.step.name):
                yield f"{root!r} may not have ended by then: add it to depends_on."

    @staticmethod
    def _quoting(root: str, steps: Mapping[str, Step]) -> str:
        """Return a hint to quote a step name that contains a dot, if one may have been meant."""
        step = next((name for name in steps if name.startswith(f"{root}.")), None)
        return f" A dot reads a field; the task {step!r} is written in backquotes: `{step}`." if step else ""


def _expression(path: Path, text: str, scope: _Scope) -> Iterator[Problem]:
    try:
        paths = parse(text).paths
    except ExpressionError as error:
        yield Problem(path, str(error))
        return
    yield from (Problem(path, message) for message in scope.problems(paths))


def _template(path: Path, value: Any, scope: _Scope) -> Iterator[Problem]:
    for location, text in _strings(value, path):
        try:
            template: Template = parse_template(text)
        except ExpressionError as error:
            yield Problem(location, str(error))
            continue
        yield from (Problem(location, message) for message in scope.problems(template.paths))


def _strings(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield each string in a value, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _strings(item, (*path, index))


# -- the graph


class _Graph:
    """The ancestors of each step, and cycles."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps = {step.name: step for step in steps}
        self._bits = {name: 1 << index for index, name in enumerate(self.steps)}
        self._upstreams = {
            name: [up for up in dict.fromkeys(step.depends_on) if up in self.steps] for name, step in self.steps.items()
        }
        self._above = self._ancestors()
        """The ancestors of each step as a bit set, without steps on or below cycles."""

    def _ancestors(self) -> dict[str, int]:
        below: dict[str, list[str]] = {name: [] for name in self.steps}
        for name, upstreams in self._upstreams.items():
            for upstream in upstreams:
                below[upstream].append(name)
        remaining = {name: len(upstreams) for name, upstreams in self._upstreams.items()}
        ready = [name for name, count in remaining.items() if not count]
        above: dict[str, int] = {}
        for name in ready:  # grows during the loop
            above[name] = 0
            for upstream in self._upstreams[name]:
                above[name] |= above[upstream] | self._bits[upstream]
            for child in below[name]:
                remaining[child] -= 1
                if not remaining[child]:
                    ready.append(child)
        return above

    def hint(self, name: str) -> str:
        """Return a suggestion of the most similar step name."""
        return did_you_mean(name, self.steps)

    def is_above(self, name: str, descendant: str) -> bool:
        """Return whether a step always ends before another starts. True around cycles, where it is unknown."""
        return descendant not in self._above or bool(self._above[descendant] & self._bits[name])

    def cycles(self) -> Iterator[Problem]:
        """Yield a problem for each of the first few cycles, with the path of its steps."""
        seen: dict[str, str] = {}
        count = 0
        for start in self.steps:
            trail: list[str] = []
            name = start
            while name not in self._above and name not in seen:
                seen[name] = start
                trail.append(name)
                name = next(up for up in self._upstreams[name] if up not in self._above)
            if name in trail and count < _MAX_CYCLES:
                count += 1
                path = " → ".join([*trail[trail.index(name) :], name])
                message = f"cycle: {path}, each depends on the next. Remove one of these dependencies."
                yield Problem(("tasks", name, "depends_on"), message)
