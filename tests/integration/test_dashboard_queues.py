"""The pages of queues and workers: the slowest tasks, the oldest waiting tasks and their reasons, the last hour."""

from __future__ import annotations

import html
import re
import socket
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner
from sqlalchemy import text

from orchestrator import Handle
from orchestrator.api.app import create_app
from orchestrator.cli import main
from orchestrator.sdk.dag.definitions import loads
from orchestrator.store.insights import activity, limited_until, obstacles
from tests.integration.planning import measured, rows_read, scans
from tests.integration.stage import System
from tests.integration.visitor import Visitor

PAGE = "/ui/queues/default"
AGE = "UPDATE orchestrator.tasks SET created_at = created_at - interval '1 hour'"


def waits(system: System, queue: str = "default") -> list[str]:
    """Return the reasons that a queue's page gives for its waiting tasks, oldest first."""
    page = Visitor(create_app(system.settings)).get(f"/ui/queues/{queue}").text
    part = page.partition("Waiting longest")[2].partition("Slowest in")[0]
    return [html.unescape(with_full_ids(one)) for one in re.findall(r'class="why">(.*?)</small>', part)]


def with_full_ids(page: str) -> str:
    """Return the page with links to tasks replaced by full task ids."""
    return re.sub(r'<a class="mono" href="/ui/tasks/([-0-9a-f]{36})">([0-9a-f]{8})</a>', r"\1", page)


def waits_for(system: System, task: Handle[Any]) -> str:
    """Return why a task waits, as its page, its command and the API say."""
    visitor = Visitor(create_app(system.settings))
    said = CliRunner().invoke(main, ["tasks", "show", task.id]).output
    answer = visitor.get(f"/api/v1/tasks/{task.id}").json()["waits_for"]
    page = html.unescape(with_full_ids(visitor.get(f"/ui/tasks/{task.id}").text))
    assert answer in page
    assert answer in said.partition("waits for ")[2]
    return str(answer)


@pytest.mark.usefixtures("in_empty_folder")
def test_a_queue_says_why_its_oldest_tasks_wait(system: System) -> None:
    system.worker(knows=("job",), slots=2)
    delayed = system.job.options(delay=3600).enqueue(0)
    system.dispatch(2)
    waiting = system.job.enqueue(3)
    assert waits(system) == ["No capacity: the workers have 2 slots"] == [waits_for(system, waiting)]
    system.app.queue("default").limit(concurrency=2)
    assert waits(system) == ["The limit of the queue: 2 at once"] == [waits_for(system, waiting)]
    system.sql(AGE)
    system.app.queue("default").pause()
    assert waits(system)[0].startswith("Queue 'default' is paused.")
    assert waits(system)[0] == waits_for(system, waiting)
    system.app.queue("default").resume()
    unserved = system.job.options(queue="empty").enqueue(4)
    assert waits(system, "empty")[0].startswith("Queue 'empty' has ready tasks and no live worker.")
    assert waits(system, "empty")[0] == waits_for(system, unserved)
    shown = Visitor(create_app(system.settings)).get(f"/api/v1/tasks/{delayed.id}").json()
    assert shown["waits_for"] is None, "it waits for its time"


@pytest.mark.usefixtures("in_empty_folder")
def test_waits_for_task_limits_and_dependencies_are_explained(system: System) -> None:
    worker = system.worker(knows=("job", "limited"), slots=50)
    limited = system.app.task(name="limited", concurrency=1)(lambda: None)
    _, second = limited.enqueue(), limited.enqueue()
    system.pass_seconds()
    (running,) = worker.take()
    holder = f"which task {UUID(bytes=running.id)} has"
    assert waits(system) == [f"The limit of task limited: 1 at once, {holder}"] == [waits_for(system, second)]
    visitor, link = Visitor(create_app(system.settings)), f'href="/ui/tasks/{UUID(bytes=running.id)}"'
    assert all(link in visitor.get(path).text for path in ("/ui/queues/default", f"/ui/tasks/{second.id}"))
    system.sql("UPDATE orchestrator.tasks SET lane = 'limited|ada'")
    assert waits(system) == [f"The limit of task limited for the key 'ada': 1 at once, {holder}"]
    system.sql("UPDATE orchestrator.tasks SET lane = 'limited|'")
    worker.succeed(running)
    system.pass_seconds()
    worker.succeed(*worker.take())
    blocked = system.job.enqueue(1)
    system.sql("UPDATE orchestrator.tasks SET blockers = 1 WHERE name = 'job'")
    assert waits(system) == ["Waiting on dependencies"] == [waits_for(system, blocked)]
    assert "<dt>Waiting on dependencies</dt><dd>1</dd>" in Visitor(create_app(system.settings)).get(PAGE).text
    system.sql("UPDATE orchestrator.tasks SET run_id = id WHERE name = 'job'")
    assert waits(system) == [], "it waits for an event, and for no worker"
    assert waits_for(system, blocked).startswith("Its code waits for a promise")
    assert "<dt>Waiting on dependencies</dt><dd>0</dd>" in Visitor(create_app(system.settings)).get(PAGE).text
    for path in (PAGE, "/ui/tasks", "/ui/tasks?status=pending", "/ui/tasks?status=pending&sort=when"):
        assert blocked.id not in Visitor(create_app(system.settings)).get(path).text, f"{path} is about tasks"
    assert blocked.id in Visitor(create_app(system.settings)).get(f"/ui/tasks?run={blocked.id}").text
    system.sql("UPDATE orchestrator.tasks SET blockers = 0 WHERE name = 'job'")
    assert blocked.id in Visitor(create_app(system.settings)).get("/ui/tasks?status=pending").text, "it wants a worker"
    system.expire_lease()
    assert waits(system)[0].startswith("No scheduler leads")
    assert waits(system)[0] == waits_for(system, blocked)


