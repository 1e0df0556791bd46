"""With very many open tasks, the counts of queues stop at a bound and are marked as minimums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection

from orchestrator.store import load
from orchestrator.store.database import engine_for
from orchestrator.store.insights import fleet, overview
from orchestrator.store.insights.fleet import QueueCounts, list_queues
from tests.emptying import empty

TASKS = """
INSERT INTO orchestrator.tasks (id, name, queue, payload, priority, status, blockers, wake_at, hold, lane, run_id,
                                created_at, attempt)
SELECT gen_random_uuid(), 't.a', 'q' || n %% 3, '', n %% 5, status, blockers, wake_at, hold, lane, run_id,
       now() - n * interval '1 second', CASE WHEN status = 'pending' THEN 0 ELSE 1 END
  FROM generate_series(1, %(number)s) AS n CROSS JOIN (VALUES
       ('pending', 0, NULL::timestamptz, NULL, NULL, NULL::uuid),
       ('pending', 0, NULL, NULL, 't.a|k', NULL),
       ('pending', 0, now() + interval '1 hour', NULL, NULL, NULL),
       ('pending', 0, now() + interval '1 hour', 'unknown', NULL, NULL),
       ('pending', 0, now() + interval '1 hour', 'no data key: x', NULL, NULL),
       ('pending', 0, now() + interval '1 hour', 'crowded', NULL, NULL),
       ('pending', 1, NULL, NULL, NULL, gen_random_uuid()),
       ('dispatched', 0, NULL, NULL, NULL, NULL),
       ('running', 0, NULL, NULL, NULL, NULL)) AS kinds (status, blockers, wake_at, hold, lane, run_id)
"""
KINDS = ("ready", "delayed", "unknown", "blocked", "dispatched", "running")


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    engine = engine_for(database_url, autocommit=True)
    with engine.connect() as connection:
        empty(connection)
        yield connection
        empty(connection, "tasks")
    engine.dispose()


def numbers(queue: QueueCounts) -> tuple[int, ...]:
    return tuple(getattr(queue, kind) for kind in KINDS)


def test_exact_and_bounded_counts_agree_for_few_tasks(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    connection.exec_driver_sql(TASKS, {"number": 30})
    exact = list_queues(connection)
    monkeypatch.setattr(load, "MAX_COUNTED_EXACTLY", 10)
    bounded = list_queues(connection)
    assert [queue.queue for queue in bounded] == ["q0", "q1", "q2"]
    assert [numbers(queue) for queue in bounded] == [numbers(queue) for queue in exact]
    assert numbers(exact[0]) == (30, 10, 20, 10, 10, 10)
    assert [queue.least for queue in (*exact, *bounded)] == [()] * 6
    for one, other in zip(exact, bounded, strict=True):
        assert one.oldest_ready == pytest.approx(other.oldest_ready, abs=1)
    assert [queue.queue for queue in list_queues(connection, "q1")] == ["q1"]


def test_counts_beyond_the_bound_are_marked_as_minimums(connection: Connection) -> None:
    connection.exec_driver_sql(TASKS, {"number": 10_000})
    connection.exec_driver_sql("ANALYZE orchestrator.tasks")
    others = {*KINDS} - {"ready"}
    for queue in list_queues(connection):
        assert {*queue.least} == others
        assert 6_666 <= queue.ready <= 6_668 + 10_000  # including held tasks among the ready ones
    assert {*overview(connection).open_least} == others
    statement = f"WITH RECURSIVE {load.COUNTS} {fleet._SHOWN}"
    fewer = statement.replace(f" {load.MAX_READY_COUNTED} ", " 1200 ")
    assert fewer != statement
    for row in connection.exec_driver_sql(fewer, {"within": ""}):
        assert "ready" in row.least
        assert 400 <= row.ready <= 400 + 10_000
