"""Tasks and runs by the value of an argument: `42`, `"acme"`, `acme` also within a text, or `customer=42` under a name.

A value that is hidden is none: else one could find it out by searching for it.
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
from orchestrator.store.insights.arguments import Given, Needles, calls_of_tasks
from orchestrator.store.insights.run_lists import RunPage
from orchestrator.store.insights.tasks import LONGEST_WALK, TaskSort

Argument = Annotated[str, Meta(max_length=500)]
_NAMED = re.compile(r"([\w.@-]+)=(.*)", re.DOTALL)
_QUOTED = re.compile(r'"(.+)"', re.DOTALL)
_SHORTEST = 3
"""Characters of a text that is looked for within others: a shorter one stands everywhere."""
_CANDIDATES = 500
"""Of one statement, whose arguments are read together."""
_LONGEST = 100_000
"""Bytes of what a run was started with, beyond which it is not looked at."""
_CONSTANTS = {"true": True, "false": False, "null": None}
_Names = Mapping[str, Sequence[Parameter]]


class Sought(NamedTuple):
    """The value to look for."""

    text: str
    """All that was typed: a part of a text, or a whole number."""
    path: tuple[str, ...] = ()
    """The names at whose end the value stands, such as `order.customer`."""
    value: str = ""
    """The value under that name, all of it."""
    is_exact: bool = False
    """The text is a whole value, not a part of one."""

    @classmethod
    def parse(cls, text: str) -> Sought:
        if quoted := _QUOTED.fullmatch(text):
            return cls(quoted[1], is_exact=True)
        if (found := _NAMED.fullmatch(text)) is None:
            return cls(text)
        quoted = _QUOTED.fullmatch(found[2])
        return cls(text, tuple(found[1].lower().split(".")), quoted[1] if quoted else found[2])

    @property
    def needles(self) -> Needles:
        """What is in the data of everything that fits."""
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

    def fits(self, given: Any) -> bool:
        """Say whether plain data has the value in it."""
        return any(self._is(path, leaf) for path, leaf in _leaves(as_json(given), ()))

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
    """Yield the values in plain data, each with the names that lead to it."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _leaves(one, (*path, str(name).lower()))
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one, path)
    else:
        yield path, value