def test_one_cause_gives_one_alarm(system: System) -> None:
    system.worker(knows=("job",), slots=2)
    system.dispatch(1)
    system.job.options(queue="empty").enqueue(1)
    system.sql(AGE)

    def alarms(**changed: Any) -> list[str]:
        page = Visitor(create_app(replace(system.settings, **changed))).get("/ui").text
        return re.findall(r'class="item" data-key="([^"]*)"', page)

    assert alarms() == ["no worker-empty"]
    system.expire_lease()
    assert alarms() == ["no leader-"], "nobody knows of the workers then"
    assert alarms(redis_url="redis://127.0.0.1:1/0") == ["redis away-"], "without Redis no scheduler leads"
    system.app.queue("empty").pause()
    assert alarms(redis_url="redis://127.0.0.1:1/0") == ["redis away-", "paused queue-empty"], "the cause comes first"


LIMITED = """
name: limited
tasks:
  first: {task: limited}
  second: {task: limited}
  free: {task: other}
"""


def waits_of_steps(system: System, run: str) -> dict[str, list[str]]:
    """Return the wait bars before each step in a run's timeline."""
    page = Visitor(create_app(system.settings)).get(f"/ui/runs/{run}").text
    rows = re.findall(r'role="cell" class="name" title="(\w+)"(.*?)role="cell" class="took"', page, re.DOTALL)
    return {name: re.findall(r'<rect class="(limited|queued)"', row) for name, row in rows}


def test_a_timeline_distinguishes_limit_waits_from_queue_waits(system: System) -> None:
    worker = system.worker(knows=("limited", "other"), slots=50)
    system.app.task(name="limited", concurrency=1)(lambda: None)
    system.app.task(name="other")(lambda: None)
    system.app.workflows.apply(loads(LIMITED))
    run = system.app.workflows["limited"].start()
    system.pass_seconds(2)
    taken = worker.take()
    assert len(taken) == 2
    found = waits_of_steps(system, str(run.id))
    assert sorted(name for name, waits in found.items() if "limited" in waits) == ["second"], found
    worker.succeed(*taken)
    system.pass_seconds(2)
    worker.succeed(*worker.take())
    system.pass_seconds(2)
    assert run.progress().status == "success"
    system.sql("UPDATE orchestrator.ended_tasks SET started_at = ended_at WHERE step = 'second'")  # zero duration
    found = waits_of_steps(system, str(run.id))
    assert sorted(name for name, waits in found.items() if "limited" in waits) == ["second"], found


def test_the_workers_page_says_that_no_worker_is_live(system: System) -> None:
    system.pass_seconds()
    assert "No live worker" in Visitor(create_app(system.settings)).get("/ui/workers").text
    system.worker(knows=("job",))
    system.pass_seconds()
    assert "No live worker" not in Visitor(create_app(system.settings)).get("/ui/workers").text


def test_the_slowest_tasks_of_a_queue_and_a_worker_are_listed(system: System) -> None:
    worker = system.worker(knows=("job",), slots=50)
    tasks = system.dispatch(12)
    worker.succeed(*worker.take())
    system.pass_seconds()
    for number, task in enumerate(tasks):
        slow = "UPDATE orchestrator.ended_tasks SET started_at = ended_at - make_interval(secs => :n) WHERE id = :id"
        system.sql(slow, n=number + 1, id=str(task.id))
    visitor = Visitor(create_app(system.settings))
    for path in ("/ui/queues/default", "/ui/workers/w1"):
        page = visitor.get(path).text
        listed = re.findall(r'data-key="slow-([^"]+)"', page)
        assert listed == [str(task.id) for task in reversed(tasks)][:10], path
    assert 'href="/ui/workers/w1"' in visitor.get("/ui/workers").text
    page = visitor.get("/ui/workers/w1").text
    assert "12 succeeded" in page
    assert re.search(r"Run time</td><td class=\"number\">≤ [\d.]+s", page)
    assert visitor.get("/ui/workers/nobody").status_code == 404


