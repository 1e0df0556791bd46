"""The command line against real Postgres and Redis: its reads, its writes and its failures."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psutil
import pytest
from click.testing import CliRunner, Result
from redis import Redis
from sqlalchemy import Connection, Engine

from orchestrator.cli import main
from orchestrator.cli.runs.progress import watch_run
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.tasks.task import NewTask
from orchestrator.embedded import EmbeddedServices
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import encode_call
from orchestrator.store import database, fleet, inbox, insights, leases
from orchestrator.store.fleet import WorkerRow
from orchestrator.store.insights import RunFilter, RunView, TaskFilter
from orchestrator.store.insights.arguments import Needles
from orchestrator.store.runs import creation
from orchestrator.store.runs import transitions as runs
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.tasks import claims, enqueue, transitions
from orchestrator.store.tasks.claims import Claimed
from orchestrator.store.tasks.transitions import AttemptEnd, AttemptStart, Requeue, Success
from orchestrator.transport import journal
from orchestrator.transport.codec import Ended, LogLine, ProgressMark, encode
from orchestrator.transport.keys import Keys
from tests import forking
from tests.databases import new_database
from tests.said import say
from tests.waiting import eventually

ERROR = json.dumps({"kind": "ValueError", "message": "oh [no]", "traceback": "Traceback …\nValueError: oh [no]"})
NOBODY = "00000000-0000-7000-8000-000000000000"
SHOP = """
from orchestrator import Orchestrator
app = Orchestrator()

@app.task(queue="typed", retries=2)
def resize(path: str, width: int = 100) -> str: ...

@app.task(name="one.same")
def one(): ...

