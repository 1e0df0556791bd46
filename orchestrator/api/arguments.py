"""Searches for tasks and runs by argument: `42`, `"acme"`, `acme` also within a text, or `customer=42` for a named
value.

Redacted values never match: otherwise a search could guess them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.context import Api
from orchestrator.domain import timezones
from orchestrator.domain.access import KeyScope
from orchestrator.domain.tasks.parameters import Parameter, by_name
from orchestrator.sdk.values.display import as_json, call_of
from orchestrator.store.fleet import parameters_of_all
from orchestrator.store.insights import (
    Found,
    RunFilter,
    RunNote,
    RunSort,
    RunView,
    TaskFilter,
    TaskPage,
    TaskView,
    notes_of_runs,
    page_of_runs,
    page_of_tasks,
    readable_params,
    search,
)
from orchestrator.store.insights.arguments import Needles, TaskArguments, calls_of_tasks
from orchestrator.store.insights.run_lists import RunPage
from orchestrator.store.insights.tasks import MAX_LIST_SECONDS, TaskSort

Argument = Annotated[str, Meta(max_length=500)]
_NAMED = re.compile(r"([\w.@-]+)=(.*)", re.DOTALL)
_QUOTED = re.compile(r'"(.+)"', re.DOTALL)
_MIN_LENGTH = 3
"""Characters of a text that is searched within others, at least: shorter texts occur everywhere."""
_BATCH = 500
"""Rows of one statement, whose arguments are read together."""
_MAX_ARGUMENTS_SIZE = 100_000
"""Bytes of a run's arguments, beyond which they are not searched."""
_CONSTANTS = {"true": True, "false": False, "null": None}
_Names = Mapping[str, Sequence[Parameter]]


class SearchedValue(NamedTuple):
    text: str
    """The text as it was typed: a part of a text, or a whole number."""
    path: tuple[str, ...] = ()
    """The path of names to the value, such as `order.customer`."""
    value: str = ""
    """The whole value at that path."""
    is_exact: bool = False
    """The text must be the whole value, not a part of it."""

    @classmethod
    def parse(cls, text: str) -> SearchedValue:
        if quoted := _QUOTED.fullmatch(text):
            return cls(quoted[1], is_exact=True)
        if (match := _NAMED.fullmatch(text)) is None:
            return cls(text)
        quoted = _QUOTED.fullmatch(match[2])
        return cls(text, tuple(match[1].lower().split(".")), quoted[1] if quoted else match[2])

    @property
    def needles(self) -> Needles:
        """Byte sequences, one of which every match has in its stored data."""
        value = self.value if self.path else self.text
        forms: list[Any] = [_CONSTANTS[value]] if value in _CONSTANTS else []
        for read in (int, float, datetime.fromisoformat):
            with suppress(ValueError):
                forms.append(read(value))
        data = [] if self.is_exact else [self.text.encode()]
        for form in forms if data and not self.path else [value, *forms]:
            with suppress(OverflowError):
                data.append(timezones.encode(form))
        return Needles([one.hex() for one in data], msgspec.json.encode(value).decode()[1:-1])

    def matches(self, data: Any) -> bool:
        """Return whether plain data contains the value."""
        return any(self._is(path, leaf) for path, leaf in _leaves(as_json(data), ()))

    def _is(self, path: tuple[str, ...], leaf: Any) -> bool:
        if self.path and path[-len(self.path) :] == self.path and _equals(leaf, self.value):
            return True
        return self.text in leaf if isinstance(leaf, str) and not self.is_exact else _equals(leaf, self.text)


def _equals(leaf: Any, text: str) -> bool:
    if isinstance(leaf, float):
        with suppress(ValueError):
            return leaf == float(text)
    return (leaf if isinstance(leaf, str) else msgspec.json.encode(leaf).decode()) == text


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaf values in plain data, each with its path."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, (*path, str(name).lower()))
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, path)
    else:
        yield path, value


