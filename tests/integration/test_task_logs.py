"""Log lines of tasks, from a worker to readers, on a real Postgres and a real Redis."""

from __future__ import annotations

import re
import threading
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner

from orchestrator import Retry
from orchestrator.api.app import create_app
from orchestrator.api.dashboard.pages import logs as log_pages
from orchestrator.cli import main
from orchestrator.cli.terminal import logs as terminal
from orchestrator.domain.tasks.task import Dispatch, Lost
from orchestrator.scheduler.pruning import Pruner
from orchestrator.scheduler.upkeep import LogKeeping
from orchestrator.sdk.backend import logs as backend
from orchestrator.store import logs
from orchestrator.store.logs import NewChunk
from orchestrator.transport import journal
from orchestrator.transport.codec import LogLine, encode
from orchestrator.transport.keys import Keys
from orchestrator.workers.reporting.journal import Journal
from orchestrator.workers.running.job import Bundle, Job
from tests.integration.api_client import ApiClient
from tests.integration.stage import System, raw
from tests.integration.visitor import Visitor
from tests.said import say
from tests.waiting import eventually


def keeping(system: System) -> LogKeeping:
    engine = system.engine.execution_options(isolation_level="AUTOCOMMIT")
    return LogKeeping(engine, system.redis, Keys(), threading.Event())


def send_lines(system: System, task: bytes, *texts: str, run: bytes | None = None, attempt: int = 1) -> Job:
    """Send log lines of an attempt, like a worker."""
    words = Journal(system.redis, Keys())
    words._started = True  # no background writer
    dispatch = Dispatch(task, attempt, "job", b"\x92\x90\x80", "default", None, run_id=run)
    job = Job(dispatch, Bundle("g", "default", "1-0", 1), 0, 0.0)
    for text in texts:
        words.log(job, LogLine(1_700_000_000.0, attempt, "info", text, "stdout"))
    words.flush()
    return job


def test_lines_are_stored_and_read_in_order_by_attempt(system: System) -> None:
    handle = system.job.enqueue()
    assert handle.logs() == []
    send_lines(system, raw(handle), "a", "b")
    send_lines(system, raw(handle), "c", attempt=2)
    assert keeping(system).store() == 2
    assert [(line.text, line.attempt, line.level, line.source, line.task, line.step) for line in handle.logs()] == [
        ("a", 1, "info", "stdout", handle.id, "job"),
        ("b", 1, "info", "stdout", handle.id, "job"),
        ("c", 2, "info", "stdout", handle.id, "job"),
    ]
    assert [line.text for line in handle.logs(attempt=2)] == ["c"]
    assert system.redis.xlen(Keys().logs) == 0


