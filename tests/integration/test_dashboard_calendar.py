"""The calendar of a schedule, and the times of steps in the grid of a workflow."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from orchestrator.api.app import create_app
from orchestrator.domain.schedules.schedule import fire_key, fires, from_data
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


def test_a_calendar_distinguishes_late_skipped_and_missed_fires(system: System) -> None:
    system.app.workflows.apply(loads("name: hourly\nschedule: {every: 1h}\ntasks: {only: {task: job}}"))
    now = datetime.now(UTC)
    last = now.replace(minute=0, second=0, microsecond=0)

    def ran(fire: datetime, status: str, late: float, took: float) -> None:
        at = fire + timedelta(seconds=late)
        given = {"id": new_id().hex(), "status": status, "at": at, "ended": at + timedelta(seconds=took)}
        system.sql(INSERT, key=fire_key("hourly/default", fire), **given)

    ran(last - 6 * HOUR, "success", 0, 5)
    ran(last - 5 * HOUR, "success", 0, 4_000)  # still open at the next fire
    ran(last - 3 * HOUR, "failed", 300, 5)
    ran(last - 1 * HOUR, "success", 0, 5)
    visitor = Visitor(create_app(system.settings))
    assert 'href="/ui/schedules/hourly/default"' in visitor.get("/ui/schedules").text
    page = visitor.get("/ui/schedules/hourly/default").text
    marks = re.findall(r'class="square s-(\w+) ?(late)?"[^>]*title="[^"]*(\d\d):00:00 UTC', page)
    found = {hour: (state, late) for state, late, hour in marks[-7:]}
    wanted = {6: "success", 5: "success", 4: "skipped", 3: "failed", 2: "missed", 1: "success"}
    for ago, state in wanted.items():
        assert found[f"{last - ago * HOUR:%H}"] == (state, "late" if ago == 3 else ""), (ago, found)
    assert "no run stored" not in page, "it begins with the first run: before there was no schedule"
    assert "late by 5m" in page
    assert visitor.get("/ui/schedules/hourly/none").status_code == 404


def test_a_calendar_shows_the_effects_of_a_scheduler_outage(system: System) -> None:
    system.app.workflows.apply(
        loads("name: hourly\nschedule: {every: 5s, catch_up: all(3), overlap: skip}\ntasks: {only: {task: job}}")
    )
    now = datetime.now(UTC)
    past = [*fires(from_data({"every": 5.0}), now - timedelta(minutes=2), now)][-12:]
    resumed = past[6] + timedelta(seconds=4)

    def ran(number: int, at: datetime, ended: datetime, schedule: str = "hourly/default") -> None:
        given = {"id": new_id().hex(), "status": "success", "at": at, "ended": ended}
        system.sql(INSERT, key=fire_key("hourly/default", past[number]), **given)
        system.sql(
            "UPDATE orchestrator.runs SET schedule = :schedule WHERE id = :id", schedule=schedule, id=given["id"]
        )

    second = timedelta(seconds=1)
    ran(0, past[0], past[0] + second)
    ran(1, past[1], resumed)  # ended during the outage; the scheduler noted that afterwards
    ran(4, resumed, resumed + second / 2)  # the first of `all(3)`; fires 5 and 6 found it open
    ran(7, past[7], past[7] + second)
    ran(8, past[9], now, "hourly/default#1")  # a backfill run; fire 9 was missed
    ran(10, past[10], now + timedelta(minutes=1))  # still open at fire 11
    page = Visitor(create_app(system.settings)).get("/ui/schedules/hourly/default").text
    marks = re.findall(r'class="square s-(\w+) ?(late)?"', page)[:12]
    kept, late, skipped, missed = ("success", ""), ("success", "late"), ("skipped", ""), ("missed", "")
    assert marks[:8] == [kept, kept, missed, missed, late, skipped, skipped, kept]
    assert marks[9:] == [missed, kept, skipped]
    facts = dict(re.findall(r"<dt>(Late|Missed)</dt><dd>(\d+)<", page))
    assert facts == {"Late": "1", "Missed": "3"}


def test_a_calendar_of_a_fast_schedule_shows_its_newest_fires(system: System) -> None:
    system.app.workflows.apply(loads("name: hourly\nschedule: {every: 7s}\ntasks: {only: {task: job}}"))
    schedule = from_data({"every": 7.0})
    now = datetime.now(UTC)
    for fire in [*fires(schedule, now - timedelta(minutes=10), now)][-50::5]:
        given = {"id": new_id().hex(), "status": "success", "at": fire, "ended": fire + timedelta(seconds=33)}
        system.sql(INSERT, key=fire_key("hourly/default", fire), **given)
    facts = r"<dt>(Fires|Success|Skipped)</dt><dd>(\d+) ?<"
    page = Visitor(create_app(system.settings)).get("/ui/schedules/hourly/default").text
    found = dict(re.findall(facts, page))
    assert found["Success"] == "10"
    (window,) = re.findall(r"<small>in (\d+)m", page)
    assert int(window) <= 6, "no longer than it has been there"
    for button in ("Pause", "Run now"):
        assert f">{button}</button>" in page
    system.sql("UPDATE orchestrator.schedules SET next_fire = now() - interval '1 second'")
    page = Visitor(create_app(system.settings)).get("/ui/schedules/hourly/default").text
    assert "<dt>Next</dt><dd>now <small>due <time" in page
    assert 40 <= int(found["Skipped"]) <= 42, found
    assert 50 <= int(found["Fires"]) <= 52, "those before the first run are no fires of this schedule"
    system.sql("UPDATE orchestrator.schedules SET created_at = now() - interval '1 day'")
    page = Visitor(create_app(system.settings)).get("/ui/schedules/hourly/default").text
    found = dict(re.findall(facts, page))
    assert (found["Fires"], found["Success"]) == ("400", "10"), "of more than fit it shows the newest"
    assert "<small>in 46m" in page
    assert re.search(r"<small>\w{3} \d\d \w{3}, \d\d:\d\d to \d\d:\d\d</small>", page), (
        "squares have no hours of their own"
    )


def test_a_grid_of_many_steps_is_folded_and_opened(system: System) -> None:
    steps = ", ".join(f"s_{number}: {{task: job}}" for number in range(200))
    system.app.workflows.apply(loads(f"name: wide\ntasks: {{{steps}}}"))
    worker = system.worker(knows=("job",), slots=300)
    page = Visitor(create_app(system.settings)).get("/ui/workflows/wide").text
    assert ">200 steps</text>" in page
    assert "waiting" not in page.partition("<svg")[2].partition("</svg>")[0], "nothing runs"
    system.app.workflows["wide"].start()
    system.pass_seconds()
    first, *others = worker.take()
    worker.fail(first, retryable=False)
    worker.succeed(*others)
    system.pass_seconds()
    visitor = Visitor(create_app(system.settings))
    rows = r'<th scope="row" title="([^"]+)"'
    page = visitor.get("/ui/workflows/wide").text
    alone, group = re.findall(rows, page)
    assert (alone[:2], group) == ("s_", "s (200)"), "the failed step, and all"
    assert 'class="square s-failed' in page.partition(f'title="{group}"')[2], "a row has the worst state"
    assert '<small class="why" title="In the last run">1 failed, 199 success</small>' in page
    assert 'title="s (200): 1 failed, 199 success, ' in page
    assert 'href="?open=s+%28200%29"' in page
    page = visitor.get("/ui/workflows/wide?open=s+%28200%29").text
    assert len(re.findall(rows, page)) == 151
    assert "Close all groups" in page


def test_cells_of_the_grid_show_durations(system: System) -> None:
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
