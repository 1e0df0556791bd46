"""The calendar of a schedule, and the times of steps in the grid of a workflow."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from orchestrator.api.app import create_app
from orchestrator.domain.schedules.schedule import fire_key
from orchestrator.sdk.dag.definitions import loads
from orchestrator.sdk.ids import new_id
from tests.integration.stage import System
from tests.integration.visitor import Visitor

HOUR = timedelta(hours=1)
INSERT = """
INSERT INTO orchestrator.runs (id, name, status, total, open, success, failed, cancelled, skipped, created_at,
                               started_at, ended_at, workflow, version, key, schedule)
VALUES (:id, 'hourly', :status, 1, 0, 1, 0, 0, 0, :at, :at, :ended, 'hourly', 1, :key, 'hourly/default')
"""


def test_a_calendar_tells_late_skipped_and_missed_fires_apart(system: System) -> None:
    system.app.workflows.apply(loads("name: hourly\nschedule: {every: 1h}\ntasks: {only: {task: job}}"))
    now = datetime.now(UTC)
    last = now.replace(minute=0, second=0, microsecond=0)

    def ran(fire: datetime, status: str, late: float, took: float) -> None:
        at = fire + timedelta(seconds=late)
        given = {"id": new_id().hex(), "status": status, "at": at, "ended": at + timedelta(seconds=took)}
        system.sql(INSERT, key=fire_key("hourly/default", fire), **given)

    ran(last - 6 * HOUR, "success", 0, 5)
    ran(last - 5 * HOUR, "success", 0, 4_000)  # so the next fire finds it open
    ran(last - 3 * HOUR, "failed", 300, 5)
    ran(last - 1 * HOUR, "success", 0, 5)
    visitor = Visitor(create_app(system.settings))
    assert 'href="/ui/schedules/hourly/default"' in visitor.get("/ui/schedules").text
    page = visitor.get("/ui/schedules/hourly/default").text
    marks = re.findall(r'class="square s-(\w+) ?(late)?"[^>]*title="[^"]*(\d\d):00', page)
    found = {hour: (state, late) for state, late, hour in marks[-7:]}
    wanted = {6: "success", 5: "success", 4: "skipped", 3: "failed", 2: "missed", 1: "success"}
    for ago, state in wanted.items():
        assert found[f"{last - ago * HOUR:%H}"] == (state, "late" if ago == 3 else ""), (ago, found)
    assert marks[-8][0] == "wait", "before the first run there may have been no schedule"
    assert "late by 5m" in page
    assert visitor.get("/ui/schedules/hourly/none").status_code == 404


def test_cells_of_the_grid_have_times(system: System) -> None:
    worker = system.worker(knows=("job",), slots=10)
    system.app.workflows.apply(loads("name: two\ntasks: {a: {task: job}, b: {task: job, depends_on: [a]}}"))
    for _ in range(2):
        run = system.app.workflows["two"].start()
        for _ in range(2):
            system.pass_seconds()
            worker.succeed(*worker.take())
        system.pass_seconds()
    slow = (
        "UPDATE orchestrator.ended_tasks SET started_at = ended_at - interval '10 s' WHERE run_id = :run AND step = 'a'"
    )
    system.sql(slow, run=str(run.id))
    page = Visitor(create_app(system.settings)).get("/ui/workflows/two").text
    cells = re.findall(r'class="square s-success p(\d)"[^>]*title="(\w): success, ([^"]+)"', page)
    assert cells == [("1", "a", "100ms"), ("5", "a", "10.0s"), ("5", "b", "100ms"), ("5", "b", "100ms")], cells
