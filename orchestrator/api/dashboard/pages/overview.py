"""The overview page, and the pulse that every open page polls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from orchestrator.api.context import MAX_PAGE_SIZE, Api
from orchestrator.api.dashboard.charts import Hour, hour
from orchestrator.api.dashboard.rendering import page, pages, visitor
from orchestrator.api.endpoints import JSON
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.routes import system
from orchestrator.domain.access import KeyScope
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.errors import Unavailable
from orchestrator.monitoring import trouble
from orchestrator.monitoring.times import counted, present
from orchestrator.monitoring.trouble import Trouble
from orchestrator.store import throughput
from orchestrator.store.insights import Overview, QueueCounts, RunFilter, list_queues, page_of_approvals, page_of_runs
from orchestrator.store.insights import overview as overview_of
from orchestrator.store.insights.attempts import first_starts
from orchestrator.store.insights.failures import (
    MAX_SCANNED,
    Failures,
    GroupKey,
    Handled,
    handled_groups,
    latest_failures,
)
from orchestrator.store.insights.run_lists import FailedRuns, count_failed_runs
from orchestrator.store.insights.system import Ends
from orchestrator.store.throughput import Throughput

routes = pages("/ui")

_SHARED = 1.0
"""Seconds for which pages share a read."""
_RECENT_MINUTES = 5
"""Minutes whose failures need attention, unless all groups of the last hour are acknowledged."""
_MAX_GROUPS = 8
HOUR = timedelta(hours=1)
ROLLOUT = timedelta(minutes=10)
"""Workers that start within this time of each other belong to one rollout."""
_MAX_COUNTED = 100
"""Runs that a hint counts, at most."""
_MAX_FAILURES = 1_000
"""Failed tasks that are grouped for this page, at most."""


@dataclass(frozen=True, kw_only=True)
class SystemState:
    """The state of the whole system, for keys that are not bound."""

    overview: Overview
    troubles: list[Trouble]
    heard_at: datetime | None = None
    """When a leader last heard of a worker, if none hears them now."""

    @property
    def is_led(self) -> bool:
        """Whether a leader hears the workers."""
        return self.overview.hears_workers and not any(one.kind in trouble.STOPPING for one in self.troubles)

    def besides(self, outage: Trouble | None) -> list[Trouble]:
        """Return the problems, without the outage that the page shows at its top."""
        shown_above = None if outage is None else (outage.kind, outage.about)
        return [problem for problem in self.troubles if (problem.kind, problem.about) != shown_above]

    @property
    def fingerprint(self) -> str:
        """A hash of the kinds of problems. Pages reload when it changes."""
        kinds = sorted(f"{problem.kind} {problem.about}" for problem in self.troubles)
        return blake2b("\n".join(kinds).encode(), digest_size=6).hexdigest()


def read_system_state(api: Api) -> SystemState:
    """Return the state of the system and its problems, as `orchestrator status` shows them."""
    queues = read_queues(api, KeyScope())
    ends = _ends(read_minutes(api, KeyScope()))
    found = api.read(overview_of, queues=queues, ends=ends)
    insights = api.backend.insights
    health, held = insights.redis(found.events.generation if found.events else None, [queue.queue for queue in queues])
    transactions = insights.long_transactions(api.settings.long_transaction)
    troubles = (
        *trouble.of_the_system(found, api.settings.lease, health.complaint),
        *trouble.of_shards(found, api.settings.shards),
        *trouble.of_redis(health),
        *trouble.foreign_data(held),
        *trouble.of_postgres(insights.connections(), transactions, insights.dead_rows()),
        *trouble.of_payload_store(api.settings.payload_store),
    )
    whole = SystemState(overview=replace(found, standbys=held.standbys), troubles=trouble.by_gravity(troubles))
    if whole.is_led:
        return whole
    return replace(whole, heard_at=max((worker.seen_at for worker in insights.list_workers()), default=None))


def read_queues(api: Api, key_scope: KeyScope) -> list[QueueCounts]:
    """Return the queues, read once a second at most."""
    return api.recent.get(("queues", key_scope), _SHARED, lambda: api.read(list_queues, key_scope.queues))


def read_is_led(api: Api) -> bool:
    """Return whether a leader hears the workers; otherwise the number of workers of a queue is unknown."""
    return api.outages.last() is None


def read_minutes(api: Api, key_scope: KeyScope) -> list[Throughput]:
    """Return the last hour by minute, read once a second at most."""
    return api.recent.get(("minutes", key_scope), _SHARED, lambda: system.read_minutes(api, key_scope))


def read_hour(api: Api, key_scope: KeyScope) -> Hour:
    return hour(read_minutes(api, key_scope), datetime.now(UTC))


def _ends(minutes: list[Throughput]) -> Ends:
    """Return the numbers of ended tasks by state, for the last minute and for the hour."""
    last_counts, hour_counts = (
        {str(state): sum(getattr(one, state) for one in part) for state in ENDED_TASK_STATES}
        for part in (minutes[-1:], minutes)
    )
    return last_counts, hour_counts


def count_approvals(api: Api, key_scope: KeyScope) -> str:
    """Return the number of open approvals, with a plus if not all were counted; empty for none."""

    def read() -> str:
        page_found = api.read(page_of_approvals, limit=MAX_PAGE_SIZE, within=key_scope.workflows)
        return f"{len(page_found.approvals) or ''}{'+' if page_found.approvals and page_found.next else ''}"

    return api.recent.get(("approvals", key_scope), 5 * _SHARED, read)


def count_unreplayed(api: Api) -> str:
    """Return the number of runs of code that no live worker has replayed, with a plus if there may be more."""
    read = partial(api.read, page_of_runs, RunFilter(unreplayed=True), limit=_MAX_COUNTED)
    found = len(api.recent.get(("unreplayed",), 30 * _SHARED, read).runs)
    return f"{found or ''}{'+' if found == _MAX_COUNTED else ''}"


def count_failed_runs_lately(api: Api, key_scope: KeyScope) -> str:
    """Return the number of runs that failed in the last hour, such as `2 runs`; empty for none."""
    read = partial(api.read_list, count_failed_runs, present() - HOUR, key_scope.workflows)
    found: FailedRuns = api.recent.get(("failed runs", key_scope, visitor().pending_requests()), 5 * _SHARED, read)
    return f"{'at least ' if found.is_part else ''}{counted(found.runs, 'run')}" if found.runs else ""


class Mark(NamedTuple):
    """An event of the system, marked in a chart."""

    at: float
    """The position in the chart, from 0 to 1."""
    when: datetime
    what: str
    kind: str
    """`release`, `start` (of workers without a new release) or `leader`."""


def read_marks(api: Api, key_scope: KeyScope, since: datetime, span: timedelta = HOUR) -> list[Mark]:
    """Return new releases, starts of workers and changes of the leader since a chart's start; none for bound keys."""
    if key_scope.is_bound:
        return []
    workers = api.recent.get(("workers",), 5.0, api.backend.insights.list_workers)
    started = {worker.parent or worker.id: (worker.worker_started_at, worker.release or "") for worker in workers}
    releases = api.recent.get(("releases", span), 10.0, lambda: api.read(first_starts, since))
    terms = api.recent.get(("terms",), 10.0, lambda: api.read(throughput.terms, present() - throughput.KEPT))
    rollouts = dict(releases)  # the start of the last rollout of each release
    starts: Counter[tuple[datetime, str]] = Counter()
    for at, release in sorted(one for one in started.values() if one[0] >= since):
        if release not in rollouts or at - rollouts[release] > ROLLOUT:
            rollouts[release] = at
        if rollouts[release] != releases.get(release):
            starts[rollouts[release], release] += 1
    events = [(at, "release", f"release {name} deployed") for name, at in releases.items()]
    for (at, release), count in starts.items():
        events.append((at, "start", f"{counted(count, 'worker')}{release and f' of release {release}'} started"))
    events += [
        (term.at, "leader", f"another scheduler leads, in term {term.term}") for term in terms[1:] if term.at >= since
    ]
    return [Mark(max(0.0, (at - since) / span), at, what, kind) for at, kind, what in sorted(events)]