def named_call(names: _Names, name: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, as workers announced them; without names, by `@0`, `@1`, …."""
    parameters = names.get(name or "")
    named = None if parameters is None else by_name(parameters, args, kwargs)
    return {f"@{index}": value for index, value in enumerate(args)} | dict(kwargs) if named is None else named


def find_tasks_by_argument(
    api: Api,
    task_filter: TaskFilter,
    argument: str,
    *,
    limit: int,
    before: UUID | None = None,
    oldest: bool = False,
    run_sort: TaskSort = "when",
    seconds: float | None = None,
) -> TaskPage:
    """Return matching tasks with an argument, as many as are found within a second or `seconds`."""
    searched, matching = SearchedValue.parse(argument), list[TaskView]()
    give_up_at = time.monotonic() + (MAX_LIST_SECONDS if seconds is None else seconds)
    while True:
        options: Any = {"before": before, "oldest": oldest, "run_sort": run_sort, "needles": searched.needles}
        page = api.read_list(page_of_tasks, task_filter, limit=_BATCH, **options)
        tasks = page.tasks
        if not (task_filter.run or task_filter.by_end):  # the last task that was checked is the cursor
            tasks = sorted(tasks, key=lambda task: task.id, reverse=not oldest)
        calls = api.read_list(calls_of_tasks, [task.id for task in tasks])
        names = api.read_list(parameters_of_all, {task.name for task in tasks})
        for task in tasks:
            if task.id in calls and _task_matches(api, searched, names, task.name, calls[task.id]):
                matching.append(task)
            if len(matching) == limit or time.monotonic() >= give_up_at:
                return TaskPage(matching, task.id)
        before = page.next
        if before is None or time.monotonic() >= give_up_at:
            return TaskPage(matching, before)


def _task_matches(api: Api, searched: SearchedValue, names: _Names, name: str, call: TaskArguments) -> bool:
    if call.payload is not None and not searched.matches(named_call(names, name, *call_of(call.payload))):
        return False
    if call.payload is not None and call.is_plain and not api.redaction:
        return True
    task = api.backend.insights.show_task(call.id)
    if task is None:
        return False
    return searched.matches(named_call(names, name, *api.redaction_of_task(task).redacted_call(*call_of(task.payload))))


def find_runs_by_argument(
    api: Api,
    run_filter: RunFilter,
    argument: str,
    *,
    limit: int,
    before: UUID | None = None,
    sort: RunSort = "-when",
    seconds: float | None = None,
) -> RunPage:
    """Return matching runs with an argument, as many as are found within a second or `seconds`."""
    searched, matching = SearchedValue.parse(argument), list[RunView]()
    give_up_at = time.monotonic() + (MAX_LIST_SECONDS if seconds is None else seconds)
    while True:
        page = api.read_list(page_of_runs, run_filter, limit=_BATCH, before=before, sort=sort, needles=searched.needles)
        runs = page.runs
        if sort.endswith("when") or (run_filter.workflow is not None and not sort.endswith("ended")):
            runs = sorted(runs, key=lambda run: run.id, reverse=sort.startswith("-"))
        notes = api.read_list(notes_of_runs, [run.id for run in runs], _MAX_ARGUMENTS_SIZE)
        names = api.read_list(parameters_of_all, {run.workflow for run in runs if run.workflow})
        for run in runs:
            if run.id in notes and _run_matches(api, searched, names, run, notes[run.id]):
                matching.append(run)
            if len(matching) == limit or time.monotonic() >= give_up_at:
                return RunPage(matching, run.id)
        before = page.next
        if before is None or time.monotonic() >= give_up_at:
            return RunPage(matching, before)


def _run_matches(api: Api, searched: SearchedValue, names: _Names, run: RunView, note: RunNote) -> bool:
    params = readable_params(note.params or {})
    args, kwargs = call_of(note.start) if note.start is not None else ([], params if isinstance(params, dict) else {})
    if not searched.matches(named_call(names, run.workflow, args, kwargs)):
        return False
    if note.is_plain and not api.redaction:
        return True
    return searched.matches(named_call(names, run.workflow, *api.redaction_of_run(run.id).redacted_call(args, kwargs)))


@dataclass(frozen=True, kw_only=True)
class Matches(Found):
    """Everything that matches a text, also in arguments; redacted arguments are not searched."""

    exact_tasks: list[TaskView]
    """Tasks with an argument that equals the value."""
    exact_runs: list[RunView]
    """Runs with an argument that equals the value."""
    tasks_by_argument: list[TaskView]
    """Other tasks with this text in an argument."""
    runs_by_argument: list[RunView]
    """Other runs with this text in an argument."""
    older_exact_tasks: UUID | None = None
    """The task before which arguments were not compared, because the search takes half a second at most."""
    older_exact_runs: UUID | None = None
    """The run before which arguments were not compared."""
    older_tasks: UUID | None = None
    """The task before which arguments were not searched, because of that limit or because there are enough matches."""
    older_runs: UUID | None = None
    """The run before which arguments were not searched."""


def exact_search(text: str) -> str:
    """Return the search text that finds only this exact value."""
    searched = SearchedValue.parse(text)
    return text if searched.is_exact or searched.path else f'"{text}"'


def find_all(api: Api, text: str, limit: int, key_scope: KeyScope) -> Matches:
    """Return everything that matches a text.

    Exact values have separate lists, so that partial matches do not hide them.
    """
    found = api.read_list(search, text, limit, queues=key_scope.queues, workflows=key_scope.workflows)
    exact, half = exact_search(text), MAX_LIST_SECONDS / 2
    tasks, runs = TaskFilter(within=key_scope.queues), RunFilter(within=key_scope.workflows)
    exact_tasks = find_tasks_by_argument(api, tasks, exact, limit=limit, seconds=half)
    exact_runs = find_runs_by_argument(api, runs, exact, limit=limit, seconds=half)
    more_tasks, more_runs = TaskPage([], None), RunPage([], None)
    if exact != text and (len(text) >= _MIN_LENGTH or text.isdecimal()):
        more_tasks = find_tasks_by_argument(api, tasks, text, limit=limit, seconds=half)
        more_runs = find_runs_by_argument(api, runs, text, limit=limit, seconds=half)
    exact_ids = {task.id for task in exact_tasks.tasks} | {run.id for run in exact_runs.runs}
    return Matches(
        **{field.name: getattr(found, field.name) for field in fields(found)},
        exact_tasks=exact_tasks.tasks,
        exact_runs=exact_runs.runs,
        tasks_by_argument=[task for task in more_tasks.tasks if task.id not in exact_ids],
        runs_by_argument=[run for run in more_runs.runs if run.id not in exact_ids],
        older_exact_tasks=exact_tasks.next,
        older_exact_runs=exact_runs.next,
        older_tasks=more_tasks.next,
        older_runs=more_runs.next,
    )
