"""The log lines of a worker about its tasks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import talking

from orchestrator import Handle, Orchestrator, TaskFailed
from tests import forking
from tests.acceptance.stack import HERE, Process, Stack
from tests.waiting import eventually

APP = ("--app", "talking:app")
application = talking.app


def logged(worker: Process, words: str) -> str:
    """Wait for a log line that contains the text; return it."""

    def find() -> str | None:
        return next((line for line in worker.log.read_text().splitlines() if words in line), None)

    return eventually(find, f"{words!r} in {worker.log}")


def failure(handle: Handle[Any]) -> TaskFailed:
    with pytest.raises(TaskFailed) as raised:
        handle.result(timeout=60)
    return raised.value


def test_output_of_tasks_is_logged_with_task_names_and_ids(life: Stack) -> None:
    worker = life.worker(*APP)
    talking.closes.enqueue().result(timeout=60)  # closing the streams does not affect later tasks
    for task in (talking.speaks, talking.speaks_async, talking.speaks_apart):
        handle = task.enqueue("rye")
        handle.result(timeout=60)
        line = logged(worker, f"{task.name}[{handle.id}] printed rye")
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    ", line), line
        assert logged(worker, f"{task.name}[{handle.id}] logged rye")
    said = talking.says.enqueue("hot")
    said.result(timeout=60)
    assert " WARNING " in logged(worker, f"says[{said.id}] hot")
    text = worker.log.read_text()
    for words in ("] complained rye", "] unfinished rye", "] printed rye in pieces", "] logged rye in a thread"):
        assert text.count(words) == 1, words
    assert "murmured" not in text


def test_output_is_stored_for_every_kind_of_task(life: Stack) -> None:
    life.worker(*APP)
    wanted = {
        talking.speaks: [
            ("info", "printed rye", "stdout"),
            ("warning", "complained rye", "stderr"),
            ("info", "logged rye", "bakery"),
            ("info", "unfinished rye", "stdout"),
        ],
        talking.speaks_async: [
            ("info", "printed rye in pieces", "stdout"),
            ("warning", "logged rye in a thread", "bakery"),
        ],
        talking.speaks_apart: [("info", "printed rye", "stdout"), ("info", "logged rye", "bakery")],
        talking.says: [("warning", "rye", "")],
    }
    handles = {task: task.enqueue("rye") for task in wanted}
    for task, said in wanted.items():
        eventually(lambda: len(handles[task].logs()) >= len(said), f"the lines of {task.name}")  # noqa: B023
        lines = handles[task].logs()
        assert [(line.level, line.text, line.source) for line in lines] == said
        assert {(line.task, line.step, line.attempt) for line in lines} == {(handles[task].id, task.name, 1)}


def test_a_final_failure_is_logged_as_one_error_with_traceback(life: Stack) -> None:
    worker = life.worker(*APP)
    for task, arguments in ((talking.burns, ("toast",)), (talking.burns_apart, ())):
        handle = task.enqueue(*arguments)
        failure(handle)
        line = logged(worker, f"{task.name}[{handle.id}] task.failed")
        assert " ERROR   " in line
        assert "ValueError: " in line
        record = worker.log.read_text().partition(line)[2]
        assert re.search(r'^    Traceback .*\n      File ".*talking.py", line', record, re.MULTILINE)
        assert not re.search(r"^\S+ ERROR   forged", record, re.MULTILINE), "a line of a record is at the margin"
        assert "\x1b" not in record
    assert len(re.findall(r"^\d.* ERROR ", worker.log.read_text(), re.MULTILINE)) == 2


def test_a_retry_is_logged_as_a_warning_with_its_delay(life: Stack) -> None:
    worker = life.worker(*APP)
    handle = talking.burns_twice.enqueue()
    failure(handle)
    first = logged(worker, f"burns_twice[{handle.id}] task.retried attempt=1 try=1/2 ")
    assert " WARNING " in first
    assert " delay=300ms at=talking.py:" in first
    assert first.endswith(" error=KeyError: 'yeast'")
    assert " ERROR " in logged(worker, f"burns_twice[{handle.id}] task.failed attempt=2 try=2/2 ")
    later = talking.postpones.enqueue()
    later.result(timeout=60)
    assert " INFO " in logged(
        worker, f"[{later.id}] task.retry_requested attempt=1 delay=200ms reason=the oven is cold"
    )
    assert worker.log.read_text().count(f"[{later.id}] task.received") == 2
    assert logged(worker, f"postpones[{later.id}] task.succeeded attempt=2")


def test_json_lines_have_every_field_and_obey_the_log_level(life: Stack) -> None:
    worker = life.worker(*APP, "--log-format", "json", "--log-level", "debug")
    handle = talking.burns.enqueue("toast")
    failure(handle)
    run = talking.app.start_many(talking.speaks, ["rye"])
    run.results(timeout=60)
    logged(worker, "unfinished rye")
    lines = [json.loads(line) for line in worker.log.read_text().splitlines()]
    failed = next(line for line in lines if line.get("event") == "task.failed")
    assert set(failed) == {
        "time",
        "level",
        "logger",
        "pid",
        "message",
        "event",
        "task_id",
        "task_name",
        "attempt",
        "queue",
        "try",
        "duration",
        "error",
        "exc",
    }
    assert (failed["task_id"], failed["task_name"]) == (str(handle.id), "talking.burns")
    assert (failed["level"], failed["attempt"], failed["queue"]) == ("ERROR", 1, "default")
    assert failed["exc"].startswith("Traceback (most recent call last):")
    murmured = next(line for line in lines if line["message"] == "murmured rye")
    assert (murmured["level"], murmured["logger"], murmured["run_id"]) == ("DEBUG", "bakery", str(run.id))
    assert next(line for line in lines if line["message"] == "printed rye")["logger"] == "orchestrator.stdout"
    worker.stop()

    worker = life.worker(*APP, "--log-level", "WARNING", wait=False)
    talking.speaks.enqueue("rye").result(timeout=60)
    failure(talking.burns.enqueue("toast"))
    assert logged(worker, "failed")
    assert "printed rye" in worker.log.read_text(), "what a task prints is no matter of levels"
    assert not re.search("received|succeeded|logged rye", worker.log.read_text())


def test_a_flood_of_failures_is_summarized(life: Stack) -> None:
    worker = life.worker(*APP)
    handles = talking.app.enqueue_many(talking.burns, [(f"toast {number}",) for number in range(300)])
    for handle in handles:
        failure(handle)

    def told(kind: str) -> tuple[int, int]:
        """Return how many tasks have their own line of this kind, and how many the summary lines count."""
        text = worker.log.read_text()
        counted = re.findall(rf" task.summary task=talking.burns seconds=\d+: .*?\b(\d+) {kind}\b", text)
        return len(re.findall(rf"\] task.{kind}\b", text)), sum(map(int, counted))

    for kind in ("received", "failed"):
        eventually(lambda: sum(told(kind)) == 300, f"each is told or counted, once: {kind}")  # noqa: B023
    assert told("failed")[0] >= 50
    assert told("failed")[1] > 0, "of many at once, most have no line of their own"
    line = logged(worker, "failed without a line each")
    assert re.search(r"the latest failure, [\da-f-]{36}: ValueError: toast \d+ is burnt$", line)


def test_a_task_that_blocks_the_event_loop_is_named(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    handle = talking.blocks.enqueue(str(pipe))
    line = logged(worker, "kept the event loop")
    pipe.write_text("")
    handle.result(timeout=60)
    assert " WARNING " in line
    assert f"task talking.blocks[{handle.id}] has kept the event loop from running for 1 s, in blocks (" in line
    assert worker.log.read_text().count("kept the event loop") == 1


def test_a_failed_workflow_run_is_logged_with_its_traceback(life: Stack) -> None:
    worker = life.worker(*APP)
    run = talking.order.start("rye")
    assert logged(worker, f"talking.order[{run.id}] ordered rye")
    line = logged(worker, f"talking.order[{run.id}] run.failed error=LookupError: no rye left")
    assert 'talking.py", line' in worker.log.read_text().partition(line)[2]


def test_mismatched_arguments_are_logged_without_a_traceback(life: Stack) -> None:
    worker = life.worker(*APP)
    settings = life.settings
    stranger = Orchestrator(database_url=settings.database_url, redis_url=settings.redis_url)
    handle = stranger.task(name="talking.naps")(print).enqueue("long")
    failure(handle)
    stranger.close()
    assert " ERROR " in logged(worker, f"talking.naps[{handle.id}] task.failed")
    assert "Traceback" not in worker.log.read_text()


def test_logging_configured_by_the_application_stays_as_configured(life: Stack) -> None:
    worker = life.worker("--app", "talking_own:app")
    handle = talking.speaks.enqueue("rye")
    handle.result(timeout=60)
    assert logged(worker, f"own talking.speaks|{handle.id}|logged rye").startswith("own ")
    assert logged(worker, f"own talking.speaks|{handle.id}|murmured rye")
    assert logged(worker, f"INFO    talking.speaks[{handle.id}] printed rye"), (
        "what is printed has no format of its own"
    )
    assert logged(worker, f"talking.speaks[{handle.id}] task.succeeded"), (
        "although dictConfig silences who is not named"
    )
    assert "own ||" not in worker.log.read_text().replace("own ||Using selector", ""), "the worker's lines are its own"


def test_the_logging_configuration_in_the_docs_receives_all_lines(life: Stack, tmp_path: Path) -> None:
    guide = (HERE.parents[1] / "docs" / "operations.md").read_text().partition("### Your own logging")[2]
    block = guide.partition("```python\n")[2].partition("```")[0]
    path = f"import sys\nsys.path.insert(0, {str(HERE)!r})\n"
    (tmp_path / "guided.py").write_text(f"{block}{path}from talking import app\n")
    worker = life.worker("--app", "guided:app", folder=tmp_path)
    handle = talking.speaks.enqueue("rye")
    handle.result(timeout=60)
    for words in ("task.received", "printed rye", "logged rye", "unfinished rye", "task.succeeded"):
        assert logged(worker, f" INFO talking.speaks {handle.id} {words}")


@pytest.mark.parametrize(
    ("app", "is_read"),
    [
        pytest.param("talking_own:app", True, id="unread-own"),
        pytest.param("talking:app", False, id="closed"),
        pytest.param("talking:app", True, id="unread", marks=pytest.mark.long),
        pytest.param("talking_own:app", False, id="closed-own", marks=pytest.mark.long),
    ],
)
def test_an_unread_or_closed_log_pipe_does_not_block_a_worker(life: Stack, app: str, is_read: bool) -> None:
    reader, writer = os.pipe()
    words = ("worker", "--app", app, "--processes", "1")
    worker = forking.begin(*words, environment=life.environment, folder=HERE, stdout=writer, stderr=writer)
    os.close(writer)
    if not is_read:
        os.close(reader)
    try:
        for task in (talking.floods, talking.floods_log):
            task.enqueue(5_000).result(timeout=60)
        talking.speaks_async.enqueue("rye").result(timeout=60)
        talking.speaks_apart.enqueue("rye").result(timeout=60)
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        if is_read:
            os.close(reader)


def test_a_slow_log_reader_misses_no_lines(life: Stack) -> None:
    words, both = ("worker", *APP, "--processes", "1"), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    worker = forking.begin(*words, environment=life.environment, folder=HERE, **both)
    assert worker.stdout is not None
    numbers: list[int] = []
    with worker:
        talking.floods.enqueue(5_000)
        while numbers[-1:] != [4_999]:
            line = worker.stdout.readline()
            assert line, f"{len(numbers)} lines"
            if found := re.search(r"\] (\d{6}) x", line):
                numbers.append(int(found[1]))
        worker.terminate()
        worker.stdout.read()
    assert numbers == list(range(5_000))