class HandledFailures(NamedTuple):
    """Groups of failures, and their acknowledgments and snoozes."""

    failures: Failures
    handled: dict[GroupKey, Handled]

    def states(self, now: datetime) -> dict[GroupKey, str]:
        """Return `snoozed`, `acknowledged` or an empty string for each handled group."""
        last = {group.key: group.last_at for group in self.failures.groups}
        return {key: one.state(now, last[key]) for key, one in self.handled.items()}


def read_failures(
    api: Api, key_scope: KeyScope, span: timedelta, most: int = MAX_SCANNED, until: datetime | None = None
) -> HandledFailures:
    """Return failed tasks by name and error, the largest groups first."""

    def read() -> HandledFailures:
        since = (until or datetime.now(UTC)) - span
        found = api.read_list(latest_failures, since, key_scope.queues, most, until)
        return HandledFailures(found, api.read(handled_groups, [group.key for group in found.groups]))

    return api.recent.get(("failures", key_scope, span, most, until, visitor().pending_requests()), 5 * _SHARED, read)


@routes.get("", about=WITHIN)
def overview(api: Api, key_scope: KeyScope) -> Response:
    """Show the overview of the system."""
    if not key_scope.is_bound:
        api.outages.find()  # refreshes the outage at the top of the page
    whole = None if key_scope.is_bound else api.recent.get(("whole",), _SHARED, lambda: read_system_state(api))
    decided = read_failures(api, key_scope, timedelta(hours=1), _MAX_FAILURES)
    states = decided.states(present())
    groups = [group for group in decided.failures.groups if states.get(group.key) != "snoozed"]
    groups.sort(key=lambda group: bool(states.get(group.key)))  # unacknowledged groups come first
    last_hour = read_hour(api, key_scope)
    has_unacknowledged = any(not states.get(group.key) for group in groups)
    return page(
        "overview.html",
        whole=whole,
        failed_lately=sum(bar.failed for bar in last_hour.bars[-_RECENT_MINUTES:]) if has_unacknowledged else 0,
        queues=read_queues(api, key_scope),
        is_led=read_is_led(api),
        unreplayed="" if whole is None else count_unreplayed(api),
        known={key for key, state in states.items() if state},
        hour=last_hour,
        marks=read_marks(api, key_scope, last_hour.begin),
        failures=groups[:_MAX_GROUPS],
        more_failures=max(0, len(groups) - _MAX_GROUPS),
        failed_runs=count_failed_runs_lately(api, key_scope),
        failures_looked_at=decided.failures.looked_at,
    )