@pytest.mark.parametrize("table", ["tasks", "ended_tasks"])
def test_the_oldest_and_slowest_tasks_are_found_by_index(system: System, table: str) -> None:
    since = datetime.now(UTC) - timedelta(hours=1)
    indexes: tuple[str, ...]
    given: dict[str, object]
    if table == "tasks":
        statement, given = obstacles._OLDEST.sql, {"queue": "q", "limit": 10}
        indexes = ("tasks_ready", "tasks_in_lane", "tasks_pkey")
    else:
        statement, given = activity._SLOWEST.sql, {"since": since, "queue": "q", "worker": None, "limit": 10}
        indexes = ("ended_tasks_by_time",)
    with system.engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")  # as in a table with more than a few rows
        plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {statement}", given).scalars())
    for index in indexes:
        assert index in plan, plan
    assert not re.search(rf"Seq Scan on {table}\b", plan), plan


OTHERS = 20_000
"""Number of unrelated tasks, ended and open each; a run's timeline must not read them all."""
_RUN = "00000000-0000-0000-0000-000000000001"
_ENDED = f"""
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload, lane,
                                      created_at, started_at, ended_at, run_id, step, position)
SELECT gen_random_uuid(), n, 'job', 'q', 0, 'success', 1, 0, 0, '', 'job|' || n % 100, at, at, at,
       CASE WHEN n % {OTHERS // 10} = 0 THEN '{_RUN}'::uuid END,
       CASE WHEN n % {OTHERS // 10} = 0 THEN 'step' || n END, 0
  FROM (SELECT n, now() - interval '1 hour' + n * interval '1 ms' AS at FROM generate_series(1, {OTHERS}) AS n) AS ends
"""
_OPEN = f"""
INSERT INTO orchestrator.tasks (id, name, queue, payload, lane, status, run_id, step, position)
SELECT gen_random_uuid(), 'job', 'q', '', CASE WHEN n <= 2000 THEN 'other|' ELSE 'job|' END || n % 100,
       CASE WHEN n <= 2000 THEN 'running' ELSE 'pending' END,
       CASE WHEN n > {OTHERS} - 10 THEN '{_RUN}'::uuid END, CASE WHEN n > {OTHERS} - 10 THEN 'open' || n END, 0
  FROM generate_series(1, {OTHERS}) AS n
"""


def test_a_timeline_reads_only_recent_and_in_flight_limited_tasks(system: System) -> None:
    steps = [f"step{n}" for n in range(0, OTHERS + 1, OTHERS // 10)]
    steps += [f"open{n}" for n in range(OTHERS - 9, OTHERS + 1)]
    with system.engine.begin() as connection:
        for statement in (_ENDED, _OPEN):
            connection.execute(text(statement))
        connection.exec_driver_sql("UPDATE orchestrator.ended_tasks SET created_at = now() - interval '2 hours'")
        connection.exec_driver_sql("ANALYZE orchestrator.tasks")
        connection.exec_driver_sql("ANALYZE orchestrator.ended_tasks")
        (plan,) = measured(connection, lambda spy: limited_until(spy, UUID(_RUN), steps))
        connection.rollback()
    reads = scans(plan, "tasks", "ended_tasks")
    assert {scan["Relation Name"] for scan in reads} == {"tasks", "ended_tasks"}
    for scan in reads:
        assert scan["Node Type"] != "Seq Scan", scan
        assert rows_read(scan) <= len(steps) * 300, scan


def test_pages_report_a_hanging_redis_without_waiting_for_it(system: System) -> None:
    """Redis accepts connections and answers nothing."""
    worker = system.worker(slots=1)
    system.settle()
    system.dispatch()
    system.job.enqueue(2)
    worker.start(*worker.take())
    system.tick()
    healthy = Visitor(create_app(system.settings))
    assert "does not hear" not in healthy.get("/ui/tasks").text
    system.sql("UPDATE orchestrator.workers SET seen_at = now() - interval '1 minute' RETURNING id")
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        visitor = Visitor(create_app(replace(system.settings, redis_url=url)))
        began = time.monotonic()
        for path in ("/ui/tasks", "/ui/failures", "/ui/queues", PAGE, "/ui/runs", "/ui/schedules"):
            page = visitor.get(path).text
            assert page.count('data-key="outage"') == 1, path
            assert "The scheduler receives nothing from the workers; its log says why" in page, path
            assert 'data-pulse="/ui/pulse"' in page, path
            assert "no worker serves it" not in page, path
        assert time.monotonic() - began < 8, "one question to such a Redis takes ten seconds by default"
        page = visitor.get("/ui/queues").text
        assert re.search(r'<td class="number wide">unknown</td>', page)
        overview = visitor.get("/ui").text
        assert overview.count("Redis cannot be reached") == 1
        assert "does not hear the workers" not in overview, "one cause is one trouble"
        assert "Redis cannot be reached" in visitor.get("/ui/queues").text, "others have asked it lately"
