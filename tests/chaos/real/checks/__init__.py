"""What must be true when everything is healed and at rest.

The checks use the database, Redis, the process table and the journal only. They call no code of the product that
judges its own state; the product's logs may contain no unexpected traceback.

rest.py          nothing is open, in the inbox or in the streams
executions.py    every end belongs to an execution, and no two executions of a task overlap
limits.py        limits of concurrency and rate hold
callbacks.py     each end has exactly one callback
runs.py          counters equal a recount
journeys.py      code workflows ran every step once, and received every message
releases.py      tasks known to one release only ended there
pulls.py         pulled work started once, and its end came from its holder
visits.py        a task enqueued over HTTP with a key exists once
flows.py         runs of flows visited every node once, and received every result
fires.py         schedules fired as their policies say
processes.py     logs, connections, and leftover processes
"""

from __future__ import annotations

from tests.chaos.real.arena import Arena
from tests.chaos.real.checks.callbacks import check_callbacks
from tests.chaos.real.checks.executions import check_ends, check_executions, check_overlaps, overlaps
from tests.chaos.real.checks.fires import check_fires
from tests.chaos.real.checks.flows import check_flows
from tests.chaos.real.checks.journeys import check_inquiries, check_journeys, check_rounds
from tests.chaos.real.checks.limits import check_limits, check_rates
from tests.chaos.real.checks.processes import check_after_stop, check_connections, check_logs
from tests.chaos.real.checks.pulls import check_pulls
from tests.chaos.real.checks.releases import check_releases
from tests.chaos.real.checks.rest import wait_for_rest
from tests.chaos.real.checks.runs import check_runs
from tests.chaos.real.checks.visits import check_visits

__all__ = ["check", "check_after_stop", "overlaps", "wait_for_rest"]


def check(arena: Arena) -> list[str]:
    """Return all violations in an arena at rest."""
    ended = {str(row["id"]): row for row in arena.sql("SELECT * FROM orchestrator.ended_tasks")}
    executions = arena.journal.executions()
    return [
        *check_ends(arena, ended),
        *check_executions(ended, executions),
        *check_overlaps(arena, executions),
        *check_limits(arena, executions),
        *check_rates(arena),
        *check_callbacks(arena, ended),
        *check_runs(arena),
        *check_journeys(arena, ended),
        *check_rounds(arena),
        *check_inquiries(arena),
        *check_flows(arena, ended),
        *check_releases(arena, ended),
        *check_fires(arena),
        *check_visits(ended),
        *check_pulls(arena, ended),
        *check_logs(arena),
        *check_connections(arena),
    ]
