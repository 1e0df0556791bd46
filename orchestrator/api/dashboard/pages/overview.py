"""The first page, and the pulse that every open page asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from orchestrator.api.context import LARGEST_PAGE, Api
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
    MOST_LOOKED_AT,
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

_RECENT = 1.0
"""Seconds for which open pages share what was read."""
_LATELY = 5
"""Minutes whose failures need a person, unless somebody knows of all groups of the last hour."""
_MOST_GROUPS = 8
HOUR = timedelta(hours=1)
ROLLOUT = timedelta(minutes=10)
"""Workers that start within it of each other replace a fleet together."""
_MOST_COUNTED = 100
"""Runs that a hint counts."""
_MOST_FAILURES = 1_000
"""Of which groups are made here."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The parts of the page that only keys see that are not bound."""

    overview: Overview
    troubles: list[Trouble]
    heard_at: datetime | None = None
    """When a leader last heard of the workers, if none does."""

    @property
    def is_led(self) -> bool:
        """Whether somebody hears the workers."""
        return self.overview.hears_workers and not any(one.kind in trouble.STOPPING for one in self.troubles)

    def besides(self, outage: Trouble | None) -> list[Trouble]:
        """Return the troubles that the page does not say above all others."""
        known = None if outage is None else (outage.kind, outage.about)
        return [one for one in self.troubles if (one.kind, one.about) != known]

    @property
    def fingerprint(self) -> str:
        """Which troubles there are, whatever is said of them: a page that has another one is read again."""
        found = sorted(f"{one.kind} {one.about}" for one in self.troubles)
        return blake2b("\n".join(found).encode(), digest_size=6).hexdigest()


def read_whole(api: Api) -> Whole:
    """Return how the system is doing, and what needs a person, as `orchestrator status` says it."""
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
        *trouble.of_what_redis_holds(held),
        *trouble.of_postgres(insights.connections(), transactions, insights.dead_rows()),
        *trouble.of_payload_store(api.settings.payload_store),
    )
    whole = Whole(overview=replace(found, standbys=held.standbys), troubles=trouble.by_gravity(troubles))
    if whole.is_led:
        return whole
    return replace(whole, heard_at=max((worker.seen_at for worker in insights.list_workers()), default=None))


def read_queues(api: Api, key_scope: KeyScope) -> list[QueueCounts]:
    """Return the queues, read at most once a second."""
    return api.recent.get(("queues", key_scope), _RECENT, lambda: api.read(list_queues, key_scope.queues))


def read_is_led(api: Api) -> bool:
    """Return whether a scheduler leads and hears the workers, and so whether those of queues are known."""
    return api.outages.last() is None


def read_minutes(api: Api, key_scope: KeyScope) -> list[Throughput]:
    """Return the last hour by the minute, read at most once a second."""
    return api.recent.get(("minutes", key_scope), _RECENT, lambda: system.read_minutes(api, key_scope))


def read_hour(api: Api, key_scope: KeyScope) -> Hour:
    return hour(read_minutes(api, key_scope), datetime.now(UTC))


def _ends(minutes: list[Throughput]) -> Ends:
    """Return what the minutes come to, the last one of them and all."""
    last, all_of_them = (
        {str(state): sum(getattr(one, state) for one in some) for state in ENDED_TASK_STATES}
        for some in (minutes[-1:], minutes)
    )
    return last, all_of_them


def count_approvals(api: Api, key_scope: KeyScope) -> str:
    """Return how many approvals wait for a person, with a plus if not all were counted; nothing if none does."""

    def read() -> str:
        found = api.read(page_of_approvals, limit=LARGEST_PAGE, within=key_scope.workflows)
        return f"{len(found.approvals) or ''}{'+' if found.approvals and found.next else ''}"

    return api.recent.get(("approvals", key_scope), 5 * _RECENT, read)


def count_unreplayed(api: Api) -> str:
    """Return how many runs of code no live worker has replayed, with a plus if there may be more; nothing if none."""
    read = partial(api.read, page_of_runs, RunFilter(unreplayed=True), limit=_MOST_COUNTED)
    found = len(api.recent.get(("unreplayed",), 30 * _RECENT, read).runs)
    return f"{found or ''}{'+' if found == _MOST_COUNTED else ''}"


def count_failed_runs_lately(api: Api, key_scope: KeyScope) -> str:
    """Return how many runs failed in the last hour, such as `2 runs`; nothing if none did."""
    read = partial(api.read_list, count_failed_runs, present() - HOUR, key_scope.workflows)
    found: FailedRuns = api.recent.get(("failed runs", key_scope, visitor().asked()), 5 * _RECENT, read)
    return f"{'at least ' if found.is_part else ''}{counted(found.runs, 'run')}" if found.runs else ""


class Mark(NamedTuple):
    """Something that happened to the system, in a chart."""

    at: float
    """Which part of the time lies before it."""
    when: datetime
    what: str
    kind: str
    """`release`, `start` of workers that is none, or `leader`."""


