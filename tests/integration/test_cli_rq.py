"""`orchestrator rq import`: each waiting job of an RQ queue runs once, either in RQ or here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from redis import Redis
from sqlalchemy import text

pytest.importorskip("rq", reason="the extra rq is not installed")

from rq import Queue

from orchestrator.cli import main
from orchestrator.plugins.executors.rq.waiting_jobs import WaitingJobs
from tests.integration.rq_jobs import double, fail
from tests.integration.stage import System
from tests.waiting import eventually

DOUBLE = "tests.integration.rq_jobs.double"


@pytest.fixture
def rq(system: System, redis_url: str) -> Iterator[Queue]:
    redis = Redis.from_url(redis_url)
    yield Queue("old", connection=redis)
    redis.close()


@pytest.fixture
def run(system: System, redis_url: str, in_empty_folder: Path) -> Callable[..., Result]:
    return lambda *words: CliRunner().invoke(main, ["rq", "import", "--queue", "old", "--url", redis_url, *words])


def stored(system: System) -> list[tuple[str, str]]:
    with system.engine.begin() as connection:
        return [
            (row[0], row[1])
            for row in connection.execute(text("SELECT name, queue FROM orchestrator.tasks ORDER BY id"))
        ]


def test_imported_jobs_are_enqueued_here_and_removed_from_rq(
    system: System, rq: Queue, run: Callable[..., Result]
) -> None:
    for number in range(1_200):
        rq.enqueue(double, number, note="")

    result = run("--to", "sums", "--json")

    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {
        "queue": "old",
        "moved": 1_200,
        "had_been_moved": 0,
        "begun_by_rq": 0,
        "stay": {},
    }
    assert stored(system) == [(DOUBLE, "sums")] * 1_200
    assert not [*rq.connection.scan_iter("rq:job:*"), *rq.connection.scan_iter("orchestrator:rq-import:*")]
    assert run().output == "0 jobs of queue old enqueued here.\n"


def test_a_dry_run_changes_nothing(system: System, rq: Queue, run: Callable[..., Result]) -> None:
    rq.enqueue(double, 1)

    assert run("--dry-run").output == "1 job of queue old would be enqueued here; 0 stay.\n"
    assert json.loads(run("--dry-run", "--json").output) == {"queue": "old", "would_move": 1, "stay": {}}
    assert stored(system) == []
    assert len(rq) == 1


def test_an_import_may_rename_a_function(system: System, rq: Queue, run: Callable[..., Result]) -> None:
    rq.enqueue(double, 1)

    assert run("--task", f"{DOUBLE}=sums.twice").exit_code == 0
    assert stored(system) == [("sums.twice", "default")]
    assert run("--task", "twice").exit_code == 2


def test_jobs_become_those_of_a_program_that_has_changed_its_imports(
    system: System, rq: Queue, run: Callable[..., Result]
) -> None:
    rq.enqueue(double, 1)
    rq.enqueue(fail, 2)
    result = run("--app", "orchestrator.compat.rq:app", "--task", f"{DOUBLE}=sums:twice")
    assert result.output == "2 jobs of queue old enqueued here.\n"
    assert sorted(stored(system)) == [("sums:twice", "default"), ("tests.integration.rq_jobs:fail", "default")]


@pytest.mark.parametrize("place", ["after taking", "after enqueueing"])
def test_a_crashed_import_is_finished_by_the_next_import(
    system: System, rq: Queue, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for number in range(3):
        rq.enqueue(double, number)

    def die(*_: object) -> None:
        raise SystemExit(137)

    with monkeypatch.context() as patched:
        if place == "after taking":
            patched.setattr("orchestrator.cli.tasks.rq._move", lambda _, jobs, ready, __: die(jobs.take([ready[0][0]])))
        else:
            patched.setattr(WaitingJobs, "forget", die)
        assert run().exit_code == 137
    assert len(rq) < 3, "and no worker of RQ finds them"

    result = json.loads(run("--json").output)
    assert result["moved"] + result["had_been_moved"] == 3
    assert len(stored(system)) == 3
    assert len(rq) == 0


def test_jobs_that_cannot_be_imported_stay_in_rq(system: System, rq: Queue, run: Callable[..., Result]) -> None:
    first = rq.enqueue(fail, Path("/"))
    awaited = rq.enqueue(double, 1)
    rq.enqueue(double, 2, depends_on=awaited)
    rq.enqueue(double, 3)

    result = run()

    assert result.stdout == "1 job of queue old enqueued here; 2 stay.\n"
    assert f"Job {first.id} stays: its call cannot be read: it holds a pathlib.PosixPath" in result.stderr
    assert f"Job {awaited.id} stays: other jobs of RQ wait for it." in result.stderr
    assert rq.job_ids == [first.id, awaited.id]


def test_the_application_checks_names_and_calls_of_imported_jobs(
    system: System, rq: Queue, run: Callable[..., Result], in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(in_empty_folder))
    (in_empty_folder / "sums_of_rq.py").write_text(
        "from orchestrator import Orchestrator\napp = Orchestrator()\n\n\n"
        "@app.task(queue='quick')\ndef twice(number: int) -> int:\n    return 2 * number\n"
    )
    rq.enqueue(double, 1)
    bad = rq.enqueue(double, 1, 2)

    unnamed = run("--app", "sums_of_rq:app")
    named = run("--app", "sums_of_rq:app", "--task", f"{DOUBLE}=sums_of_rq.twice")

    assert f"no task is called '{DOUBLE}'" in unnamed.stderr
    assert named.stdout == "1 job of queue old enqueued here; 1 stay.\n"
    assert bad.id in named.stderr
    assert stored(system) == [("sums_of_rq.twice", "quick")]


def test_workers_of_rq_and_an_import_share_the_jobs(system: System, rq: Queue, run: Callable[..., Result]) -> None:
    for number in range(300):
        rq.enqueue(double, number)
    ran: list[str] = []

    begun = threading.Event()

    def work() -> None:
        while (dequeued := Queue.dequeue_any([rq], None, connection=rq.connection)) is not None:
            ran.append(dequeued[0].id)
            begun.set()
            if len(ran) == 100:  # leaves jobs for the import, however slow it is
                eventually(lambda: stored(system), "the import has begun")

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    result = json.loads(run("--json").output)
    thread.join()

    assert len(set(ran)) == len(ran)
    assert len(ran) + result["moved"] == 300
    assert len(stored(system)) == result["moved"] > 0


def test_connection_errors_are_reported_without_the_password(
    run: Callable[..., Result], system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RQ_REDIS_URL", raising=False)
    missing = CliRunner().invoke(main, ["rq", "import", "--queue", "old"])
    away = CliRunner().invoke(main, ["rq", "import", "--queue", "old", "--url", "redis://:hunter2@127.0.0.1:1"])

    assert missing.exit_code == 1
    assert "RQ_REDIS_URL" in missing.stderr
    assert away.exit_code == 1
    assert "127.0.0.1:1" in away.stderr
    assert "hunter2" not in away.stderr
