"""Schedules of an application: those that stand in its code, and all that are in the database.

Workers have no database, and importing a module should change nothing; so what `@app.schedule` declares is checked at
once, and stored when `orchestrator schedules apply` or `app.schedules.apply()` says so, as a part of deploying.
`orchestrator dev` does it when it starts and when a file changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from orchestrator.domain.dag.expression import parse_template
from orchestrator.domain.plain import stored_json, unstorable
from orchestrator.domain.tasks.starts import CodeTarget
from orchestrator.errors import InvalidTask, InvalidWorkflow, ResultTimeout
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.client import Client
from orchestrator.sdk.code.handle import WorkflowHandle
from orchestrator.sdk.code.workflow import CodeWorkflow, Registry
from orchestrator.sdk.dag.registered import check_fit, take_over
from orchestrator.sdk.flow.handle import FlowHandle
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.schedule_pages import pages
from orchestrator.sdk.tasks.handle import RunHandle
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.waiting.async_variants import async_variant
from orchestrator.sdk.waiting.steps import Pause, Steps, complete, time_limit

if TYPE_CHECKING:
    from orchestrator.domain.dag.definition import Definition
    from orchestrator.store.schedules.backfills import BackfillView
    from orchestrator.store.schedules.definitions import SchedulePage, StoredSchedule

T = TypeVar("T", bound="Task[..., Any] | CodeWorkflow[..., Any]")

DEFAULT_NAME = "default"
"""What a schedule is called unless it has a name."""
_A_RUN, _A_FIRE = "00000000-0000-7000-8000-000000000000", "2000-01-01T00:00:00+00:00"
"""What parameters are tried with."""
STEP = "task"
"""The one step of the workflow that a scheduled task becomes."""
_WHOLE = re.compile(r"\$\{([^{}]+)\}")
"""A value that is one expression."""
_LOOK_AGAIN = 0.2
"""Seconds between two looks at a backfill."""


class Times(TypedDict, total=False):
    """When a schedule fires, and what happens then; exactly one of cron, every and at is given."""

    cron: str
    every: float | str | timedelta
    at: str | datetime
    start: str | date
    """Not before this moment, or this day; `end`: only before it. A datetime is a date, too."""
    end: str | date
    timezone: str
    overlap: Literal["skip", "queue", "allow", "cancel_previous"]
    catch_up: str
    jitter: float | str | timedelta
    paused: bool


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A task that is to run by itself, as it stands in the code."""

    name: str
    task: Task[..., Any]
    times: Times
    params: Mapping[str, Any]

    @property
    def key(self) -> str:
        """What the schedule is called in the database."""
        return f"{self.name}/{DEFAULT_NAME}"

    @property
    def target_name(self) -> str:
        """What it starts."""
        return self.task.name

    def definition(self) -> Definition:
        """Return it as a workflow of one step, or say what is wrong with it."""
        from orchestrator.sdk.dag import (
            definitions,  # loads YAML and cron, which a worker without schedules does without
        )

        source = f"schedule of task {self.task.name!r}"
        further = partial(take_over, tasks={self.task.name: self.task})

        def complete_with(parts: Mapping[str, Any]) -> Definition:
            about = {"name": self.name, "description": f"Task {self.task.name}, scheduled in the code."}
            data = {**about, "queue": self.task.queue, "schedule": plain_times(self.times), **parts}
            return definitions.completed(definitions.from_data(data, source), source, further)

        try:
            return complete_with(_parameters(self.task, self.params))
        except InvalidWorkflow:  # a key that a function computes wants constants
            return complete_with({"tasks": {STEP: {"task": self.task.name, "input": dict(self.params)}}})


