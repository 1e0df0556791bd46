"""Reads for people stay fast with millions of rows: each read is bounded, and tells how far it looked."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection

from orchestrator.monitoring.exposition import SECONDS
from orchestrator.store import audit, throughput
from orchestrator.store.audit import AuditFilter
from orchestrator.store.database import engine_for
from orchestrator.store.insights import failures, spread_of_failures
from orchestrator.store.insights.failures import latest_failures
from orchestrator.store.tasks import redrive
from orchestrator.store.tasks.redrive import FailedFilter
from tests.emptying import empty

NOW = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    engine = engine_for(database_url, autocommit=True)
    with engine.connect() as connection:
        empty(connection, "audit", "ended_tasks", "throughput")
        yield connection
    engine.dispose()


def fail(connection: Connection, count: int, name: str, message: str, ended_at: datetime) -> None:
    connection.exec_driver_sql(
        "INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses,"
        " payload, error, created_at, ended_at) SELECT gen_random_uuid(), n, %s, 'mail', 0, 'failed', 1, 1, 0, '',"
        " jsonb_build_object('kind', 'ValueError', 'message', %s || n), %s, %s::timestamptz + make_interval(secs => n)"
        " FROM generate_series(1, %s) AS n",
        (name, message, ended_at, ended_at, count),
    )


def test_a_rare_audit_entry_is_found_over_several_bounded_pages(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_SCANNED", 10)
    for number in range(35):
        act = "pause" if number == 2 else "retry"
        audit.add(connection, who="ada", origin="here", act=act, kind="queue", target=str(number), detail={})
    wanted = AuditFilter(act="pause")
    pages, before = [], None
    while True:
        lines, before = audit.page(connection, wanted, limit=5, before=before)
        pages.append([line.target for line in lines])
        if before is None:
            break
    assert pages == [[], [], ["2"], []]
    assert [line.target for line in audit.list_page(connection, wanted, limit=5)] == ["2"]
    everything = audit.list_page(connection, AuditFilter(), limit=100)
    assert [line.target for line in everything] == [str(number) for number in reversed(range(35))]


def test_failure_groups_say_how_many_failures_they_cover(connection: Connection) -> None:
    fail(connection, 30, "old", "gone ", NOW - timedelta(hours=1))
    fail(connection, 10, "new", "said ", NOW)
    since = NOW - timedelta(hours=2)
    found = latest_failures(connection, since)
    assert [(group.name, group.tasks, group.example) for group in found.groups] == [
        ("old", 30, "gone 30"),
        ("new", 10, "said 10"),
    ]
    assert found.looked_at is None
    found = latest_failures(connection, since, most=12)
    assert [(group.name, group.tasks) for group in found.groups] == [("new", 10), ("old", 2)]
    assert found.looked_at == 12
    assert latest_failures(connection, since, "bank.").groups == []


def test_failures_of_a_queue_are_found_behind_newer_failures_elsewhere(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(connection, 3, "own", "said ", NOW - timedelta(hours=1))
    connection.exec_driver_sql("UPDATE orchestrator.ended_tasks SET queue = 'mail.out'")
    fail(connection, 20, "others", "said ", NOW)
    since, end = NOW - timedelta(hours=2), NOW + timedelta(hours=1)
    found = latest_failures(connection, since, "mail.", most=10)
    assert [(group.name, group.queue, group.tasks) for group in found.groups] == [("own", "mail.out", 3)]
    assert found.looked_at is None
    assert latest_failures(connection, since, "mail.", most=2).looked_at == 2
    assert sum(sum(row) for row in spread_of_failures(connection, since, end, 4, "mail.").values()) == 3
    monkeypatch.setattr(failures, "MAX_WALKED", 15)
    assert latest_failures(connection, since, "mail.", most=10) == ([], 15), "they may stand further back"


def test_a_redrive_preview_counts_each_unique_key_once(connection: Connection) -> None:
    fail(connection, 5, "plain", "said ", NOW)
    fail(connection, 4, "keyed", "said ", NOW)
    connection.exec_driver_sql(
        "UPDATE orchestrator.ended_tasks SET unique_key = 'k' || seq / 2, options = '{\"unique_for\": \"ended\"}'"
        " WHERE name = 'keyed'"
    )
    groups = redrive.preview(connection, FailedFilter(queue="mail"))
    assert [(group.name, group.tasks, group.example) for group in groups] == [
        ("plain", 5, "said 5"),
        ("keyed", 3, "said 4"),
    ]


def test_minutes_are_the_sums_of_their_seconds(connection: Connection) -> None:
    length = len(SECONDS) + 1
    assert length <= throughput.MAX_BOUNDS
    minute = NOW.replace(second=0)
    for queue in ("mail", "bank"):
        for place in range(12):
            row = dict.fromkeys(("success", "failed", "cancelled", "skipped", "dispatched", "retried", "lost"), place)
            counts = {"waits": [*range(length)], "runs": [1] * length}
            moment = minute + timedelta(seconds=10 * place)
            throughput.add(connection, 1, moment, [{"queue": queue, **row, **counts}])
    first, second = throughput.minutes(connection, minute)
    assert (first.bucket, first.success, second.success) == (minute, 2 * 15, 2 * 51)
    assert list(first.waits[:length]) == [12 * number for number in range(length)]
    assert sum(first.runs) == 12 * length
    one = throughput.minutes(connection, minute, "mail")
    assert [row.lost for row in one] == [15, 51]
    each = throughput.minutes_of_queues(connection, minute, "ma")
    assert [(row.queue, row.failed, list(row.waits)) for row in each] == [("mail", 15, []), ("mail", 51, [])]
