"""Calls about schedules and backfills, which Postgres stores and the leader fires."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.dag.checks import check
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import REFUSALS, unstorable
from orchestrator.domain.schedules.cron import moment_of
from orchestrator.domain.schedules.schedule import Schedule, fires, from_data, next_fire
from orchestrator.domain.tasks.starts import CodeTarget
from orchestrator.errors import InvalidWorkflow, NotFound, WrongState, did_you_mean
from orchestrator.sdk.backend.part import Part, reading, reading_one
from orchestrator.sdk.calls.schedules import ScheduleCalls
from orchestrator.sdk.dag.schedule_fields import checked_schedule, schedule_of_code
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.flow import runs as flows
from orchestrator.store.runs import creation
from orchestrator.store.schedules import backfills
from orchestrator.store.schedules import definitions as schedules
from orchestrator.store.schedules import fires as store
from orchestrator.store.schedules.backfills import NewBackfill
from orchestrator.store.schedules.definitions import SchedulePage, StoredSchedule
from orchestrator.store.schedules.fires import Target

_MAX_FIRES = 100_000
"""Fires of one backfill, at most."""
_MAX_COMPARED = 1_000
"""Schedules that are searched for a similar name, at most."""
_MAX_PREVIEWED = 20_000
"""Fires in the preview of a backfill, at most."""
_MAX_RANGE = timedelta(days=20 * 366)
"""The longest range of a backfill, because its creation computes the fires of every day."""


def upcoming(schedule: Schedule, after: datetime, count: int) -> list[datetime]:
    times: list[datetime] = []
    fire: datetime | None = after
    while len(times) < count and fire is not None and (fire := next_fire(schedule, fire)) is not None:
        times.append(fire)
    return times


def _upcoming(connection: Connection, key: str, count: int) -> list[datetime]:
    return upcoming(_find(connection, key).schedule, schedules.clock(connection), count)


def _no_backfill(number: int) -> NotFound:
    return NotFound(f"There is no backfill {number}. See: orchestrator schedules backfills")


def _schedule_of_code(workflow: str, data: dict[str, Any], target: CodeTarget) -> Schedule:
    """Return a schedule of a workflow as code. Raise InvalidWorkflow if its data is invalid."""
    schedule = schedule_of_code(data)
    try:
        store.run_of(_code_target(workflow, target), schedule, datetime.now(UTC), bytes(16), workflow)
    except REFUSALS as error:
        raise InvalidWorkflow(f"schedule.params: {error}") from None
    return schedule


def _new_backfill(
    connection: Connection,
    key: str,
    start: datetime | str,
    end: datetime | str | None,
    concurrency: int | None,
    again: bool,
    most: int | None = None,
) -> tuple[NewBackfill, list[datetime], StoredSchedule]:
    """Return a new backfill, its fires and its schedule. Raise InvalidWorkflow if the arguments are invalid."""
    stored = _find(connection, key)
    now = schedules.clock(connection)
    first, last = _moment("start", start, stored.schedule), _moment("end", end or now, stored.schedule)
    if not first < last <= now:
        raise InvalidWorkflow(f"A backfill covers the past: expected start < end <= now, found {start} and {end}.")
    if last - first > _MAX_RANGE:
        raise InvalidWorkflow(
            f"A backfill covers at most 20 years, found {start} and {end}. Backfill the time before "
            f"{(first + _MAX_RANGE).astimezone(stored.schedule.zone).date()} first, then continue from there."
        )
    target = _target(connection, stored)
    limit = _limit(target, concurrency)
    most = min(_MAX_FIRES, most or _MAX_FIRES)
    due = list(islice(fires(stored.schedule, first, last), most + 1))
    if not due:
        raise InvalidWorkflow(f"Schedule {stored.key} has no fire between {first} and {last}: choose another range.")
    if len(due) > most:
        raise InvalidWorkflow(
            f"Schedule {stored.key} has more than {most:,} fires between {first} and {last}. Backfill the "
            f"time before {due[-1].astimezone(stored.schedule.zone).isoformat()} first, then continue from there."
        )
    store.run_of(target, stored.schedule, due[0], bytes(16), stored.key)  # raises if a run could not be created
    new = NewBackfill(stored.workflow, stored.schedule, first, last, limit, again, len(due), due[0])
    return new, due, stored


def _preview(
    connection: Connection,
    key: str,
    start: datetime | str,
    end: datetime | str | None,
    concurrency: int | None,
    again: bool,
) -> tuple[NewBackfill, list[tuple[datetime, bool]]]:
    new, due, _ = _new_backfill(connection, key, start, end, concurrency, again, _MAX_PREVIEWED)
    had = set() if again else backfills.had_runs(connection, new, due)
    return new, [(fire, fire not in had) for fire in due]


def _find(connection: Connection, key: str) -> StoredSchedule:
    matches = schedules.find(connection, key)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise NotFound(
            f"{key!r} has {len(matches)} schedules. Specify one: {', '.join(match.key for match in matches)}."
        )
    keys = [match.key for match in schedules.page(connection, limit=_MAX_COMPARED).schedules]
    raise NotFound(f"There is no schedule {key!r}.{did_you_mean(key, keys)} See: orchestrator schedules list")


def _target(connection: Connection, scheduled: StoredSchedule) -> Target:
    if scheduled.code is not None:
        return _code_target(scheduled.workflow, scheduled.code)
    if scheduled.flow:
        return _flow_target(connection, scheduled.workflow, scheduled.flow_version)
    stored = workflows.latest(connection, scheduled.workflow)
    body = stored and msgspec.json.encode(stored.definition).decode()
    return Target(scheduled.workflow, stored and stored.version, body or None)


def _code_target(name: str, code: CodeTarget) -> Target:
    return Target(name, None, None, msgspec.json.encode(code).decode())


def _flow_target(connection: Connection, name: str, version: int | None) -> Target:
    """Return a version of a flow, by default the newest published one. Raise NotFound if there is none."""
    newest = flows.latest(connection, name)
    if newest is None and version is None:
        names = [other.name for other in workflows.list_latest(connection)]
        names += [other.name for other in flows.list_names(connection)]
        raise NotFound(
            f"There is no workflow {name!r}, and no published flow.{did_you_mean(name, names)} A workflow that is code "
            f"is scheduled by its application: @app.schedule above @app.workflow, or app.schedules.set(…)."
        )
    if version is not None and flows.read(connection, name, version) is None:
        known = f"the newest is {newest.version}" if newest is not None else "none is published"
        raise NotFound(f"Flow {name!r} has no version {version}; {known}.")
    return Target(name, newest.version if newest is not None and version is None else version, None, flow=True)


def _check_workflow(definition: Definition, schedule: dict[str, Any], version: int | None) -> None:
    if version is not None:
        raise InvalidWorkflow(
            f"{definition.name!r} is a workflow, and its schedules start the newest version: omit the version, "
            "which is for flows."
        )
    problems = [
        problem
        for problem in check(msgspec.structs.replace(definition, schedule=schedule))
        if problem.path[0] == "schedule"
    ]
    if problems:
        raise InvalidWorkflow("\n".join(f"{_dotted(problem.path)}: {problem.message}" for problem in problems))


def _limit(target: Target, requested: int | None) -> int:
    """Return how many runs of a backfill may be open at once."""
    own = target.definition and msgspec.json.decode(target.definition, type=Definition).concurrency
    if own and requested is not None:
        raise InvalidWorkflow(
            f"Workflow {target.name!r} has a concurrency limit of its own: omit that of the backfill."
        )
    limit = own.limit if own else 1 if requested is None else requested
    if limit < 1:
        raise InvalidWorkflow(f"A backfill runs at least 1 at a time, found a concurrency of {limit}.")
    return limit


def _moment(what: str, value: datetime | str, schedule: Schedule) -> datetime:
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else value
        return moment_of(found, schedule.zone) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):  # OverflowError: the years 1 and 9999 in a zone other than UTC
        raise InvalidWorkflow(f"{what}: expected a time such as 2024-01-31T09:30, found {value!s:.100}.") from None


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


class ScheduleBackend(Part, ScheduleCalls):
    """Calls about schedules and backfills, by name."""

    find = reading(_find)
    upcoming = reading(_upcoming)
    preview_backfill = reading(_preview)
    show_backfill = reading_one(backfills.show, _no_backfill)
    list_backfills = reading(backfills.list_newest)

    # -- schedules

    def page(self, *, limit: int, after: str | None, within: str = "") -> SchedulePage:
        """Return a page of schedules, ordered by name, of workflows whose names begin with `within`."""
        with self._reading() as connection:
            return schedules.page(connection, limit=limit, after=after, within=within)

    def apply(
        self, definitions: Iterable[Definition], step: str, of_code: Iterable[tuple[str, dict[str, Any], CodeTarget]]
    ) -> None:
        """Store workflows of one scheduled task each, and schedules of workflows as code (`of_code`).

        Do not overwrite a workflow with other steps.
        """
        with self._connections.changing("the schedules were stored, all of them or none") as connection:
            for definition in definitions:
                existing = workflows.latest(connection, definition.name)
                if existing is not None and [other.name for other in existing.definition.steps] != [step]:
                    raise InvalidWorkflow(
                        f"The schedule of task {definition.steps[0].task!r} cannot be named "
                        f"{definition.name!r}, because a workflow has that name. Pass a different name=."
                    )
                if workflows.apply(connection, definition).created:
                    self._connections.record(connection, "apply", "workflow", definition.name)
            now = schedules.clock(connection)
            for workflow, data, target in of_code:
                schedule = _schedule_of_code(workflow, data, target)
                schedules.put(connection, workflow, schedule, now, declared=True, code=target)

    def claim_origin(self, origin: str, keys: Sequence[str], *, prune: bool) -> list[str]:
        with self._connections.changing(f"the declarations of {origin} were stored", nudge=False) as connection:
            forgotten = schedules.claim_origin(connection, origin, keys)
            if prune:
                for key in forgotten:
                    stored = _find(connection, key)
                    schedules.delete(connection, stored.workflow, stored.name)
                    self._connections.record(connection, "delete", "schedule", stored.key)
        return forgotten

    def set_code(self, workflow: str, data: dict[str, Any], target: CodeTarget) -> StoredSchedule:
        schedule = _schedule_of_code(workflow, data, target)
        with self._connections.changing(f"the schedule of workflow {workflow!r} was stored") as connection:
            return self._put(connection, workflow, schedule, code=target)

    def set(self, workflow: str, data: dict[str, Any], version: int | None = None) -> StoredSchedule:
        if problem := unstorable(data):
            raise InvalidWorkflow(f"schedule: {problem}.")
        read = checked_schedule(data)
        schedule = from_data(read)
        with self._connections.changing(f"the schedule of workflow {workflow!r} was stored") as connection:
            stored = workflows.latest(connection, workflow)
            if stored is not None:
                _check_workflow(stored.definition, read, version)
            else:
                target, now = _flow_target(connection, workflow, version), schedules.clock(connection)
                store.run_of(target, schedule, now, bytes(16), workflow)  # raises if its parameters are invalid
            return self._put(connection, workflow, schedule, flow=stored is None, flow_version=version)

    def _put(self, connection: Connection, workflow: str, schedule: Schedule, **target: Any) -> StoredSchedule:
        now = schedules.clock(connection)
        if next_fire(schedule, now) is None:
            raise InvalidWorkflow(f"The schedule {schedule.description()} would never fire: that time has passed.")
        schedules.put(connection, workflow, schedule, now, **target)
        found = _find(connection, f"{workflow}/{schedule.name}")
        self._connections.record(connection, "set", "schedule", found.key, when=schedule.description())
        return found

    def pause(self, key: str) -> None:
        with self._connections.changing(f"schedule {key!r} was paused", nudge=False) as connection:
            stored = _find(connection, key)
            if not schedules.pause(connection, stored.workflow, stored.name):
                raise WrongState(f"Schedule {stored.key} is paused already.")
            self._connections.record(connection, "pause", "schedule", stored.key)

    def resume(self, key: str) -> None:
        with self._connections.changing(f"schedule {key!r} was resumed") as connection:
            stored = _find(connection, key)
            if not schedules.resume(connection, stored, schedules.clock(connection)):
                raise WrongState(f"Schedule {stored.key} is not paused.")
            self._connections.record(connection, "resume", "schedule", stored.key)

    def delete(self, key: str) -> StoredSchedule:
        with self._connections.changing(f"schedule {key!r} was deleted", nudge=False) as connection:
            stored = _find(connection, key)
            schedules.delete(connection, stored.workflow, stored.name)
            self._connections.record(connection, "delete", "schedule", stored.key)
        return stored

    def trigger(self, key: str, run_id: bytes) -> StoredSchedule:
        with self._connections.changing(f"run {to_text(run_id)} was stored") as connection:
            stored = _find(connection, key)
            target, now = _target(connection, stored), schedules.clock(connection)
            run = store.run_of(target, stored.schedule, now, run_id, stored.key, self._vault)
            creation.create(connection, [dags.sealed(run, self._vault)])
            self._connections.record(connection, "trigger", "schedule", stored.key, run=to_text(run_id))
        return stored

    # -- backfills

    def backfill(
        self, key: str, start: datetime | str, end: datetime | str | None, concurrency: int | None, again: bool
    ) -> int:
        with self._connections.changing(f"the backfill of schedule {key!r} was stored") as connection:
            new, _, schedule = _new_backfill(connection, key, start, end, concurrency, again)
            number = backfills.add(connection, new, flow=schedule.flow, flow_version=schedule.flow_version)
            self._connections.record(connection, "backfill", "schedule", key, number=number, fires=new.total)
        return number

    def cancel_backfill(self, number: int) -> None:
        view = self.show_backfill(number)
        if view.is_settled:
            raise WrongState(f"Backfill {number} has ended.")
        with self._connections.changing(f"backfill {number} was cancelled") as connection:
            backfills.cancel(connection, view)
            self._connections.record(connection, "cancel", "backfill", str(number), workflow=view.workflow)
