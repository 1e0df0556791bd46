"""Schedules of an application: those that stand in its code, and all that are in the database.

Workers have no database, and importing a module should change nothing; so what `@app.schedule` declares is checked at
once, and stored when `orchestrator schedules apply` or `app.schedules.apply()` says so, as a part of deploying.
`orchestrator dev` does it when it starts and when a file changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Unpack

from orchestrator.errors import InvalidTask, InvalidWorkflow, ResultTimeout
from orchestrator.sdk.client import Client
from orchestrator.sdk.code.handle import WorkflowHandle
from orchestrator.sdk.code.workflow import Registry
from orchestrator.sdk.flow.flows import FlowHandle
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.schedule_declarations import (
    DEFAULT_NAME,
    STEP,
    CodeDeclaration,
    T,
    TaskDeclaration,
    Times,
    check_params,
    code_target,
    declaration,
    plain_times,
)
from orchestrator.sdk.tasks.handle import RunHandle
from orchestrator.sdk.waiting.async_variants import async_variant, blocking
from orchestrator.sdk.waiting.steps import Pause, Steps, time_limit

if TYPE_CHECKING:
    from orchestrator.sdk.calls.schedules import ScheduleCalls
    from orchestrator.store.schedules.backfills import BackfillView
    from orchestrator.store.schedules.definitions import SchedulePage, StoredSchedule

_PAGE = 1_000
"""Schedules that are read at once."""
_LOOK_AGAIN = 0.2
"""Seconds between two looks at a backfill."""


def pages(schedules: ScheduleCalls) -> Iterator[list[StoredSchedule]]:
    """Yield all schedules, a page at a time, in order of their names."""
    after: str | None = None
    while True:
        found, after = schedules.page(limit=_PAGE, after=after)
        yield found
        if after is None:
            return


class Schedules(Mapping[str, "Scheduled"]):
    """`app.schedules`: all schedules in the database, by `workflow/name`, or by the workflow where it has one."""

    def __init__(self, client: Client, registry: Registry) -> None:
        self._client = client
        self._registry = registry
        self._declared: dict[str, TaskDeclaration | CodeDeclaration] = {}
        """The schedules in the code: by name, and by workflow and name where it is one of code with several."""

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
            new = declaration(target, name, params, times)
            self._client.refuse_other("@app.schedule", new.target)
            called = new.key.removesuffix(f"/{DEFAULT_NAME}")
            other = self._declared.get(called)
            if other is not None and (other.target.name, other.times) != (new.target.name, new.times):
                raise InvalidTask(f"Two schedules want to be called {called!r}. Give one of them another name=.")
            self._declared[called] = new
            return target

        return note

    def apply(self) -> list[str]:
        """Store what the code declares, all or nothing; return the names. The same again changes nothing."""
        self._registry.modules.load()
        declared = self._declared.values()
        tasks = [one.definition() for one in declared if isinstance(one, TaskDeclaration)]
        of_code = [(one.target.name, one.data, one.code) for one in declared if isinstance(one, CodeDeclaration)]
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
        """Its key: `workflow/name`, or the workflow alone where it has one schedule."""

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

    @blocking
    def wait_ended(self, timeout: float | None = None) -> Steps[BackfillView]:
        """Wait until its last run has ended, and return how that went."""
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
    await_ended = async_variant(wait_ended)
