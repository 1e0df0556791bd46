"""What must be true when everything is healed and at rest.

Judged from the database, Redis, the process table and the journal alone: nothing of the product is asked, and what it
says of itself is believed nowhere but in its own logs, where a traceback is a defect.

rest.py          nothing is open, in the inbox, or in the streams
executions.py    every end is that of an execution; none ran beside another
limits.py        never more ran at once, or started in a second, than may
callbacks.py     each end was followed once
runs.py          counters equal a recount
journeys.py      workflows as code did every step once, and were told the truth
releases.py      what only some workers know came to its end with them
pulls.py         what is pulled started once, and its end is that of its holder
visits.py        what was enqueued over HTTP with a key is there once
flows.py         runs of flows visited every node once, and were told the truth
fires.py         schedules fired as their policies say
processes.py     logs, connections, and what outlives the processes
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
    """Return everything that is wrong with an arena at rest."""
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
