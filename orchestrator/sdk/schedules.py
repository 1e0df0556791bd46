"""Schedules of an application: those declared in its code, and all that are in the database.

`@app.schedule` checks a schedule at once, but does not store it: workers have no database, and an import should change
nothing. A deploy stores it with `orchestrator schedules apply` or `app.schedules.apply()`. `orchestrator dev` stores
it on start and when a file changes.
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
from orchestrator.sdk.values.sorting import sorted_sets
from orchestrator.sdk.waiting.async_variants import async_variant, blocking
from orchestrator.sdk.waiting.steps import Pause, Steps, time_limit

if TYPE_CHECKING:
    from orchestrator.sdk.calls.schedules import ScheduleCalls
    from orchestrator.store.schedules.backfills import BackfillView
    from orchestrator.store.schedules.definitions import SchedulePage, StoredSchedule

_PAGE_SIZE = 1_000
_POLL_INTERVAL = 0.2
"""Seconds between two polls of a backfill."""


def pages(schedules: ScheduleCalls) -> Iterator[list[StoredSchedule]]:
    """Yield all schedules, page by page, ordered by name."""
    after: str | None = None
    while True:
        found, after = schedules.page(limit=_PAGE_SIZE, after=after)
        yield found
        if after is None:
            return


class Schedules(Mapping[str, "Scheduled"]):
    """`app.schedules`: all schedules in the database, by `workflow/name`, or by workflow if it has one schedule."""

    def __init__(self, client: Client, registry: Registry) -> None:
        self._client = client
        self._registry = registry
        self._declared: dict[str, TaskDeclaration | CodeDeclaration] = {}
        """The schedules in the code, by key; the key of an unnamed schedule is the name of its task or workflow."""

    def __getitem__(self, key: str) -> Scheduled:
        return Scheduled(self._client, key, self._registry)

    def __contains__(self, key: object) -> bool:
        return any(key in (name, name.rpartition("/")[0]) for name in self)

    def __iter__(self) -> Iterator[str]:
        return (stored.key for page in pages(self._client.backend.schedules) for stored in page)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def names(self) -> list[str]:
        """Return the keys of all schedules in the database. Iterate over `app.schedules` to read page by page."""
        return list(self)

    def page(self, limit: int = 50, after: str | None = None) -> SchedulePage:
        """Return one page of schedules and their status, ordered by name. `after` is `next` of the previous page."""
        return self._client.backend.schedules.page(limit=limit, after=after)

    def _declare(self, name: str | None, params: Mapping[str, Any], times: Times) -> Callable[[T], T]:
        """Return a decorator that registers a schedule of a task or a workflow as code."""

        def register(target: T) -> T:
            new = declaration(target, name, sorted_sets(params), times)
            self._client.refuse_other("@app.schedule", new.target)
            key = new.key.removesuffix(f"/{DEFAULT_NAME}")
            other = self._declared.get(key)
            if other is not None and (other.target.name, other.times) != (new.target.name, new.times):
                raise InvalidTask(
                    f"Schedule name {key!r} is used twice. Pass a different name= to one of the schedules."
                )
            self._declared[key] = new
            return target

        return register

    def apply(self) -> list[str]:
        """Store all schedules that the code declares, in one transaction, and return their names. Idempotent."""
        self._registry.modules.load()
        declared = self._declared.values()
        tasks = [item.definition() for item in declared if isinstance(item, TaskDeclaration)]
        of_code = [(item.target.name, item.data, item.code) for item in declared if isinstance(item, CodeDeclaration)]
        self._client.backend.schedules.apply(tasks, STEP, of_code)
        return list(self._declared)

    def forget(self, origin: str, *, prune: bool = False) -> list[str]:
        """Record that the application `origin`, such as `shop.tasks:app`, declares the schedules in the code.

        Return the keys of schedules that the application declared before and no longer declares. They are marked, but
        continue to fire until they are deleted; `prune` deletes them.
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
        """Create a schedule of a workflow, in addition to the one in its definition, or replace the one of this name.

        The workflow may also be a flow, or a workflow as code of this application. Each fire starts the newest
        published version of a flow, or always `version` if given.
        """
        data = {"name": name, "params": dict(params or {}), **plain_times(times)}
        self._registry.modules.load()
        code = self._registry.workflows.get(workflow)
        if code is None:
            self._client.backend.schedules.set(workflow, data, version)
        elif version is not None:
            raise InvalidWorkflow(
                f"{workflow!r} is a workflow as code, and starts in the version that this application has: omit "
                "the version, which is for flows."
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
        """The key of the schedule: `workflow/name`, or the workflow alone if it has one schedule."""

    def __repr__(self) -> str:
        return f"<Schedule {self.key}>"

    def status(self) -> StoredSchedule:
        """Return the status of the schedule: whether it is paused, its last and next fire, its last run and error."""
        return self._client.backend.schedules.find(self.key)

    def next(self, count: int = 5) -> list[datetime]:
        """Return the times of the next fires."""
        return self._client.backend.schedules.upcoming(self.key, count)

    def pause(self) -> None:
        """Pause the schedule until it is resumed. Applying its definition again does not end the pause."""
        self._client.backend.schedules.pause(self.key)

    def resume(self) -> None:
        """Resume the schedule. Fires missed during the pause are not made up."""
        self._client.backend.schedules.resume(self.key)

    def trigger(self) -> RunHandle[Any] | WorkflowHandle[Any] | FlowHandle:
        """Start a run now, even if other runs are open. Its fire time is the current time."""
        run = new_id()
        stored = self._client.backend.schedules.trigger(self.key, run)
        if stored.flow:
            return FlowHandle(self._client, run)
        if stored.code is None:
            return RunHandle(self._client, run)
        workflow = self._registry.workflows.get(stored.workflow)
        return WorkflowHandle(self._client, run, None if workflow is None else workflow._signature)

    def delete(self) -> None:
        """Delete the schedule. Its runs remain."""
        self._client.backend.schedules.delete(self.key)

    def backfill(
        self,
        start: datetime | str,
        end: datetime | str | None = None,
        *,
        concurrency: int | None = None,
        again: bool = False,
    ) -> Backfill:
        """Start the runs of all fires from `start` until before `end` (default: now), `concurrency` (1) at a time.

        A concurrency limit of the workflow itself applies, too. A fire that already had a run is skipped, unless
        `again` is true. Times without an offset are in the schedule's time zone.
        """
        backfill_id = self._client.backend.schedules.backfill(self.key, start, end, concurrency, again)
        return Backfill(self._client, backfill_id)

    astatus = async_variant(status)
    anext = async_variant(next)
    apause = async_variant(pause)
    aresume = async_variant(resume)
    atrigger = async_variant(trigger)
    adelete = async_variant(delete)
    abackfill = async_variant(backfill)


class Backfill:
    """A backfill that was started."""

    def __init__(self, client: Client, number: int) -> None:
        self._client = client
        self.id = number
        """The number of the backfill, as `orchestrator schedules backfills` displays it."""

    def progress(self) -> BackfillView:
        """Return the progress of the backfill."""
        return self._client.backend.schedules.show_backfill(self.id)

    def cancel(self) -> None:
        """Stop the backfill and cancel its open runs."""
        self._client.backend.schedules.cancel_backfill(self.id)

    @blocking
    def wait_ended(self, timeout: float | None = None) -> Steps[BackfillView]:
        """Wait until the last run of the backfill has ended, and return the final progress."""
        limit = time_limit(timeout)
        while True:
            with limit:
                view = self.progress()
            if view.is_over:
                return view
            if limit.is_up:
                raise ResultTimeout(f"Backfill {self.id} has not ended: {view.done} of {view.total} after {timeout} s.")
            yield Pause(_POLL_INTERVAL)

    aprogress = async_variant(progress)
    acancel = async_variant(cancel)
    await_ended = async_variant(wait_ended)