_PULSE_SECONDS = 3.0
"""Seconds for which all pages of this process share a pulse, also if the read failed."""


class Pulse(msgspec.Struct, frozen=True):
    """The state of the system in short."""

    outage: str
    """The reason why no task can run; empty without an outage."""
    troubles: str = ""
    """A hash of all problems; empty for a bound key."""
    message: str = ""
    """The consequences of the outage, and what to do; empty for a bound key."""


@routes.get("/pulse", about=WITHIN)
def pulse(api: Api, key_scope: KeyScope) -> Response:
    """Return the state of the system, without asking schedulers or workers."""

    def read() -> SystemState | None:
        try:
            return api.recent.get(("whole",), _PULSE_SECONDS, lambda: read_system_state(api))
        except Unavailable:
            return None

    whole = api.recent.get(("pulse",), _PULSE_SECONDS, read)
    if whole is None:
        return _answer(Pulse("Postgres is away"), 503)
    found = api.outages.find()
    if key_scope.is_bound:
        return _answer(Pulse(found.text))
    return _answer(Pulse(found.text, whole.fingerprint, "" if found.trouble is None else found.trouble.message))


def _answer(found: Pulse, status: int = 200) -> Response:
    return Response(msgspec.json.encode(found), status, media_type=JSON, headers={"Cache-Control": "no-store"})
