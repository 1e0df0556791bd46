"""Ended tasks and runs are deleted after their retention, in small slices, and never a part of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, event, text

from orchestrator import InvalidTask, NotFound, WrongState
from orchestrator.cli import main
from orchestrator.scheduler.pruning import Pruner, rest_after
from orchestrator.store import retention
from orchestrator.store.insights import RunFilter, list_runs
from tests.integration.stage import System
from tests.waiting import eventually

DAY = 86_400.0
_FINISHED = """
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload,
                                      created_at, ended_at, run_id, step, position)
SELECT gen_random_uuid(), n, 'job', :queue, 0, :status, 2, 0, 0, '', now(),
       now() - (:days - n / 1e6) * interval '1 day', CAST(:run AS uuid), :step, n
  FROM generate_series(1, :count) AS n
"""
_HISTORY = """
INSERT INTO orchestrator.attempts (task_id, attempt, outcome, ended_at)
SELECT id, 1, 'failed', ended_at FROM orchestrator.ended_tasks
"""
_RUN = """
INSERT INTO orchestrator.runs (id, name, status, total, open, success, ended_at, parent_run)
VALUES (CAST(:id AS uuid), 'r', :status, 0, 0, 0, now() - :days * interval '1 day', CAST(:parent AS uuid))
"""


def finished(system: System, count: int = 3, **given: Any) -> None:
    """Insert tasks that ended some days ago."""
    row = {"queue": "default", "status": "success", "days": 8, "run": None, "step": None}
    system.sql(_FINISHED, count=count, **row | given)


def ended_run(system: System, *, days: float, status: str = "success", parent: UUID | None = None) -> UUID:
    run = uuid4()
    system.sql(_RUN, id=str(run), status=status, days=days, parent=parent and str(parent))
    return run


def autocommit(system: System) -> Engine:
    return system.engine.execution_options(isolation_level="AUTOCOMMIT")


def pruner(system: System, size: int = 1_000, slices: int = 100, **settings: Any) -> Pruner:
    given = replace(system.settings, **settings)
    return Pruner(autocommit(system), given, threading.Event(), size=size, slices=slices)


def prune(system: System, by: Pruner | None = None, **settings: Any) -> list[int]:
    """Delete everything beyond its retention; return the sizes of the slices."""
    by = by or pruner(system, **settings)
    with by._engine.connect() as connection:
        return list(by.slices(connection))


def kept(system: System) -> dict[tuple[str, str], int]:
    rows = system.sql("SELECT queue, status, count(*) AS count FROM orchestrator.ended_tasks GROUP BY 1, 2")
    return {(row["queue"], row["status"]): row["count"] for row in rows}


# -- how long rows are kept


def test_each_state_has_its_own_retention(system: System) -> None:
    for status in ("success", "failed", "cancelled", "skipped"):
        for days in (6, 8, 89, 91):
            finished(system, 1, status=status, days=days)
    system.sql(_HISTORY)
    prune(system)
    assert kept(system) == {
        ("default", "success"): 1,
        ("default", "failed"): 3,
        ("default", "cancelled"): 3,
        ("default", "skipped"): 3,
    }
    assert system.count("attempts") == 10


def test_a_retention_of_zero_keeps_rows_forever(system: System) -> None:
    finished(system, 2, days=5_000)
    finished(system, 2, days=5_000, status="failed")
    ended_run(system, days=5_000)
    assert prune(system, retention_success=0.0, retention_failed=0.0) == []
    assert (system.count("ended_tasks"), system.count("runs")) == (4, 1)


def test_a_queue_overrides_the_retention_settings(system: System) -> None:
    system.app.queue("mail").retain(success=3600, failed=DAY)
    system.app.queue("audit").retain(success=0)
    for queue in ("default", "mail", "audit"):
        for days in (0.1, 2, 100):
            finished(system, 1, queue=queue, days=days)
            finished(system, 1, queue=queue, days=days, status="failed")
    prune(system)
    assert kept(system) == {
        ("default", "success"): 2,
        ("default", "failed"): 2,
        ("mail", "failed"): 1,
        ("audit", "success"): 3,
        ("audit", "failed"): 2,
    }


def test_a_shortened_retention_applies_to_rows_passed_before(system: System) -> None:
    """A pruner remembers how far it came, but starts anew when the retention changes."""
    by = pruner(system)
    finished(system, 5, days=3)
    finished(system, 5, days=8)
    assert sum(prune(system, by)) == 5
    assert sum(prune(system, by)) == 0
    system.app.queue("default").retain(success=DAY)
    assert sum(prune(system, by)) == 5


@pytest.mark.parametrize("wrong", [59, -1, True, "1h"])
def test_invalid_retentions_are_rejected(system: System, wrong: Any) -> None:
    with pytest.raises(InvalidTask, match="Option success: expected "):
        system.app.queue("mail").retain(success=wrong)


# -- slices


def test_each_slice_continues_where_the_last_one_ended(system: System) -> None:
    finished(system, 250)
    by = pruner(system, size=100)
    assert prune(system, by) == [100, 100, 50]
    finished(system, 30, days=7.5)
    assert prune(system, by) == [30]


def test_tasks_that_ended_at_the_same_moment_share_a_slice(system: System) -> None:
    finished(system, 250)
    system.sql("UPDATE orchestrator.ended_tasks SET ended_at = now() - interval '8 days'")
    assert prune(system, pruner(system, size=100)) == [250]


def test_rows_with_a_longer_retention_are_passed_once(system: System) -> None:
    system.app.queue("audit").retain(success=0)
    finished(system, 250, queue="audit", days=9)
    finished(system, 10)
    by = pruner(system, size=100)
    assert prune(system, by) == [0, 0, 10]
    assert prune(system, by) == []


def test_every_state_gets_slices_despite_a_backlog_of_another(system: System) -> None:
    finished(system, 70)
    finished(system, 20, days=95, status="failed")
    by = pruner(system, size=10, slices=3)
    left: list[tuple[int, int]] = []
    with autocommit(system).connect() as connection:
        for _ in by.slices(connection):
            rest = kept(system)
            left.append((rest.get(("default", "success"), 0), rest.get(("default", "failed"), 0)))
    assert left[3:5] == [(60, 10), (60, 0)]  # the third slice of one state, and the first of the other
    assert left[-1] == (0, 0)


def test_deleting_many_runs_does_not_delay_other_pruning(system: System) -> None:
    finished(system, 10)
    closing = ended_run(system, days=1)
    system.sql("UPDATE orchestrator.runs SET closing = true")
    for _ in range(60):
        ended_run(system, days=1)
    system.sql("INSERT INTO orchestrator.deletions (run_id) SELECT id FROM orchestrator.runs")
    by = pruner(system, size=10, slices=2)
    left: list[tuple[int, int]] = []
    with autocommit(system).connect() as connection:
        for _ in by.slices(connection):
            runs = system.sql("SELECT count(*) AS count FROM orchestrator.runs WHERE NOT closing")
            left.append((runs[0]["count"], sum(kept(system).values())))
    assert any(tasks == 0 and runs >= 40 for runs, tasks in left)
    assert left[-1] == (0, 0)
    assert [row["run_id"] for row in system.sql("SELECT run_id FROM orchestrator.deletions")] == [closing]


def test_pauses_shrink_while_pruning_falls_behind() -> None:
    assert rest_after(9.0, 10.0, 50.0) == 9.0  # not yet late
    assert rest_after(9.0, 61.0, 70.0) == 4.5
    assert rest_after(1.5, 61.0, 70.0) == 1.0
    assert rest_after(1.0, 3_600.0, 3_500.0) == 2.0  # a shorter retention, but the pruner catches up
    assert rest_after(9.0, 61.0, 60.5) == 9.0


def test_pruning_skips_locked_rows(system: System) -> None:
    """The leader may be reviving such a task at that moment."""
    finished(system, 3)
    with system.engine.connect() as connection, connection.begin():
        one = connection.execute(text("SELECT id FROM orchestrator.ended_tasks LIMIT 1 FOR UPDATE")).scalar_one()
        assert prune(system) == [2]
    assert [row["id"] for row in system.sql("SELECT id FROM orchestrator.ended_tasks")] == [one]


# -- runs


def test_a_run_and_its_tasks_are_deleted_together(system: System) -> None:
    old, young, failed = (
        ended_run(system, days=8),
        ended_run(system, days=1),
        ended_run(system, days=8, status="failed"),
    )
    for run in (old, young, failed):
        finished(system, 250, days=20, run=str(run))
        finished(system, 5, days=20, run=str(run), status="skipped")
    system.app.queue("default").retain(success=3600, failed=3600)
    system.sql(_HISTORY)
    prune(system, pruner(system, size=100))
    left = system.sql("SELECT run_id, count(*) AS count FROM orchestrator.ended_tasks GROUP BY 1")
    assert {row["run_id"]: row["count"] for row in left} == {young: 255, failed: 255}
    assert {row["id"] for row in system.sql("SELECT id FROM orchestrator.runs")} == {young, failed}
    assert system.count("attempts") == 510


def test_a_child_run_is_kept_as_long_as_its_parent(system: System) -> None:
    for days, expected in ((1, 4), (8, 0)):
        parent = ended_run(system, days=days)
        child = ended_run(system, days=30, parent=parent, status="failed")
        grandchildren = [ended_run(system, days=40, parent=child) for _ in range(2)]
        for run in (parent, child, *grandchildren):
            finished(system, 3, days=40, run=str(run))
        prune(system, pruner(system, size=2))
        assert (system.count("runs"), system.count("ended_tasks")) == (expected, 3 * expected)
        system.sql("DELETE FROM orchestrator.runs")
        system.sql("DELETE FROM orchestrator.ended_tasks")


def test_an_interrupted_deletion_is_completed_by_the_next_pruning(system: System) -> None:
    """The run is gone; a crash came before its tasks and children were deleted."""
    run = ended_run(system, days=8)
    ended_run(system, days=30, parent=run, status="cancelled")
    finished(system, 250, days=20, run=str(run))
    by = pruner(system, size=100)
    with by._engine.connect() as connection:
        slices = by.slices(connection)
        next(slices)
        next(slices)
    assert (system.count("runs"), system.count("ended_tasks")) == (1, 150)
    prune(system, retention_failed=10 * DAY)
    assert (system.count("runs"), system.count("ended_tasks")) == (0, 0)


def test_tasks_of_an_open_run_are_kept(system: System) -> None:
    system.app.start_many(system.job, [1, 2])
    run = system.sql("SELECT id FROM orchestrator.runs")[0]["id"]
    finished(system, 3, days=500, run=str(run))
    prune(system)
    assert (system.count("runs"), system.count("ended_tasks")) == (1, 3)


_CODE_RUN = """
WITH run AS (
    INSERT INTO orchestrator.runs (id, name, status, total, open, success, ended_at, parent_run, code, last_event)
    VALUES (CAST(:id AS uuid), 'r', 'success', 0, 0, 0, now() - interval '8 days', CAST(:parent AS uuid), true, 5)
), own AS (
    INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload,
                                          created_at, ended_at, run_id)
    VALUES (CAST(:id AS uuid), 1, 'r', 'default', 0, 'success', 2, 0, 0, '', now(), now() - interval '8 days',
            CAST(:id AS uuid))
), key AS (
    INSERT INTO orchestrator.run_keys (key, run_id) VALUES (:id, CAST(:id AS uuid))
)
INSERT INTO orchestrator.histories (run_id, number, at, kind, data)
SELECT CAST(:id AS uuid), n, now(), 'timer_fired', '' FROM generate_series(1, 5) AS n
"""


def test_an_interrupted_deletion_of_a_code_run_is_completed(system: System) -> None:
    """Whichever statement was last."""
    for steps in count():
        parent, child = str(uuid4()), str(uuid4())
        system.sql(_CODE_RUN, id=parent, parent=None)
        system.sql(_CODE_RUN, id=child, parent=parent)
        finished(system, 3, run=parent)
        with autocommit(system).connect() as connection:
            slices = pruner(system, size=2).slices(connection)
            made = sum(1 for _ in islice(slices, steps))
            cast("Generator[int, None, None]", slices).close()
        prune(system, pruner(system, size=2))
        left = {table: system.count(table) for table in ("runs", "ended_tasks", "histories", "run_keys")}
        assert left == {"runs": 0, "ended_tasks": 0, "histories": 0, "run_keys": 0}, steps
        if made < steps:
            break  # nothing was left to interrupt
    assert steps > 5


def test_the_workflow_task_of_an_open_code_run_is_kept(system: System) -> None:
    system.sql(_CODE_RUN, id=str(uuid4()), parent=None)
    system.sql("UPDATE orchestrator.runs SET ended_at = NULL, status = 'running'")
    finished(system, 1)
    assert sum(prune(system)) == 1
    assert (system.count("ended_tasks"), system.count("histories")) == (1, 5)


# -- runs deleted by users

_YOUNG = "UPDATE orchestrator.runs SET ended_at = now()"
_LEFT = ("runs", "ended_tasks", "histories", "run_keys", "deletions")


def test_an_interrupted_deletion_by_a_user_removes_the_whole_run(system: System) -> None:
    """Although the run is young, and the settings keep everything forever."""
    for steps in count():
        ids = [str(uuid4()) for _ in range(3)]
        for id, parent in zip(ids, [None, *ids], strict=False):
            system.sql(_CODE_RUN, id=id, parent=parent)
            finished(system, 3, run=id)
        other = ended_run(system, days=0)
        system.sql(_YOUNG)
        system.app.run(ids[0]).delete()
        with autocommit(system).connect() as connection:
            slices = pruner(system, size=2, retention_success=0.0).slices(connection)
            made = sum(1 for _ in islice(slices, steps))
            cast("Generator[int, None, None]", slices).close()
        for _ in ids:  # a child whose id is before its parent's is deleted in the next round
            prune(system, pruner(system, size=2, retention_success=0.0))
        assert {table: system.count(table) for table in _LEFT} == dict.fromkeys(_LEFT, 0) | {"runs": 1}, steps
        system.sql("DELETE FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=str(other))
        if made < steps:
            break  # nothing was left to interrupt
    assert steps > 5


def test_only_ended_runs_without_parents_can_be_deleted(system: System) -> None:
    parent = ended_run(system, days=0)
    child = ended_run(system, days=0, parent=parent)
    open_run = system.app.start_many(system.job, [1, 2])
    with pytest.raises(WrongState, match=r"Cannot delete run .*: it is in state 'pending'"):
        open_run.delete()
    with pytest.raises(WrongState, match="a child of another run and is deleted with that run"):
        system.app.run(child).delete()
    with pytest.raises(NotFound):
        system.app.run(uuid4()).delete()
    assert (system.count("deletions"), system.count("audit")) == (0, 0)
    system.app.run(parent).delete()
    system.app.run(parent).delete()  # not deleted yet
    assert [row["act"] for row in system.sql("SELECT act FROM orchestrator.audit")] == ["delete", "delete"]
    with system.engine.connect() as connection:
        listed = [run.id for run in list_runs(connection, RunFilter()).runs]
    assert parent not in listed
    assert UUID(open_run.id) in listed
    prune(system)
    prune(system)
    assert [str(row["id"]) for row in system.sql("SELECT id FROM orchestrator.runs")] == [open_run.id]
    assert system.count("deletions") == 0


def test_a_run_reopened_before_its_deletion_is_kept(system: System) -> None:
    run = ended_run(system, days=0, status="failed")
    finished(system, 2, days=0, run=str(run))
    system.app.run(run).delete()
    system.sql("UPDATE orchestrator.runs SET status = 'running', ended_at = NULL")
    prune(system)
    assert (system.count("runs"), system.count("ended_tasks"), system.count("deletions")) == (1, 2, 0)


def test_a_run_is_deleted_after_its_tasks_are_cancelled(system: System) -> None:
    run = ended_run(system, days=0)
    system.app.run(run).delete()
    system.sql("UPDATE orchestrator.runs SET closing = true")
    prune(system)
    assert (system.count("runs"), system.count("deletions")) == (1, 1)
    system.sql("UPDATE orchestrator.runs SET closing = false")
    prune(system)
    assert (system.count("runs"), system.count("deletions")) == (0, 0)


def test_runs_are_deleted_on_the_command_line(system: System, command: Callable[..., str]) -> None:
    runs = [str(ended_run(system, days=0)) for _ in range(2)]
    said = command("runs", "delete", *runs, "--yes")
    assert said.splitlines() == [f"Asked to delete run {run}: it is gone within some seconds." for run in runs]
    prune(system)
    assert system.count("runs") == 0
    assert "No run has the id" in command("runs", "delete", runs[0], code=1)


# -- keys


def test_expired_keys_are_deleted(system: System) -> None:
    for key in range(5):
        system.job.options(idempotency_key=str(key)).enqueue(key)
    system.sql("UPDATE orchestrator.unique_keys SET until = now() - interval '2 minutes' WHERE key NOT LIKE '%4'")
    by = pruner(system, size=3)
    assert prune(system, by) == [3, 1]
    assert by.rest == 9.0
    assert system.count("unique_keys") == 1


def test_pauses_shrink_when_more_keys_expire_than_a_round_deletes(system: System) -> None:
    for key in range(5):
        system.job.options(idempotency_key=str(key)).enqueue(key)
    system.sql("UPDATE orchestrator.unique_keys SET until = now() - interval '2 minutes'")
    by = pruner(system, size=1, slices=2)
    assert prune(system, by) == [1] * 5
    assert by.rest < 9.0


def test_rate_limits_that_are_unused_for_long_are_deleted(system: System) -> None:
    system.sql(
        "INSERT INTO orchestrator.buckets (name, due)"
        " SELECT 'lane mail|' || n, now() - (n - 4) * interval '2 minutes' FROM generate_series(1, 8) AS n"
    )
    assert prune(system, pruner(system, size=3)) == [3, 1]
    assert system.count("buckets") == 4


# -- the thread


def test_the_pruner_deletes_only_while_leading(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.scheduler.pruning._EVERY", 0.01)
    finished(system, 30)
    leading = threading.Event()
    by = Pruner(autocommit(system), system.settings, leading, size=10)
    by.start()
    assert system.count("ended_tasks") == 30
    leading.set()
    eventually(lambda: system.count("ended_tasks") == 0, "all are forgotten")
    leading.clear()


def test_a_slice_reads_only_rows_that_it_needs(system: System) -> None:
    """Although there are 50,000 younger rows of the same state, and 50,000 older ones of another."""
    finished(system, 50_000, days=3)
    finished(system, 50_000, days=30, status="failed")
    finished(system, 200, days=8)
    system.sql("ANALYZE orchestrator.ended_tasks")
    walk = retention.Walk("success", 7 * DAY, (), others=True)
    sent: list[tuple[str, Any]] = []

    def note(*arguments: Any) -> None:
        sent.append((arguments[2], arguments[3]))

    with system.engine.connect() as connection:
        retention.prepare(connection)
        connection.commit()
        after = connection.execute(text("SELECT now() - interval '9 days'")).scalar_one()
        event.listen(connection, "before_cursor_execute", note)
        found = retention.next_tasks(connection, walk, after, 1_000)
        assert found is not None
        assert retention.orphaned_runs(connection, walk, after, found.upto) == []
        assert retention.forget_tasks(connection, walk, after, found.upto) == 200
        event.remove(connection, "before_cursor_execute", note)
        connection.rollback()
        for statement, parameters in sent:
            explained = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters)
            plan = explained.scalar_one()[0]["Plan"]
            scans = list(scans_of(plan))
            assert all(scan["Node Type"] != "Seq Scan" for scan in scans), scans
            assert all(scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0) <= 1_000 for scan in scans), scans
            assert "ended_tasks_by_time" in str(plan)


def test_the_pruner_disables_jit_compilation(system: System) -> None:
    """A scan of a table without a usable index counts as very expensive; JIT-compiling it took half a second a
    round."""
    with system.engine.connect() as connection:
        retention.prepare(connection)
        assert connection.exec_driver_sql("SHOW jit").scalar_one() == "off"


def scans_of(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a plan that read rows of a table."""
    if "Scan" in node["Node Type"] and node.get("Relation Name"):
        yield node
    for child in node.get("Plans", ()):
        yield from scans_of(child)