def _parameters(task: Task[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters and the step of the workflow that a scheduled task is.

    What the declaration gives, and the defaults of the function, are defaults of parameters, so that another schedule
    of the workflow can give others. A value that is put together from several expressions stays as it is.
    """
    params: dict[str, Any] = {}
    filled = {**task._signature.plain_defaults(), **given}
    for name, value in filled.items():
        is_constant = unstorable(value) is None and "${" not in stored_json(value)
        whole = _WHOLE.fullmatch(value) if isinstance(value, str) else None
        if whole is not None:
            params[name] = {"default": None}
            filled[name] = f"${{default(params.{name}, {whole[1]})}}"
        elif is_constant:
            params[name] = {"default": value}
            filled[name] = f"${{params.{name}}}"
    return {"params": params, "tasks": {STEP: {"task": task.name, "input": filled}}}


@dataclass(frozen=True, kw_only=True)
class CodeDeclaration:
    """A workflow as code that is to start by itself, as it stands in the code."""

    name: str
    workflow: CodeWorkflow[..., Any]
    times: Times
    params: Mapping[str, Any]

    @property
    def key(self) -> str:
        """What the schedule is called in the database."""
        return f"{self.workflow.name}/{self.name}"

    @property
    def target_name(self) -> str:
        """What it starts."""
        return self.workflow.name

    @property
    def data(self) -> dict[str, Any]:
        """The schedule in the shape of a file."""
        return {"name": self.name, "params": dict(self.params), **plain_times(self.times)}

    def check(self) -> None:
        """Say what is wrong with it."""
        from orchestrator.sdk.dag.schedule_fields import schedule_of_code  # loads YAML and cron, too

        try:
            schedule_of_code(self.data)
            check_params(self.workflow, self.params)
        except InvalidWorkflow as error:
            raise InvalidWorkflow(f"schedule of workflow {self.workflow.name!r}: {error}") from None


def check_params(workflow: CodeWorkflow[..., Any], params: Mapping[str, Any]) -> None:
    """Refuse what a workflow's function could not be called with at a fire."""
    workflow._signature.check((), params)
    info = {"id": _A_RUN, "workflow": workflow.name, "version": workflow.version, "fire_time": _A_FIRE}
    workflow._signature.restore([], parse_template(dict(params)).render({"run": info}))


def code_target(workflow: CodeWorkflow[..., Any]) -> CodeTarget:
    """Return how a schedule starts runs of a workflow."""
    timeout = workflow._code_options.seconds or None
    return CodeTarget(version=workflow.version, queue=workflow._queue, timeout=timeout)


def plain_times(times: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a schedule in the shape of a file."""
    return {
        name: value.total_seconds()
        if isinstance(value, timedelta)
        else value.isoformat()
        if isinstance(value, date)
        else value
        for name, value in times.items()
        if value is not None
    }


class Schedules(Mapping[str, "Scheduled"]):
    """`app.schedules`: all schedules in the database, by `workflow/name`, or by the workflow where it has one."""

    def __init__(self, client: Client, registry: Registry) -> None:
        self._client = client
        self._registry = registry
        self._declared: dict[str, Declaration | CodeDeclaration] = {}
        """What stands in the code: by name, and by workflow and name where it is one of code with several."""

    def __getitem__(self, key: str) -> Scheduled:
        return Scheduled(self._client, key, self._registry)

    def __contains__(self, key: object) -> bool:
        return any(key in (name, name.rpartition("/")[0]) for name in self)

    def __iter__(self) -> Iterator[str]:
        return (stored.key for page in pages(self._client.backend.schedules) for stored in page)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def names(self) -> list[str]:
        """Return what all schedules in the database are called. To iterate over `app.schedules` reads page by page."""
        return list(self)

    def page(self, limit: int = 50, after: str | None = None) -> SchedulePage:
        """Return how some schedules are doing, in order of their names; `after` is the `next` of the page before."""
        return self._client.backend.schedules.page(limit=limit, after=after)

    def _declare(self, name: str | None, params: Mapping[str, Any], times: Times) -> Callable[[T], T]:
        """Return the decorator that notes a schedule of a task or a workflow as code."""

        def note(target: T) -> T:
            if isinstance(target, CodeWorkflow):
                self._note(self._of_code(target, name, params, times))
            elif isinstance(target, Task):
                chosen = check_name("schedule", name or target.name)
                check_fit(target)
                target._signature.check((), params)
                declaration = Declaration(name=chosen, task=target, times=times, params=params)
                declaration.definition()  # says what is wrong with it, here where it stands
                self._note(declaration)
            else:
                raise InvalidTask(
                    f"@app.schedule goes above @app.task or @app.workflow, on a task or a workflow; "
                    f"found {target!r:.100}."
                )
            return target

        return note

    def _note(self, new: Declaration | CodeDeclaration) -> None:
        called = new.key.removesuffix(f"/{DEFAULT_NAME}")
        other = self._declared.get(called)
        if other is not None and (other.target_name, other.times) != (new.target_name, new.times):
            raise InvalidTask(f"Two schedules want to be called {called!r}. Give one of them another name=.")
        self._declared[called] = new

    @staticmethod
    def _of_code(
        workflow: CodeWorkflow[..., Any], name: str | None, params: Mapping[str, Any], times: Times
    ) -> CodeDeclaration:
        chosen = check_name("schedule", name or DEFAULT_NAME)
        declaration = CodeDeclaration(name=chosen, workflow=workflow, times=times, params=params)
        declaration.check()
        return declaration

    def apply(self) -> list[str]:
        """Store what the code declares, all or nothing; return the names. The same again changes nothing."""
        self._registry.modules.load()
        tasks = [one.definition() for one in self._declared.values() if isinstance(one, Declaration)]
        of_code = [
            (one.workflow.name, one.data, code_target(one.workflow))
            for one in self._declared.values()
            if isinstance(one, CodeDeclaration)
        ]
        self._client.backend.schedules.apply(tasks, STEP, of_code)
        return list(self._declared)

    def forget(self, origin: str, *, prune: bool = False) -> list[str]:
        """Note that what the code declares is of the application `origin`, such as `shop.tasks:app`.

        Return the keys of those that this application once declared and does no more. They are marked, and go on to
        fire until they are deleted; `prune` deletes them.
        """
        self._registry.modules.load()
        keys = [declaration.key for declaration in self._declared.values()]
        return self._client.backend.schedules.claim_origin(origin, keys, prune=prune)

    def set(
        self,
        workflow: str,
        /,
        name: str = "default",
        *,
        params: Mapping[str, Any] | None = None,
        version: int | None = None,
        **times: Unpack[Times],
    ) -> None:
        """Set a schedule of a workflow, beside the one in its definition; the same name again replaces it.

        The workflow may be one of code that this application has, or a flow. Of a flow, the version is started that is
        the newest published one at each fire, or always this `version`.
        """
        data = {"name": name, "params": dict(params or {}), **plain_times(times)}
        self._registry.modules.load()
        code = self._registry.workflows.get(workflow)
        if code is None:
            self._client.backend.schedules.set(workflow, data, version)
        elif version is not None:
            raise InvalidWorkflow(
                f"{workflow!r} is a workflow as code, and starts in the version that this application has: leave out "
                f"the version, which is for flows."
            )
        else:
            check_params(code, params or {})
            self._client.backend.schedules.set_code(workflow, data, code_target(code))

    anames = async_variant(names)
    apage = async_variant(page)
    aapply = async_variant(apply)
    aforget = async_variant(forget)
    aset = async_variant(set)


class Scheduled:
    """One schedule in the database."""

    def __init__(self, client: Client, key: str, registry: Registry) -> None:
        self._client = client
        self._registry = registry
        self.key = key
        """What it is called: `workflow/name`, or the workflow alone where it has one schedule."""

    def __repr__(self) -> str:
        return f"<Schedule {self.key}>"

    def status(self) -> StoredSchedule:
        """Return how it is doing: paused or not, the last and the next fire, the last run, and what went wrong."""
        return self._client.backend.schedules.find(self.key)

    def next(self, count: int = 5) -> list[datetime]:
        """Return the fires that come next."""
        return self._client.backend.schedules.upcoming(self.key, count)

    def pause(self) -> None:
        """Fire no more until it is resumed. Applying a definition again does not end the pause."""
        self._client.backend.schedules.pause(self.key)

    def resume(self) -> None:
        """Fire again, from now on; what came during the pause is not made up for."""
        self._client.backend.schedules.resume(self.key)

    def trigger(self) -> RunHandle[Any] | WorkflowHandle[Any] | FlowHandle:
        """Start a run right now, whatever else is open; the fire time is now."""
        run = new_id()
        stored = self._client.backend.schedules.trigger(self.key, run)
        if stored.flow:
            return FlowHandle(self._client, run)
        if stored.code is None:
            return RunHandle(self._client, run)
        workflow = self._registry.workflows.get(stored.workflow)
        return WorkflowHandle(self._client, run, None if workflow is None else workflow._signature)

    def delete(self) -> None:
        """Remove the schedule; its runs stay."""
        self._client.backend.schedules.delete(self.key)

    def backfill(
        self,
        start: datetime | str,
        end: datetime | str | None = None,
        *,
        concurrency: int | None = None,
        again: bool = False,
    ) -> Backfill:
        """Start the runs of all fires from `start` on and before `end` (now), `concurrency` (1) at a time.

        A workflow that has a concurrency of its own keeps to that. A fire that has had its run gets no other, unless
        `again` is said. Times without an offset are in the schedule's time zone.
        """
        started = self._client.backend.schedules.backfill(self.key, start, end, concurrency, again)
        return Backfill(self._client, started)

    astatus = async_variant(status)
    anext = async_variant(next)
    apause = async_variant(pause)
    aresume = async_variant(resume)
    atrigger = async_variant(trigger)
    adelete = async_variant(delete)
    abackfill = async_variant(backfill)


class Backfill:
    """A backfill that was asked for."""

    def __init__(self, client: Client, number: int) -> None:
        self._client = client
        self.id = number
        """Its number, as `orchestrator schedules backfills` shows it."""

    def progress(self) -> BackfillView:
        """Return how far it is."""
        return self._client.backend.schedules.show_backfill(self.id)

    def cancel(self) -> None:
        """Start no more of it, and cancel its open runs."""
        self._client.backend.schedules.cancel_backfill(self.id)

    def wait_ended(self, timeout: float | None = None) -> BackfillView:
        """Wait until its last run has ended, and return how that went."""
        return complete(self._wait_ended(timeout))

    def _wait_ended(self, timeout: float | None = None) -> Steps[BackfillView]:
        limit = time_limit(timeout)
        while True:
            with limit:
                view = self.progress()
            if view.is_over:
                return view
            if limit.is_up:
                raise ResultTimeout(f"Backfill {self.id} has not ended: {view.done} of {view.total} after {timeout} s.")
            yield Pause(_LOOK_AGAIN)

    aprogress = async_variant(progress)
    acancel = async_variant(cancel)
    await_ended = async_variant(wait_ended, _wait_ended)