@app.task(name="two.same")
def two(): ...
"""


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def run(in_empty_folder: Path) -> Callable[..., Result]:
    """Run a command in an empty folder."""
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def read(run: Callable[..., Result]) -> Callable[..., Any]:
    """Run a command with --json and return its document."""

    def document(*words: object) -> Any:
        result = run(*words, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return document


class Story:
    """Tasks of one queue, brought to all kinds of states through the store, as a leader would."""

    def __init__(self, connection: Connection, queue: str) -> None:
        self.connection = connection
        self.queue = queue

    def new(self, *arguments: Any, name: str = "shop.resize", run_id: bytes | None = None, **options: Any) -> bytes:
        payload = encode_call(name, arguments, {"width": 200}, 1_000)
        task = NewTask(id=new_id(), name=name, queue=self.queue, payload=payload, run_id=run_id, **options)
        enqueue.copy_tasks(self.connection, [task])
        return task.id

    def claimed(self, *arguments: Any, **options: Any) -> bytes:
        task = self.new(*arguments, priority=100, **options)  # claimed first
        claimed = claims.claim(self.connection, {self.queue: 1}, self.now)
        assert [found.id for found in claimed] == [task]
        return task

    def running(self, *arguments: Any, **options: Any) -> bytes:
        task = self.claimed(*arguments, **options)
        transitions.start(self.connection, [AttemptStart(task, 1, 0.5, "worker-1")], self.now)
        return task

    def succeeded(self, result: Any, **options: Any) -> bytes:
        task = self.claimed("a.png", **options)
        rows = [Success(task, 1, msgspec.msgpack.encode(result), 1.25, "worker-1")]
        assert transitions.succeed(self.connection, rows, self.now)
        return task

    def failed(self, **options: Any) -> bytes:
        task = self.claimed("a.png", **options)
        ending = AttemptEnd(task, 1, "ValueError", ERROR, failures=1, worker="worker-1", duration=0.5)
        assert transitions.end(self.connection, TaskState.FAILED, [ending], self.now)
        return task

    def held(self) -> bytes:
        task = self.claimed("a.png", name="shop.unheard_of")
        transitions.requeue(self.connection, [Requeue(task, 1, 60.0, hold="unknown")], self.now)
        return task

    @property
    def now(self) -> datetime:
        return datetime.now(UTC)


@contextmanager
def story(engine: Engine, queue: str) -> Iterator[Story]:
    with engine.begin() as connection:
        yield Story(connection, queue)


def text(identifier: bytes) -> str:
    return str(UUID(bytes=identifier))


def ids(document: Any) -> list[str]:
    return [task["id"] for task in document["tasks"]]


# -- tasks


def test_a_list_holds_open_and_ended_tasks_newest_first(engine: Engine, read: Callable[..., Any]) -> None:
    with story(engine, "mixed") as tale:
        made = [tale.succeeded(1), tale.new("a"), tale.failed(), tale.running("b"), tale.new("c", delay=60)]
    found = read("tasks", "list", "--queue", "mixed")
    assert ids(found) == [text(task) for task in reversed(made)]
    assert found["next"] is None
    states = {task["id"]: task["status"] for task in found["tasks"]}
    assert [states[text(task)] for task in made] == ["success", "pending", "failed", "running", "pending"]
    assert all(task["created_at"].endswith("Z") for task in found["tasks"])


def test_filters_narrow_a_list(engine: Engine, read: Callable[..., Any]) -> None:
    with story(engine, "filtered") as tale:
        won, lost, waits = tale.succeeded(1), tale.failed(name="shop.other"), tale.new("a")

    def found(*options: str) -> set[str]:
        return set(ids(read("tasks", "list", "--queue", "filtered", *options)))

    assert found("--status", "failed") == {text(lost)}
    assert found("--status", "pending") == {text(waits)}
    assert found("--status", "pending", "--status", "success") == {text(waits), text(won)}
    assert found("--name", "shop.other") == {text(lost)}
    assert found("--name", "shop.other", "--status", "pending") == set()


def test_tasks_are_filtered_by_end_time_and_error(
    engine: Engine, run: Callable[..., Result], read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with story(engine, "ends") as tale:
        made = [tale.succeeded(1), tale.failed(), tale.failed(), tale.succeeded(2), tale.failed()]
        tale.new("open")
        for hours, task in zip((5, 4, 3, 2, 1), made, strict=True):
            ended = (
                "UPDATE orchestrator.ended_tasks SET ended_at = now() - make_interval(hours => %(h)s) WHERE id = %(id)s"
            )
            tale.connection.exec_driver_sql(ended, {"h": hours, "id": text(task)})
        tale.connection.exec_driver_sql(
            "UPDATE orchestrator.ended_tasks SET error = %(error)s WHERE id = %(id)s",
            {"error": json.dumps({"kind": "shop.Refused", "message": "no Rye"}), "id": text(made[2])},
        )
    names = {text(task): place for place, task in enumerate(made, 1)}

    def found(*options: str) -> list[int]:
        return [names[task] for task in ids(read("tasks", "list", "--queue", "ends", *options))]

    assert found("--since", "3h30m") == [5, 4, 3], "the last to end first, and none that is open"
    assert found("--until", "3h30m") == [2, 1]
    assert found("--since", "4h30m", "--until", "90m") == [4, 3, 2]
    assert found("--error", "rye") == [3]
    assert found("--error", "REFUSED: no") == [3]
    assert found("--since", "1d", "--status", "success") == [4, 1]
    assert found("--since", "1d", "--before", text(made[3])) == [3, 2, 1]
    assert run("tasks", "list", "--queue", "ends", "--since", "1d").output.split()[3] == "ended"
    assert run("tasks", "list", "--since", "1d", "--status", "pending").exit_code == 2
    monkeypatch.setattr(insights.tasks, "MAX_ENDS_SCANNED", 1)
    assert found("--error", "rye") == [3], "however little one page looks at"
    assert found("--status", "failed", "--status", "cancelled") == [5, 3, 2]


def test_searches_by_end_use_an_index(connection: Connection) -> None:
    connection.exec_driver_sql("SET LOCAL enable_seqscan = off")  # as in a large table
    for wanted, index in (
        (TaskFilter(since=datetime.now(UTC)), "ended_tasks_by_time"),
        (TaskFilter(error="x"), "ended_tasks_not_success"),
    ):
        for statement in (insights.tasks._LIST_BY_END, insights.tasks._OLDEST[insights.tasks._LIST_BY_END]):
            parameters = insights.tasks._parameters(wanted, 50, None)
            plan = connection.exec_driver_sql(f"EXPLAIN {statement.sql}", parameters).scalars().all()
            assert index in "\n".join(plan)
    connection.exec_driver_sql("SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off")
    needles = Needles(["aa", "bb"], "aa")
    parameters = insights.tasks._parameters(TaskFilter(), 50, None, needles) | {"horizon": str(uuid4())}
    plan = connection.exec_driver_sql(f"EXPLAIN {insights.tasks._LIST.sql}", parameters).scalars().all()
    for table in ("tasks", "ended_tasks"):
        assert f"Backward using {table}_pkey" in "\n".join(plan)
    assert "Seq Scan" not in "\n".join(plan)
    connection.rollback()


def test_a_task_that_waits_for_a_retry_shows_its_next_attempt(engine: Engine, run: Callable[..., Result]) -> None:
    with story(engine, "tries") as tale:
        task = tale.claimed("a.png")
        transitions.requeue(tale.connection, [Requeue(task, 1, 60.0, failures=1)], tale.now)
    for words in (("list", "--queue", "tries"), ("show", text(task))):
        assert re.search(r"pending \(try 2 in \d+s\)", run("tasks", *words).output)


def test_a_task_list_is_read_page_by_page(engine: Engine, read: Callable[..., Any]) -> None:
    with story(engine, "pages") as tale:
        made = [tale.succeeded(1) if number % 2 else tale.failed() for number in range(5)] + [tale.new("a")]
    seen: list[str] = []
    options: tuple[str, ...] = ()
    while True:
        page = read("tasks", "list", "--queue", "pages", "--limit", "4", *options)
        seen += ids(page)
        if page["next"] is None:
            break
        options = ("--before", page["next"])
    assert seen == sorted(map(text, made), reverse=True)


@pytest.mark.parametrize("oldest", [False, True])
@pytest.mark.parametrize("looked_at", [1, 2, 3, 100])
def test_pages_with_bounded_scans_find_every_task(
    engine: Engine, connection: Connection, monkeypatch: pytest.MonkeyPatch, looked_at: int, oldest: bool
) -> None:
    queue = f"sight{looked_at}{oldest}."
    with story(engine, queue) as tale:
        kinds = (tale.failed, lambda: tale.new("a"), lambda: tale.succeeded(1), lambda: tale.new("b"))
        made = [kinds[number % 4]() for number in range(20)]
    for which in ("MAX_SCANNED", "MAX_ENDS_SCANNED"):
        monkeypatch.setattr(insights.tasks, which, looked_at)
    pending, failed, success = TaskState.PENDING, TaskState.FAILED, TaskState.SUCCESS
    for statuses, places in (
        ((), range(20)),
        ((pending,), range(1, 20, 2)),
        ((failed,), range(0, 20, 4)),
        ((success,), range(2, 20, 4)),
        ((success, pending), [place for place in range(20) if place % 4]),
    ):
        for wanted in (TaskFilter(queue=queue, statuses=statuses), TaskFilter(within=queue, statuses=statuses)):
            seen: list[UUID] = []
            before: UUID | None = None
            while True:
                page = insights.page_of_tasks(connection, wanted, limit=2, before=before, oldest=oldest)
                seen += [task.id for task in page.tasks]
                before = page.next
                if before is None:
                    break
            assert sorted(seen) == sorted(UUID(text(made[place])) for place in places), wanted
            if statuses == (pending,):
                assert seen == sorted(seen, reverse=not oldest)
    nobody = TaskFilter(queue="nobody's")
    assert insights.list_tasks(connection, nobody) == ([], None)


def test_a_task_list_is_a_table_with_full_ids(engine: Engine, run: Callable[..., Result]) -> None:
    with story(engine, "people") as tale:
        made = [tale.succeeded(1), tale.failed(), tale.held(), tale.new("a", delay=90)]
    output = run("tasks", "list", "--queue", "people").output
    header, *lines = output.splitlines()
    assert header.split() == ["id", "name", "status", "created", "queue", "took", "attempt"]
    assert {line.split()[0] for line in lines} == set(map(text, made))
    for part in ("failed (ValueError)", "pending (unknown)", "pending (in 1m)", "1.2s"):
        assert part in output
    assert "No task matches." in run("tasks", "list", "--queue", "nobody").output


def test_a_task_is_shown_with_its_call_result_and_attempts(
    engine: Engine, run: Callable[..., Result], read: Callable[..., Any]
) -> None:
    with story(engine, "shown") as tale:
        task = tale.claimed("a.png", options='{"timeout": 30.0}')
        again = Requeue(task, 1, failures=1, outcome="failed", error=ERROR, worker="worker-1", duration=0.5)
        transitions.requeue(tale.connection, [again], tale.now)
        claims.claim(tale.connection, {"shown": 1}, tale.now)
        result = msgspec.msgpack.encode({"path": "b.png", "sizes": [1, 2]})
        transitions.succeed(tale.connection, [Success(task, 2, result, 1.25, "worker-2")], tale.now)
    output = run("tasks", "show", text(task)).output
    for part in (
        'shop.resize("a.png", width=200)',
        '{"path": "b.png", "sizes": [1, 2]}',
        '{"timeout": 30.0}',
        "ValueError: oh [no]",
        "worker-1",
        "worker-2",
        "Remote traceback:\nTraceback …",
    ):
        assert part in output
    document = read("tasks", "show", text(task))
    assert document["args"] == ["a.png"]
    assert document["kwargs"] == {"width": 200}
    assert document["result"] == {"path": "b.png", "sizes": [1, 2]}
    assert [(attempt["attempt"], attempt["outcome"]) for attempt in document["attempts"]] == [
        (1, "failed"),
        (2, "success"),
    ]
    assert document["attempts"][0]["error"]["message"] == "oh [no]"
    assert document["options"] == {"timeout": 30.0}
    assert "payload" not in document


def test_open_tasks_are_shown_with_their_attempts(engine: Engine, read: Callable[..., Any]) -> None:
    with story(engine, "open") as tale:
        running, waits = tale.running("a"), tale.new("b")
    [attempt] = read("tasks", "show", text(running))["attempts"]
    assert (attempt["outcome"], attempt["worker"], attempt["ended_at"]) == ("running", "worker-1", None)
    assert read("tasks", "show", text(waits))["attempts"] == []


def test_watching_an_ended_task_prints_its_state(engine: Engine, run: Callable[..., Result]) -> None:
    with story(engine, "watched") as tale:
        won, lost = tale.succeeded(7), tale.failed()
    done = run("tasks", "watch", text(won))
    assert (done.exit_code, done.stdout) == (0, "success\n")
    assert run("tasks", "watch", text(lost)).exit_code == 1
    document = run("tasks", "watch", text(lost), "--json")
    assert (document.exit_code, json.loads(document.stdout)["status"]) == (1, "failed")
    nobody = run("tasks", "watch", NOBODY)
    assert nobody.exit_code == 1
    assert f"No task has the id {NOBODY}" in nobody.stderr


def test_control_characters_of_tasks_do_not_reach_the_terminal(
    engine: Engine, redis_url: str, run: Callable[..., Result]
) -> None:
    with story(engine, "said") as tale:
        silent, loud = tale.running("a"), tale.running("b")
    redis = Redis.from_url(redis_url)
    journal.write(redis, Keys(), {loud: ProgressMark(1, 0.25, "\x1b[2Jquarter")})
    say(engine, loud, LogLine(1_700_000_000.0, 1, "info", "\x1b]0;title\x07 [bold]"))
    redis.close()
    done = run("tasks", "logs", text(loud))
    assert (done.exit_code, done.stdout) == (0, "22:13:20 info      [bold]\n")
    assert "█████░░░░░░░░░░░░░░░ 25 % \ufffd[2Jquarter" in run("tasks", "show", text(loud)).stdout
    nothing = run("tasks", "logs", text(silent))
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "No log lines are stored. If the setting capture_logs is on" in nothing.stderr
    assert run("tasks", "logs", NOBODY).exit_code == 1


def test_binary_results_are_shown(engine: Engine, run: Callable[..., Result], read: Callable[..., Any]) -> None:
    with story(engine, "bytes") as tale:
        task = tale.succeeded(b"\xff\x00")
    assert r"b'\xff\x00'" in run("tasks", "show", text(task)).output
    assert read("tasks", "show", text(task))["result"] == "/wA="


def test_an_unknown_id_is_an_error(run: Callable[..., Result]) -> None:
    for words in (("tasks", "show", NOBODY), ("tasks", "cancel", NOBODY), ("tasks", "retry", NOBODY)):
        result = run(*words)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: No task has the id {NOBODY}. It may have been pruned")
    assert run("runs", "show", NOBODY).stderr.startswith(f"Error: No run has the id {NOBODY}. It may have been pruned")


def test_cancel_and_retry_commands_store_requests_for_the_leader(
    engine: Engine, connection: Connection, run: Callable[..., Result]
) -> None:
    with story(engine, "requests") as tale:
        waits, lost, won = tale.new("a"), tale.failed(), tale.succeeded(1)
    assert run("tasks", "cancel", text(waits)).output == f"Asked to cancel task {text(waits)}.\n"
    assert run("tasks", "retry", text(lost)).output == f"Asked to retry task {text(lost)}.\n"
    requests = {(item.kind, item.target) for item in inbox.read(connection, 1_000)}
    assert {("cancel task", waits), ("retry task", lost)} <= requests
    refused = run("tasks", "cancel", text(won))
    assert refused.exit_code == 1
    assert refused.stderr == f"Error: Cannot cancel task {text(won)}: it is in state 'success'.\n"


# -- runs


def make_run(engine: Engine, name: str, endings: str) -> bytes:
    """Create a run with one task for each letter: s succeeded, f failed, o still open."""
    run_id = new_id()
    with story(engine, name) as tale:
        for position, ending in enumerate(endings):
            make = {"s": lambda **place: tale.succeeded(1, **place), "f": tale.failed, "o": tale.running}[ending]
            make(run_id=run_id, position=position)
        creation.create(tale.connection, [NewRun(run_id, name, len(endings))])
        runs.begin(tale.connection, tale.now, 1_000)
        counts = {letter: endings.count(letter) for letter in "sf"}
        delta = {"opened": -counts["s"] - counts["f"], "success": counts["s"], "failed": counts["f"]}
        runs.count(tale.connection, {run_id: delta})
    return run_id


def test_runs_are_listed_and_shown(engine: Engine, run: Callable[..., Result], read: Callable[..., Any]) -> None:
    done, going = make_run(engine, "thumbs", "sf"), make_run(engine, "thumbs", "so")
    with engine.begin() as connection:
        runs.end(connection, [(done, RunState.FAILED, None)], datetime.now(UTC))
    listed = read("runs", "list", "--name", "thumbs")
    assert [found["id"] for found in listed["runs"]] == [text(going), text(done)]
    assert [found["id"] for found in read("runs", "list", "--name", "thumbs", "--status", "failed")["runs"]] == [
        text(done)
    ]
    page = read("runs", "list", "--name", "thumbs", "--limit", "1")
    assert page["next"] == text(going)
    assert [found["id"] for found in read("runs", "list", "--before", page["next"], "--name", "thumbs")["runs"]] == [
        text(done)
    ]
    shown = read("runs", "show", text(going))
    assert (shown["status"], shown["total"], shown["open"], shown["success"]) == ("running", 2, 1, 1)
    people = run("runs", "show", text(done)).output
    assert "2: 1 success, 1 failed" in people
    assert f"orchestrator tasks list --run {text(done)} --status failed" in people
    assert text(going) in run("runs", "list").output


def test_the_tasks_of_a_run_are_listed(engine: Engine, read: Callable[..., Any]) -> None:
    run_id = make_run(engine, "mine", "sfo")
    make_run(engine, "other", "s")
    found = read("tasks", "list", "--run", text(run_id))
    assert {task["position"]: task["status"] for task in found["tasks"]} == {0: "success", 1: "failed", 2: "running"}
    assert ids(read("tasks", "list", "--run", text(run_id), "--status", "failed")) == [
        task["id"] for task in found["tasks"] if task["status"] == "failed"
    ]


def test_watch_prints_changes_and_ends_with_the_run(engine: Engine, run: Callable[..., Result]) -> None:
    good, bad = make_run(engine, "good", "ss"), make_run(engine, "bad", "sf")
    with engine.begin() as connection:
        runs.end(connection, [(good, RunState.SUCCESS, None)], datetime.now(UTC))
        runs.end(connection, [(bad, RunState.FAILED, None)], datetime.now(UTC))
    won = run("runs", "watch", text(good))
    assert (won.exit_code, won.output) == (0, "good 2/2 success\n")
    lost = run("runs", "watch", text(bad))
    assert (lost.exit_code, lost.output) == (1, "bad 2/2 failed, 1 failed\n")
    document = run("runs", "watch", text(bad), "--json")
    assert json.loads(document.stdout)["status"] == "failed"


def test_watch_follows_a_run_until_its_end(
    engine: Engine, connection: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = make_run(engine, "moving", "so")
    looks = 0

    def read() -> RunView:
        nonlocal looks
        looks += 1
        if looks == 3:
            with engine.begin() as other:
                runs.count(other, {run_id: {"opened": -1, "success": 1}})
                runs.end(other, [(run_id, RunState.SUCCESS, None)], datetime.now(UTC))
        found = insights.show_run(connection, UUID(bytes=run_id))
        connection.rollback()
        assert found is not None
        return found

    assert watch_run(read).status == "success"
    assert capsys.readouterr().out.splitlines() == ["moving 1/2 running", "moving 2/2 success"]


def test_run_cancel_and_retry_commands_store_requests(
    engine: Engine, connection: Connection, run: Callable[..., Result]
) -> None:
    going, lost = make_run(engine, "going", "o"), make_run(engine, "lost", "f")
    with engine.begin() as other:
        runs.end(other, [(lost, RunState.FAILED, None)], datetime.now(UTC))
    assert run("runs", "cancel", text(going)).exit_code == 0
    assert run("runs", "retry", text(lost)).exit_code == 0
    requests = {(item.kind, item.target) for item in inbox.read(connection, 1_000)}
    assert {("cancel run", going), ("retry run", lost)} <= requests


# -- the system


def make_worker(engine: Engine, name: str, queues: list[str], state: str = "live") -> None:
    row = WorkerRow(
        id=name,
        host="here",
        pid=7,
        queues=queues,
        names=["shop.resize"],
        slots=10,
        running=3,
        state=state,
        started_at=0.0,
    )
    announce(engine, row)


def announce(engine: Engine, row: WorkerRow) -> None:
    """Store a worker row that stays live however long the test takes."""
    with engine.begin() as connection:
        fleet.mirror(connection, [row], datetime.now(UTC))
        connection.exec_driver_sql(
            "UPDATE orchestrator.workers SET seen_at = now() + interval '1 hour' WHERE id = %s", (row.id,)
        )


def test_queues_count_every_open_task_once(
    engine: Engine, run: Callable[..., Result], read: Callable[..., Any]
) -> None:
    with story(engine, "counted") as tale:
        tale.held()
        tale.running("b")
        tale.claimed("c")
        tale.new("d", delay=60)
        tale.new("e")
        tale.succeeded(1)
    make_worker(engine, "counting", ["counted", "idle"])
    make_worker(engine, "leaving", ["counted"], state="draining")
    queues = {queue["queue"]: queue for queue in read("queues")["queues"]}
    counts = queues["counted"]
    kinds = ("ready", "delayed", "unknown", "blocked", "dispatched", "running")
    assert tuple(counts[kind] for kind in kinds) == (1, 1, 1, 0, 1, 1)
    assert (counts["workers"], counts["slots"]) == (1, 10)
    assert 0 <= counts["oldest_ready"] < 60
    assert (queues["idle"]["ready"], queues["idle"]["workers"], queues["idle"]["oldest_ready"]) == (0, 1, None)
    assert "counted" in run("queues").output


def test_silent_workers_are_listed_but_not_counted(
    engine: Engine, run: Callable[..., Result], read: Callable[..., Any]
) -> None:
    make_worker(engine, "fresh", ["served"])
    make_worker(engine, "silent", ["served"])
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE orchestrator.workers SET seen_at = now() - interval '1 minute' WHERE id = 'silent'"
        )
    states = {worker["id"]: worker["state"] for worker in read("workers")["workers"]}
    assert (states["fresh"], states["silent"]) == ("live", "unheard")
    [served] = [queue for queue in read("queues")["queues"] if queue["queue"] == "served"]
    assert served["workers"] == 1
    assert "3/10" in run("workers").output


def test_a_frozen_worker_is_listed_with_its_tasks(
    engine: Engine, run: Callable[..., Result], read: Callable[..., Any]
) -> None:
    task = str(uuid4())
    row = WorkerRow("frozen", "there", 8, ["cold"], [], 10, 1, "live", 0.0, still=12.0, holds=[task])
    announce(engine, row)
    [shown] = [worker for worker in read("workers")["workers"] if worker["id"] == "frozen"]
    assert (shown["state"], shown["holds"]) == ("still", [task])
    assert re.search(
        rf"^frozen has been unresponsive for [\d.ms ]+s, holds {task}$", run("workers").output, re.MULTILINE
    )
    [told] = [one for one in read("status")["trouble"] if one["kind"] == "worker stands still"]
    assert told["about"] == "frozen"
    assert told["message"].startswith("Worker frozen (process 8 on there) has been unresponsive for ")
    assert f"s, holds {task}: " in told["message"]
    with engine.begin() as connection:
        fleet.mark_gone(connection, [], [], datetime.now(UTC))
    assert "unresponsive" not in run("workers").output


def test_status_shows_counts_and_problems(engine: Engine, run: Callable[..., Result], read: Callable[..., Any]) -> None:
    with engine.begin() as connection:  # tasks of other tests would leave the last minute meanwhile
        connection.exec_driver_sql("UPDATE orchestrator.ended_tasks SET ended_at = ended_at - interval '2 hours'")
    before = read("status")
    with story(engine, "system") as tale:
        tale.failed()
        tale.succeeded(1)
        tale.held()
        tale.new("a")
    after = read("status")
    assert set(after) == {
        "stuck_runs",
        "stuck_reason",
        "leader",
        "revision",
        "open",
        "open_least",
        "ended_last_minute",
        "ended_last_hour",
        "workers",
        "slots",
        "running",
        "hears_workers",
        "inbox",
        "shards",
        "still_workers",
        "unknown_tasks",
        "unserved_queues",
        "paused_queues",
        "events",
        "schedules",
        "failing_schedules",
        "forgotten_schedules",
        "stopped_backfills",
        "standbys",
        "redis",
        "storage",
        "trouble",
    }
    kinds = {trouble["kind"] for trouble in after["trouble"]}
    assert {"no leader", "unknown task"} <= kinds
    assert "no worker" not in kinds, "nobody looks at the workers: one cause is one trouble"
    assert after["leader"] is None
    assert after["revision"] == database.REVISION
    assert after["open"]["unknown"] == before["open"]["unknown"] + 1
    assert after["open"]["ready"] == before["open"]["ready"] + 1
    assert after["ended_last_minute"]["failed"] == before["ended_last_minute"]["failed"] + 1
    assert after["ended_last_hour"]["success"] == before["ended_last_hour"]["success"] + 1
    assert (after["hears_workers"], after["unserved_queues"]) == (False, [])
    assert {"queue": "system", "name": "shop.unheard_of", "tasks": 1} in [
        {key: unknown[key] for key in ("queue", "name", "tasks")} for unknown in after["unknown_tasks"]
    ]
    assert [run("status", *words).exit_code for words in ((), ("--check",), ("--check", "--json"))] == [0, 1, 1]
    people = run("status").output
    assert "! No scheduler leads" in people
    assert re.search(r"^workers +unknown: no scheduler leads", people, re.MULTILINE)
    assert "no live worker" not in people
    assert "! No live worker of queue 'system' knows 'shop.unheard_of': 1 waiting, the first fails in " in people

    with engine.begin() as connection:
        term = leases.acquire(connection, 0, NOBODY, 600.0, "here:7")
        connection.exec_driver_sql("INSERT INTO orchestrator.cursors VALUES (0, '1-1', '5-0', 'server')")
    led = read("status")
    assert (led["leader"]["address"], led["leader"]["term"]) == ("here:7", term)
    assert 400 < led["leader"]["lease_remaining"] <= 600
    assert led["events"] == {"generation": "1-1", "position": "5-0"}
    people = run("status").output
    assert f"here:7 leads in term {term}" in people
    assert re.search(r"^workers +\d+ live", people, re.MULTILINE)
    assert "No scheduler leads" not in people


def test_status_distinguishes_redis_from_valkey(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"redis_version": "7.2.4", "used_memory": 1_000_000}
    for info, shown in ((known, "Redis 7.2.4, "), ({**known, "valkey_version": "8.1.3"}, "Valkey 8.1.3, ")):
        monkeypatch.setattr(Redis, "info", lambda _, info=info: info)
        assert f"redis        {shown}" in run("status").output


def test_insights_find_nothing_for_unknown_ids(connection: Connection) -> None:
    nobody = UUID(NOBODY)
    assert insights.show_task(connection, nobody) is None
    assert insights.show_run(connection, nobody) is None
    assert insights.list_tasks(connection, TaskFilter(run=nobody)) == ([], None)
    assert insights.list_runs(connection, RunFilter(name="nobody")) == ([], None)


# -- enqueue


def stored(engine: Engine, identifier: str) -> insights.TaskDetail:
    with engine.connect() as connection:
        found = insights.show_task(connection, UUID(identifier))
    assert found is not None
    return found


def test_enqueue_by_name_needs_no_application(engine: Engine, run: Callable[..., Result]) -> None:
    result = run(
        *("enqueue", "far.away", "5", '"5"', "text", "[1, null]", "url=http://x?a=b", 'deep={"a": true}', "NaN=NaN"),
        *("--queue", "elsewhere", "--priority", "3", "--delay", "60", "--retries", "2", "--timeout", "30"),
    )
    assert result.exit_code == 0, result.output
    task = stored(engine, result.stdout.strip())
    assert (task.name, task.queue, task.priority) == ("far.away", "elsewhere", 3)
    assert task.wake_at is not None
    assert task.options == {"retry": {"max": 2}, "timeout": 30.0}
    arguments, keywords = msgspec.msgpack.decode(task.payload)
    assert arguments == [5, "5", "text", [1, None]]
    assert keywords == {"url": "http://x?a=b", "deep": {"a": True}, "NaN": "NaN"}


def test_enqueue_with_an_application_checks_the_call(
    engine: Engine, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cli_shop.py").write_text(SHOP, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text('[tool.orchestrator]\napp = "cli_shop:app"\n', encoding="utf-8")

    result = run("enqueue", "resize", "a.png", "width=200", "--priority", "1")
    assert result.exit_code == 0, result.output
    task = stored(engine, result.stdout.strip())
    assert (task.name, task.queue, task.priority) == ("cli_shop.resize", "typed", 1)
    assert task.options == {"retry": {"max": 2}}
    document = json.loads(run("enqueue", "resize", "a.png", "--json").stdout)
    assert stored(engine, document.pop("id")).name == "cli_shop.resize"
    assert document == {}

    def refusal(*words: str) -> str:
        refused = run("enqueue", *words)
        assert refused.exit_code == 1
        return refused.stderr

    assert "No task is called 'resise'. Did you mean 'resize'? Known: cli_shop.resize, " in refusal("resise")
    assert "Several tasks are called 'same': one.same, two.same. Give the full name." in refusal("same")
    assert "missing a required argument: 'path'" in refusal("resize")
    assert "argument 'width': expected int" in refusal("resize", "a.png", "wide")
    assert "Option delay: expected zero or more" in refusal("resize", "a.png", "--delay", "-1")
    assert "Option priority" in refusal("resize", "a.png", "--priority", "1000")


@pytest.mark.parametrize("words", [("a=1", "a=2"), ("a=1", "b")])
def test_named_arguments_are_given_once_and_last(run: Callable[..., Result], words: tuple[str, ...]) -> None:
    assert run("enqueue", "far.away", *words).exit_code == 2


def test_enqueue_wait_prints_the_result(engine: Engine, run: Callable[..., Result], redis_url: str) -> None:
    def work() -> None:
        """Do the work of a leader and a worker."""
        deadline = time.monotonic() + 30
        claimed: list[Claimed] = []
        while not claimed and time.monotonic() < deadline:
            time.sleep(0.05)
            with engine.begin() as connection:
                claimed = claims.claim(connection, {"awaited": 1}, datetime.now(UTC))
                rows = [Success(task.id, 1, msgspec.msgpack.encode({"answer": 42}), 0.1, "w") for task in claimed]
                transitions.succeed(connection, rows, datetime.now(UTC))
        with Redis.from_url(redis_url) as redis:
            for row in rows:
                redis.publish(Keys().done(row.id), encode([Ended(row.id, "success", row.result)]))

    worker = threading.Thread(target=work)
    worker.start()
    result = run("enqueue", "far.away", "--queue", "awaited", "--wait")
    worker.join()
    assert result.exit_code == 0, result.output
    assert result.stdout == '{"answer": 42}\n'
    assert UUID(result.stderr.strip())


# -- failures


@pytest.mark.parametrize("words", [("status",), ("tasks", "list"), ("db", "check"), ("enqueue", "far.away")])
def test_an_unreachable_postgres_gives_an_error_message(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nothing")
    result = run(*words)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Postgres cannot be ")
    assert "Connection refused" in result.stderr
    assert "Traceback" not in result.output


def test_an_unreachable_redis_gives_an_error_message(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", "redis://127.0.0.1:1/0")
    result = run("quarantine", "list")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Redis cannot be used: ")


def test_missing_settings_give_an_error_message(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCHESTRATOR_DATABASE_URL")
    result = run("status")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Setting database_url is not set. Set ORCHESTRATOR_DATABASE_URL")


@pytest.fixture
def empty_url(services: EmbeddedServices) -> Iterator[str]:
    with new_database(services, "empty") as url:
        yield url


def test_db_check_fails_until_the_database_is_upgraded(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, empty_url: str
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", empty_url)
    for words in (("db", "check"), ("status",)):
        missing = run(*words)
        assert missing.exit_code == 1
        assert "orchestrator db upgrade" in missing.stderr
    document = run("db", "check", "--json")
    assert document.exit_code == 1
    assert json.loads(document.stdout) == {"revision": None, "needed": database.REVISION, "ok": False}
    for _ in range(2):
        assert run("db", "upgrade").output == f"The database is at revision {database.REVISION}.\n"
    assert run("db", "check").exit_code == 0
    assert json.loads(run("db", "check", "--json").stdout)["ok"] is True


# -- dev


class Dev:
    """`orchestrator dev` in a folder, and its output."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
        self.folder = folder
        self.said = folder / "said.txt"
        with self.said.open("wb") as file:
            self.process = forking.begin(
                "dev", *options, environment={**inherited, **environment}, folder=folder, stdout=file, stderr=file
            )

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.said.read_text(encoding="utf-8"):
            assert time.monotonic() < deadline, self.said.read_text(encoding="utf-8")
            assert self.process.poll() is None, self.said.read_text(encoding="utf-8")
            time.sleep(0.05)

    def __enter__(self) -> Dev:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)  # Postgres may have to run as another user
    return tmp_path