def test_lines_are_stored_once_when_the_leader_dies_after_storing_them(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = system.job.enqueue()
    send_lines(system, raw(handle), "a", "b")

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(journal, "drop_lines", die)
        keeping(system).store()
    assert [line.text for line in handle.logs()] == ["a", "b"]
    keeping(system).store()
    assert [line.text for line in handle.logs()] == ["a", "b"]
    assert system.redis.xlen(Keys().logs) == 0


def test_a_page_continues_after_the_last_line_read(system: System) -> None:
    handle = system.job.enqueue()
    for number in range(3):
        send_lines(system, raw(handle), f"{number} a", f"{number} b", attempt=number + 1)
    keeping(system).store()
    tasks = system.app._client.backend.tasks
    everything = tasks.log(raw(handle)).lines
    assert len(everything) == 6
    for place, line in enumerate(everything):
        assert tasks.log(raw(handle), line.entry).lines == everything[place + 1 :]


def test_a_reader_that_follows_a_task_is_woken_by_new_lines(system: System) -> None:
    handle, other = system.job.enqueue(), system.job.enqueue()
    found: list[str] = []

    def follow() -> None:
        page = system.app._client.backend.tasks.log(raw(handle), "", 60.0)
        found.extend(line.text for line in page.lines)

    thread = threading.Thread(target=follow)
    thread.start()
    eventually(lambda: system.redis.info("clients")["blocked_clients"], "somebody waits for lines")
    send_lines(system, raw(other), "not this one")
    keeping(system).store()
    send_lines(system, raw(handle), "hello")
    keeping(system).store()
    thread.join(90)
    assert found == ["hello"]


def test_the_log_of_a_run_contains_the_lines_of_its_tasks(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    run = system.app.start_many(system.job, [1, 2])
    mine = UUID(run.id).bytes
    tasks = [row["id"] for row in system.sql("SELECT id FROM orchestrator.tasks ORDER BY position")]
    for number, task in enumerate(tasks):
        send_lines(system, UUID(str(task)).bytes, f"said {number}", run=mine)
    keeping(system).store()
    assert [line.text for line in run.logs()] == ["said 0", "said 1"]
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", system.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", system.settings.redis_url)
    shown = CliRunner().invoke(main, ["runs", "logs", run.id])
    assert shown.stdout == "22:13:20 job info     said 0\n22:13:20 job info     said 1\n"
    assert CliRunner().invoke(main, ["runs", "logs", run.id, "--last", "1"]).stdout.endswith("job info     said 1\n")


def test_the_api_returns_pages_last_lines_and_single_attempts(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "PAGE", 2)
    run = system.app.start_many(system.job, [1])
    (row,) = system.sql("SELECT id FROM orchestrator.tasks")
    task = UUID(str(row["id"]))
    for attempt in (1, 2, 3):
        send_lines(system, task.bytes, f"{attempt} a", f"{attempt} b", attempt=attempt, run=UUID(run.id).bytes)
    keeping(system).store()
    server = ApiClient(system.settings)

    def read(path: str) -> dict[str, Any]:
        answer = server.get(f"/api/v1/{path}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    for path in (f"tasks/{task}/logs", f"runs/{run.id}/logs"):
        first = read(path)
        second = read(f"{path}?cursor={first['cursor']}")
        said = [line["text"] for line in [*first["lines"], *second["lines"]]]
        assert said == [f"{attempt} {name}" for attempt in (1, 2, 3) for name in "ab"]
        assert read(f"{path}?cursor={second['cursor']}") == {"lines": [], "cursor": None}
    line = first["lines"][0]
    assert (line["task"], line["step"], line["attempt"], line["source"]) == (str(task), "job", 1, "stdout")
    assert [line["text"] for line in read(f"tasks/{task}/logs?last=3")["lines"]] == ["2 b", "3 a", "3 b"]
    assert [line["text"] for line in read(f"tasks/{task}/logs?attempt=2")["lines"]] == ["2 a", "2 b"]


def test_attempts_have_headings_if_a_task_has_several(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", system.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", system.settings.redis_url)
    monkeypatch.setattr(terminal, "_WAIT", 0.05)
    worker = system.worker()
    (handle,) = system.dispatch()

    def show(*options: str) -> str:
        done = CliRunner().invoke(main, ["tasks", "logs", handle.id, *options])
        return f"{done.exit_code} {done.stdout}{done.stderr}".replace("22:13:20 info     ", "")

    send_lines(system, raw(handle), "a", "b")
    keeping(system).store()
    assert show() == "0 a\nb\n"
    assert "has had 1 attempt: there is no attempt 2" in show("--attempt", "2")
    worker.report(*(Lost(task.id, task.attempt, alone=False) for task in worker.take()))
    system.pass_seconds(2)
    worker.succeed(*worker.take())
    system.pass_seconds(2)
    send_lines(system, raw(handle), "c", "d", attempt=2)
    keeping(system).store()
    late = encode([LogLine(1_700_000_000.0, 1, "info", "last words", "stdout")])
    with system.engine.begin() as connection:
        logs.insert(connection, [NewChunk(raw(handle), 1, 1, None, "job", late)])
    assert show() == "0 — attempt 1 —\na\nb\nlast words\n— attempt 2 —\nc\nd\n"
    assert show("--last", "3") == "0 — attempt 1 —\nlast words\n— attempt 2 —\nc\nd\n"
    assert show("--attempt", "2") == "0 c\nd\n"
    assert show("--attempt", "2", "--follow", "--last", "1") == "0 d\n"
    assert show("--follow") == "0 a\nb\n— attempt 2 —\nc\nd\n— attempt 1 —\nlast words\n"
    assert show("--follow", "--last", "1") == "0 last words\n"
    assert show("--attempt", "3").startswith("1 ")
    assert "has had 2 attempts: there is no attempt 3" in show("--attempt", "3", "--follow")


def test_attempt_numbers_that_were_skipped_after_lost_commits_are_named_with_the_reason(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", system.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", system.settings.redis_url)
    worker = system.worker()
    system.sql("UPDATE orchestrator.leases SET fence = 1000000 RETURNING 1")
    (handle,) = system.dispatch()
    send_lines(system, raw(handle), "a", attempt=1_000_001)
    worker.succeed(*worker.take())
    system.pass_seconds(2)
    keeping(system).store()

    def show(attempt: str) -> str:
        done = CliRunner().invoke(main, ["tasks", "logs", handle.id, "--attempt", attempt])
        return f"{done.exit_code} {done.stdout}{done.stderr}"

    assert show("1000001").endswith(" a\n")
    assert "has no attempt 1: attempts 1 to 1,000,000 do not exist: Postgres lost commits" in show("1")


def test_following_an_attempt_stops_at_its_end(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", system.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", system.settings.redis_url)
    worker = system.worker()
    (handle,) = system.dispatch(retries=Retry(max=1, base=600.0, jitter=0))
    send_lines(system, raw(handle), "a")
    keeping(system).store()
    worker.fail(*worker.take())
    system.pass_seconds(2)
    assert handle.status() == "pending"
    done = CliRunner().invoke(main, ["tasks", "logs", handle.id, "--follow", "--attempt", "1"])
    assert (done.exit_code, done.stdout) == (0, "22:13:20 info     a\n")


def test_old_lines_and_lines_of_pruned_tasks_are_deleted(system: System) -> None:
    old, ended, kept = system.job.enqueue(), system.job.enqueue(), system.job.enqueue()
    for handle in (old, ended, kept):
        send_lines(system, raw(handle), "word")
        keeping(system).store()
    system.sql(
        "UPDATE orchestrator.task_logs SET stored_at = now() - interval '8 days' WHERE task_id = CAST(:id AS uuid)",
        id=old.id,
    )
    worker = system.worker()
    system.pass_seconds(2)
    for task in worker.take():
        if task.id == raw(ended):
            worker.succeed(task)
    system.pass_seconds(2)
    system.sql("UPDATE orchestrator.ended_tasks SET ended_at = now() - interval '8 days'")
    engine = system.engine.execution_options(isolation_level="AUTOCOMMIT")
    pruner = Pruner(engine, system.settings, threading.Event())
    with engine.connect() as connection:
        list(pruner.slices(connection))
    assert [(bool(handle.logs())) for handle in (old, kept)] == [False, True]
    assert system.count("task_logs") == 1


def test_a_page_shows_where_lines_were_dropped(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    task = raw(system.job.enqueue(1))
    gap = LogLine(1_700_000_000.0, 1, "warning", "7 lines (14 bytes) were dropped here: too fast", "dropped")
    around = [LogLine(1_700_000_000.0, 1, "info", text, "stdout") for text in ("before", "after", "last")]
    say(system.engine, task, around[0], gap, *around[1:])
    visitor = Visitor(create_app(system.settings))

    def shown() -> tuple[str, list[str]]:
        before, _, log = (
            visitor.get(f"/ui/tasks/{UUID(bytes=task)}").text.partition('id="log-before"')[2].partition('id="log"')
        )
        return before, re.findall(r"</b><span>(.*?)</span></p>", log)

    before, lines = shown()
    assert lines == ["before", gap.text, "after", "last"]
    assert "lines" not in before
    monkeypatch.setattr(log_pages, "_LINES", 2)
    before, lines = shown()
    assert lines == ["after", "last"]
    assert "2 lines</strong> before these" in before
    assert "Before these: 7 lines (14 bytes) were dropped: too fast" in before