# -- commands and messages


@pytest.fixture
def command(system: System, in_empty_folder: Path) -> Callable[..., str]:
    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_the_retention_of_a_queue_is_set_from_the_command_line(command: Callable[..., str]) -> None:
    assert command("queues", "retain", "mail", "--success", "1h", "--new") == "Queue mail keeps success 1h.\n"
    said = command("queues", "retain", "mail", "--success", "1h", "--failed", "forever")
    assert said == "Queue mail keeps success 1h, failed forever.\n"
    assert "success 1h, failed kept forever" in command("queues")
    assert '"retention_success": 3600.0' in command("queues", "--json")
    assert "as long as the settings say" in command("queues", "retain", "mail", "--none")
    assert "mail" not in command("queues")
    assert "nor the word forever" in command("queues", "retain", "mail", "--success", "soon", code=2)
    assert "expected 60 seconds or more" in command("queues", "retain", "mail", "--success", "5s", code=1)
    assert "or --none" in command("queues", "retain", "mail", code=2)


def test_status_shows_the_number_and_age_of_ended_tasks(system: System, command: Callable[..., str]) -> None:
    assert "no ended tasks" in command("status")
    finished(system, 3, days=3.5)
    system.sql("ANALYZE orchestrator.ended_tasks")
    assert "3 ended tasks, the oldest of 3d ago" in command("status")
    assert '"ended_tasks": 3' in command("status", "--json")


def test_the_error_for_a_pruned_task_mentions_pruning(system: System) -> None:
    finished(system, 1)
    handle = system.app.handle(system.sql("SELECT id FROM orchestrator.ended_tasks")[0]["id"])
    assert handle.status() == "success"
    prune(system)
    with pytest.raises(NotFound, match=r"No task has the id .* may have been pruned.*retention_success"):
        handle.result(1)
    with pytest.raises(NotFound, match="may have been pruned"):
        system.app.run(uuid4()).wait_ended(1)