def test_dev_starts_nothing_for_an_application_that_is_not_there(folder: Path) -> None:
    (folder / "shop.py").write_text("print('imported')\nfrom orchestrator import Orchestrator\nshop = Orchestrator()\n")
    for where, why in (("shp:app", "There is no module 'shp'"), ("shop.py:app", "Did you mean 'shop:shop'?")):
        with Dev(folder, "--app", where, "--log-format", "json") as dev:
            assert dev.process.wait(60) == 1
        (record,) = map(json.loads, dev.said.read_text(encoding="utf-8").splitlines())
        assert record["level"] == "ERROR"
        assert why in record["message"]


def test_dev_uses_given_services_restarts_children_and_leaves_none_behind(
    folder: Path, database_url: str, redis_url: str
) -> None:
    urls = {"ORCHESTRATOR_DATABASE_URL": database_url, "ORCHESTRATOR_REDIS_URL": redis_url}
    with Dev(folder, **urls) as dev:
        dev.wait_for("scheduler.leading term=")
        (scheduler,) = (child for child in psutil.Process(dev.process.pid).children() if "scheduler" in child.cmdline())
        assert "no application is given" in dev.said.read_text(encoding="utf-8")
        scheduler.kill()
        dev.wait_for("the scheduler was killed by signal 9: restarting it")
        eventually(
            lambda: dev.said.read_text(encoding="utf-8").count("scheduler.leading term=") == 2, "the new one leads"
        )
        children = psutil.Process(dev.process.pid).children(recursive=True)
        assert children
        dev.process.kill()
        dev.process.wait()
    assert "has started in" not in dev.said.read_text(encoding="utf-8")
    if sys.platform == "linux":  # elsewhere, a child is not told of its parent's death
        eventually(lambda: not any(map(_is_alive, children)), "its children end")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE  # nobody may be left to reap it
    except psutil.NoSuchProcess:
        return False