def read_marks(api: Api, key_scope: KeyScope, since: datetime, span: timedelta = HOUR) -> list[Mark]:
    """Return releases that came, starts of workers and changes of the leader since the begin of a chart.

    For keys that see the whole.
    """
    if key_scope.is_bound:
        return []
    workers = api.recent.get(("workers",), 5.0, api.backend.insights.list_workers)
    started = {one.parent or one.id: (one.worker_started_at, one.release or "") for one in workers}
    releases = api.recent.get(("releases", span), 10.0, lambda: api.read(first_starts, since))
    terms = api.recent.get(("terms",), 10.0, lambda: api.read(throughput.terms, present() - throughput.KEPT))
    begun = dict(releases)  # when the last rollout of each release began
    starts: Counter[tuple[datetime, str]] = Counter()
    for at, release in sorted(one for one in started.values() if one[0] >= since):
        if release not in begun or at - begun[release] > ROLLOUT:
            begun[release] = at
        if begun[release] != releases.get(release):
            starts[begun[release], release] += 1
    found = [(at, "release", f"release {name} came") for name, at in releases.items()]
    for (at, release), count in starts.items():
        found.append((at, "start", f"{counted(count, 'worker')}{release and f' of release {release}'} started"))
    found += [
        (one.at, "leader", f"another scheduler leads, in term {one.term}") for one in terms[1:] if one.at >= since
    ]
    return [Mark(max(0.0, (at - since) / span), at, what, kind) for at, kind, what in sorted(found)]


class Decided(NamedTuple):
    """Failures, and what was decided about some of their groups."""

    failures: Failures
    handled: dict[GroupKey, Handled]

    def states(self, now: datetime) -> dict[GroupKey, str]:
        """Return `snoozed`, `acknowledged` or nothing for each of these groups."""
        last = {group.key: group.last_at for group in self.failures.groups}
        return {key: one.state(now, last[key]) for key, one in self.handled.items()}


def read_failures(
    api: Api, key_scope: KeyScope, span: timedelta, most: int = MOST_LOOKED_AT, until: datetime | None = None
) -> Decided:
    """Return failed tasks by name and error, the largest groups first."""

    def read() -> Decided:
        since = (until or datetime.now(UTC)) - span
        found = api.read_list(latest_failures, since, key_scope.queues, most, until)
        return Decided(found, api.read(handled_groups, [group.key for group in found.groups]))

    return api.recent.get(("failures", key_scope, span, most, until, visitor().asked()), 5 * _RECENT, read)


@routes.get("", about=WITHIN)
def overview(api: Api, key_scope: KeyScope) -> Response:
    """Show how the system is doing."""
    if not key_scope.is_bound:
        api.outages.find()  # of which the page tells above the other troubles
    whole = None if key_scope.is_bound else api.recent.get(("whole",), _RECENT, lambda: read_whole(api))
    decided = read_failures(api, key_scope, timedelta(hours=1), _MOST_FAILURES)
    states = decided.states(present())
    groups = [group for group in decided.failures.groups if states.get(group.key) != "snoozed"]
    groups.sort(key=lambda group: bool(states.get(group.key)))  # those that nobody knows of come first
    last_hour = read_hour(api, key_scope)
    is_news = any(not states.get(group.key) for group in groups)
    return page(
        "overview.html",
        whole=whole,
        failed_lately=sum(bar.failed for bar in last_hour.bars[-_LATELY:]) if is_news else 0,
        queues=read_queues(api, key_scope),
        is_led=read_is_led(api),
        unreplayed="" if whole is None else count_unreplayed(api),
        known={key for key, state in states.items() if state},
        hour=last_hour,
        marks=read_marks(api, key_scope, last_hour.begin),
        failures=groups[:_MOST_GROUPS],
        more_failures=max(0, len(groups) - _MOST_GROUPS),
        failed_runs=count_failed_runs_lately(api, key_scope),
        failures_looked_at=decided.failures.looked_at,
    )


_PULSE = 3.0
"""Seconds for which all pages of this process share the troubles, also that nothing could be read."""


class Pulse(msgspec.Struct, frozen=True):
    """How the system is, in a word."""

    outage: str
    """Why nothing moves; empty while something does."""
    troubles: str = ""
    """A fingerprint of all troubles; empty for a bound key."""
    message: str = ""
    """What the outage means, and what to do; empty for a bound key."""


@routes.get("/pulse", about=WITHIN)
def pulse(api: Api, key_scope: KeyScope) -> Response:
    """Say whether the system works. Neither the scheduler nor a worker is asked."""

    def read() -> Whole | None:
        try:
            return api.recent.get(("whole",), _PULSE, lambda: read_whole(api))
        except Unavailable:
            return None

    whole = api.recent.get(("pulse",), _PULSE, read)
    if whole is None:
        return _answer(Pulse("Postgres is away"), 503)
    found = api.outages.find()
    if key_scope.is_bound:
        return _answer(Pulse(found.text))
    return _answer(Pulse(found.text, whole.fingerprint, "" if found.trouble is None else found.trouble.message))


def _answer(found: Pulse, status: int = 200) -> Response:
    return Response(msgspec.json.encode(found), status, media_type=JSON, headers={"Cache-Control": "no-store"})