def named_call(names: _Names, name: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names that workers announce; else `@0` stands for that of the first."""
    known = names.get(name or "")
    found = None if known is None else by_name(known, args, kwargs)
    return {f"@{place}": one for place, one in enumerate(args)} | dict(kwargs) if found is None else found


def tasks_with(
    api: Api,
    wanted: TaskFilter,
    argument: str,
    *,
    limit: int,
    before: UUID | None = None,
    oldest: bool = False,
    run_sort: TaskSort = "when",
    seconds: float | None = None,
) -> TaskPage:
    """Return tasks that match and have a value, as many as are found within a second, or so many seconds."""
    sought, found = Sought.parse(argument), list[TaskView]()
    last = time.monotonic() + (LONGEST_WALK if seconds is None else seconds)
    while True:
        shown: Any = {"before": before, "oldest": oldest, "run_sort": run_sort, "needles": sought.needles}
        page = api.read_list(page_of_tasks, wanted, limit=_CANDIDATES, **shown)
        tasks = page.tasks
        if not (wanted.run or wanted.by_end):  # so that the last that was looked at is the cursor
            tasks = sorted(tasks, key=lambda task: task.id, reverse=not oldest)
        given = api.read_list(calls_of_tasks, [task.id for task in tasks])
        names = api.read_list(parameters_of_all, {task.name for task in tasks})
        for task in tasks:
            if task.id in given and _task_fits(api, sought, names, task.name, given[task.id]):
                found.append(task)
            if len(found) == limit or time.monotonic() >= last:
                return TaskPage(found, task.id)
        before = page.next
        if before is None or time.monotonic() >= last:
            return TaskPage(found, before)


def _task_fits(api: Api, sought: Sought, names: _Names, name: str, given: Given) -> bool:
    if given.payload is not None and not sought.fits(named_call(names, name, *call_of(given.payload))):
        return False
    if given.payload is not None and given.is_plain and not api.redaction:
        return True
    task = api.backend.insights.show_task(given.id)
    if task is None:
        return False
    return sought.fits(named_call(names, name, *api.redaction_of_task(task).call_shown(*call_of(task.payload))))


def runs_with(
    api: Api,
    wanted: RunFilter,
    argument: str,
    *,
    limit: int,
    before: UUID | None = None,
    sort: RunSort = "-when",
    seconds: float | None = None,
) -> RunPage:
    """Return runs that match and have a value among what they were started with, as many as are found in a second."""
    sought, found = Sought.parse(argument), list[RunView]()
    last = time.monotonic() + (LONGEST_WALK if seconds is None else seconds)
    while True:
        page = api.read_list(page_of_runs, wanted, limit=_CANDIDATES, before=before, sort=sort, needles=sought.needles)
        runs = page.runs
        if sort.endswith("when") or (wanted.workflow is not None and not sort.endswith("ended")):
            runs = sorted(runs, key=lambda run: run.id, reverse=sort.startswith("-"))
        notes = api.read_list(notes_of_runs, [run.id for run in runs], _LONGEST)
        names = api.read_list(parameters_of_all, {run.workflow for run in runs if run.workflow})
        for run in runs:
            if run.id in notes and _run_fits(api, sought, names, run, notes[run.id]):
                found.append(run)
            if len(found) == limit or time.monotonic() >= last:
                return RunPage(found, run.id)
        before = page.next
        if before is None or time.monotonic() >= last:
            return RunPage(found, before)


def _run_fits(api: Api, sought: Sought, names: _Names, run: RunView, note: RunNote) -> bool:
    params = readable_params(note.params or {})
    args, kwargs = call_of(note.start) if note.start is not None else ([], params if isinstance(params, dict) else {})
    if not sought.fits(named_call(names, run.workflow, args, kwargs)):
        return False
    if note.is_plain and not api.redaction:
        return True
    return sought.fits(named_call(names, run.workflow, *api.redaction_of_run(run.id).call_shown(args, kwargs)))


@dataclass(frozen=True, kw_only=True)
class Matches(Found):
    """All that matches a text, also among arguments; hidden ones are not searched."""

    exact_tasks: list[TaskView]
    """Tasks with an argument that is this value."""
    exact_runs: list[RunView]
    """The same of runs."""
    tasks_by_argument: list[TaskView]
    """Other tasks with this text in an argument."""
    runs_by_argument: list[RunView]
    """The same of runs."""
    older_exact_tasks: UUID | None = None
    """The task before which arguments were not compared with the value: that takes half a second at most."""
    older_exact_runs: UUID | None = None
    """The same of runs."""
    older_tasks: UUID | None = None
    """The task before which arguments were not searched for the text, for the same reason, or because enough has it."""
    older_runs: UUID | None = None
    """The same of runs."""


def exactly(text: str) -> str:
    """Return what one types to find this value only."""
    sought = Sought.parse(text)
    return text if sought.is_exact or sought.path else f'"{text}"'


def find_all(api: Api, text: str, limit: int, key_scope: KeyScope) -> Matches:
    """Return what matches a text; those with exactly this value of an argument do not vanish among longer ones."""
    found = api.read_list(search, text, limit, queues=key_scope.queues, workflows=key_scope.workflows)
    whole, half = exactly(text), LONGEST_WALK / 2
    tasks, runs = TaskFilter(within=key_scope.queues), RunFilter(within=key_scope.workflows)
    exact_tasks = tasks_with(api, tasks, whole, limit=limit, seconds=half)
    exact_runs = runs_with(api, runs, whole, limit=limit, seconds=half)
    more_tasks, more_runs = TaskPage([], None), RunPage([], None)
    if whole != text and (len(text) >= _SHORTEST or text.isdecimal()):
        more_tasks = tasks_with(api, tasks, text, limit=limit, seconds=half)
        more_runs = runs_with(api, runs, text, limit=limit, seconds=half)
    known = {one.id for one in exact_tasks.tasks} | {one.id for one in exact_runs.runs}
    return Matches(
        **{field.name: getattr(found, field.name) for field in fields(found)},
        exact_tasks=exact_tasks.tasks,
        exact_runs=exact_runs.runs,
        tasks_by_argument=[task for task in more_tasks.tasks if task.id not in known],
        runs_by_argument=[run for run in more_runs.runs if run.id not in known],
        older_exact_tasks=exact_tasks.next,
        older_exact_runs=exact_runs.next,
        older_tasks=more_tasks.next,
        older_runs=more_runs.next,
    )
