"""Statements about the log lines of a run use index scans, however many lines other runs have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, text

from orchestrator.embedded import EmbeddedServices
from orchestrator.store import logs
from tests.integration.planning import BATCH, STATES, Call, Leader, leaders_of, rows_read, scans

CHUNKS = 200
"""Chunks of each run. The last few lines are returned without reading all of them."""
_LOGS = f"""
INSERT INTO orchestrator.task_logs (task_id, attempt, part, run_id, step, lines)
SELECT gen_random_uuid(), 1, 0, CASE WHEN n % 3 > 0 THEN md5((n % 300)::text)::uuid END, 'step', '\\x90'
  FROM generate_series(1, {300 * CHUNKS}) AS n
"""


def begin(connection: Connection) -> list[tuple[bytes, int]]:
    """Return runs that have log lines."""
    found = connection.execute(
        text(f"SELECT DISTINCT run_id FROM orchestrator.task_logs WHERE run_id IS NOT NULL LIMIT {BATCH}")
    )
    return [(row[0].bytes, 1) for row in found]


@pytest.fixture(scope="module")
def leaders(services: EmbeddedServices) -> Iterator[Callable[[str], Leader]]:
    with leaders_of(services, [_LOGS], begin, STATEMENTS) as found:
        yield found


@pytest.fixture(scope="module", params=STATES)
def leader(request: pytest.FixtureRequest, leaders: Callable[[str], Leader]) -> Leader:
    return leaders(request.param)


STATEMENTS: dict[str, Call] = {
    "last_of_run": lambda leader: lambda c: logs.last_of_run(c, leader.in_flight[0][0], 50),
    "last_of_run_before": lambda leader: lambda c: logs.last_of_run(c, leader.in_flight[0][0], 50, 30_000),
    "heads_of_run": lambda leader: lambda c: logs.count_lines(c, leader.in_flight[0][0], is_run=True),
    "of_run": lambda leader: lambda c: logs.of_run(c, leader.in_flight[0][0], 0, 50),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_reads_the_lines_of_other_runs(leader: Leader, name: str) -> None:
    plan = leader.plan(STATEMENTS[name](leader))
    found = scans(plan, "task_logs")
    assert found, plan
    for scan in found:
        assert scan["Node Type"] != "Seq Scan", scan
        assert rows_read(scan) <= (CHUNKS if name == "heads_of_run" else 50), scan
