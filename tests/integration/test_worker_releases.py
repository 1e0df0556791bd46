"""The release of the application that ran an attempt: stored by worker, and shown with tasks and failures."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator import Handle
from orchestrator.api.app import create_app
from orchestrator.cli import main
from orchestrator.errors import ConfigurationError
from orchestrator.settings import load_settings
from orchestrator.store import retention
from tests.integration.stage import System, Worker
from tests.integration.visitor import Visitor

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def fail_on(system: System, worker: Worker, number: int = 1) -> Handle[Any]:
    """Let a worker fail a task permanently."""
    handle = system.job.enqueue(number)
    system.tick_until(lambda: system.states(handle) == ["dispatched"])
    worker.fail(*worker.take(), retryable=False)
    system.tick_until(lambda: system.states(handle) == ["failed"])
    return handle


def started(system: System, worker: str, ago: str) -> None:
    """Set when a worker started."""
    system.sql(
        "UPDATE orchestrator.worker_releases SET started_at = now() - CAST(:ago AS interval) WHERE worker = :worker",
        ago=ago,
        worker=worker,
    )


def run(*words: str) -> str:
    found = CliRunner().invoke(main, list(words))
    assert found.exit_code == 0, found.output
    return found.output


def test_attempts_keep_the_release_after_their_worker_is_gone(system: System) -> None:
    worker = system.worker("old-1-aa")
    worker.release = "2026.1"
    worker.beat()
    task = fail_on(system, worker)
    worker.leave()
    system.sql("DELETE FROM orchestrator.workers")
    assert "2026.1" in run("tasks", "show", task.id)
    assert json.loads(run("tasks", "show", task.id, "--json"))["attempts"][-1]["release"] == "2026.1"
    visitor = Visitor(create_app(system.settings))
    assert visitor.get(f"/api/v1/tasks/{task.id}").json()["attempts"][-1]["release"] == "2026.1"
    assert 'release=2026.1">2026.1</a>' in visitor.get(f"/ui/tasks/{task.id}").text


def test_tasks_are_filtered_by_the_release_of_their_last_attempt(system: System) -> None:
    old = system.worker("old-1-aa")
    old.release = "1"
    old.beat()
    first = fail_on(system, old)
    old.leave()
    new = system.worker("new-1-aa")
    new.release = "2"
    new.beat()
    second = fail_on(system, new)
    for release, found in (("1", [first.id]), ("2", [second.id]), ("3", [])):
        for status in ((), ("--status", "failed")):
            listed = json.loads(run("tasks", "list", "--release", release, *status, "--json"))["tasks"]
            assert [task["id"] for task in listed] == found
    page = Visitor(create_app(system.settings)).get("/ui/tasks?release=1").text
    assert first.id in page
    assert second.id not in page


def test_failure_groups_name_releases_and_mark_new_failures(system: System) -> None:
    old, new = system.worker("old-1-aa"), system.worker("new-1-aa")
    old.release, new.release = "1", "2"
    old.beat()
    new.beat()
    system.pass_seconds()
    started(system, "old-1-aa", "2 hours")
    started(system, "new-1-aa", "1 hour")

    def failed(name: str, worker: str, ago: str) -> None:
        system.sql(
            "INSERT INTO orchestrator.ended_tasks (id, name, queue, priority, seq, attempt, status, error, failures,"
            " losses, payload, created_at, ended_at, worker) VALUES (gen_random_uuid(), :name, 'default', 0, 1, 1,"
            " 'failed', CAST(:error AS jsonb), 1, 0, '', now(), now() - CAST(:ago AS interval), :worker)",
            name=name,
            error='{"kind": "E", "message": "broken", "traceback": ""}',
            ago=ago,
            worker=worker,
        )

    failed("known", "old-1-aa", "90 minutes")
    failed("known", "new-1-aa", "5 minutes")
    failed("beside", "old-1-aa", "20 minutes")  # an old worker runs beside the new one
    failed("beside", "new-1-aa", "10 minutes")
    failed("broken", "new-1-aa", "30 minutes")
    page = Visitor(create_app(system.settings)).get("/ui/failures").text
    rows = {
        name: re.search(rf'<tr data-key="{name}-default-E#[^"]*">.*?</tr>', page, re.DOTALL)[0]  # type: ignore[index]
        for name in ("known", "beside", "broken")
    }
    assert [name for name, row in rows.items() if "new in release 2" in row] == ["broken"]
    assert "first seen in release 1; also in <a" in rows["known"]
    assert "first seen in release 2<" in rows["broken"]


def test_a_release_expires_with_the_attempts_of_its_worker(system: System) -> None:
    worker = system.worker("old-1-aa")
    worker.release = "1"
    worker.beat()
    system.pass_seconds()
    [row] = system.sql("SELECT until FROM orchestrator.worker_releases")
    assert abs((row["until"] - datetime.now(UTC)).total_seconds() - system.settings.retention_failed) < 3600
    system.sql("UPDATE orchestrator.worker_releases SET until = until - interval '2 days'")
    system.pass_seconds(6)
    assert system.sql("SELECT until FROM orchestrator.worker_releases")[0]["until"] >= row["until"], "while it lives"
    system.sql("UPDATE orchestrator.worker_releases SET until = now() - interval '1 second'")
    with system.engine.begin() as connection:
        assert retention.forget_expired(connection, "worker_releases", 10) == 1


def test_workers_report_their_release(system: System) -> None:
    worker = system.worker("w-1-aa")
    system.pass_seconds()
    assert system.count("worker_releases") == 0, "nothing is stored of a worker without one"
    worker.release = "2026.1"
    worker.beat()
    system.pass_seconds(6)
    assert "2026.1" in run("workers")
    visitor = Visitor(create_app(system.settings))
    assert "release 2026.1" in visitor.get("/ui/workers").text
    assert "release 2026.1" in visitor.get("/ui/workers/w-1-aa").text
    assert visitor.get("/api/v1/workers").json()["workers"][0]["release"] == "2026.1"


@pytest.mark.parametrize("release", ["x" * 101, "a\nb", "a\0b"])
def test_a_release_must_be_a_short_printable_name(release: str) -> None:
    with pytest.raises(ConfigurationError, match="Setting release: expected up to 100 printable characters"):
        load_settings(release=release)


def test_the_line_of_a_release_is_in_the_bar_of_its_minute(system: System) -> None:
    at = datetime.now(UTC) - timedelta(minutes=30)
    columns = "worker, release, started_at, until"
    system.sql(f"INSERT INTO orchestrator.worker_releases ({columns}) VALUES ('w', '7', :at, now())", at=at)
    system.job.enqueue(1)
    for path in ("/ui", "/ui/queues/default"):
        begins = [datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=59)]
        page = Visitor(create_app(system.settings)).get(path).text
        begins.append(datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=59))
        (chart,) = re.findall(r'(<svg class="bars[^"]*" viewBox="0 0 60 .*?</svg>)', page, re.DOTALL)[:1]
        (x,) = re.findall(r'release 7 deployed</title><line x1="([\d.]+)"', chart)
        places = [(at - begin).total_seconds() / 60 for begin in begins]
        assert float(x) in [place // 1 for place in places], (path, x, places)
