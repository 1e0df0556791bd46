"""Server-sent events of the HTTP API: listeners miss no event."""

from __future__ import annotations

import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import httpx
import pytest

from tests.acceptance import pages
from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.listening import Listener, ended, enqueue, listening
from tests.acceptance.stack import Stack
from tests.waiting import eventually

GUIDE = pages.REPOSITORY / "docs" / "http-api.md"
ID = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"
"""An id of no task or run."""
DAG = {
    "name": "live_dag",
    "tasks": {
        "first": {"task": "project.add", "input": {"a": 1, "b": 1}},
        "second": {"task": "project.add", "depends_on": ["first"], "input": {"a": "${first}", "b": 1}},
    },
}


TALKING = {
    "name": "live_talk",
    "params": {"go": {"type": "string"}},
    "tasks": {
        "first": {"task": "project.narrates", "input": {"go": "${params.go}"}},
        "second": {"task": "project.says", "depends_on": ["first"], "input": {"text": "hello"}},
    },
}


@pytest.fixture(scope="module")
def served(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        stack.scheduler()
        stack.worker("--queues", "default,watched", processes=1)
        yield stack, stack.api() + "/api/v1"


@pytest.fixture
def api(served: tuple[Stack, str]) -> str:
    return served[1]


STATES = ("snapshot", "task", "end")
"""Events with a state. A snapshot may come again, where the listener may have missed an event."""


def test_a_task_is_followed_to_its_end(api: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    task = enqueue(api, "narrates", str(go))
    with listening(f"{api}/tasks/{task}/events") as listener:
        listener.wait_for(lambda: listener.of("progress"), "progress")
        listener.wait_for(lambda: listener.of("log"), "a line")
        go.touch()
        events = listener.join()
    assert events[0].kind == "snapshot"
    assert events[0].data["id"] == task
    assert listener.of("progress")[-1] == {"attempt": 1, "fraction": 0.5, "text": "half of it"}
    assert [line["text"] for line in listener.of("log")] == ["begins", "is done"]
    moves = [event.data["status"] for event in events if event.kind in ("task", "end")]
    states = [state for state, _ in groupby(event.data["status"] for event in events if event.kind in STATES)]
    order = ["pending", "dispatched", "running", "success"]
    assert (len(moves), states) == (len({*moves}), sorted({*states}, key=order.index)), "none comes twice or goes back"
    assert (events[-1].kind, events[-1].data["status"], events[-1].id) == ("end", "success", "end")


def test_a_listener_after_the_end_gets_a_snapshot_and_the_end(api: str) -> None:
    task = enqueue(api, "add", 1, 2)
    eventually(lambda: httpx.get(f"{api}/tasks/{task}").json()["task"]["status"] == "success", "it has ended")
    events = Listener(f"{api}/tasks/{task}/events").join()
    assert [event.kind for event in events] == ["snapshot", "end"]
    assert httpx.get(f"{api}/tasks/{task}/events", headers={"Last-Event-ID": "end"}).status_code == 204
    assert [event.kind for event in Listener(f"{api}/tasks/{task}/events", last="1-1:9-9").join()] == [
        "snapshot",
        "end",
    ]


def test_invalid_requests_are_rejected_before_the_stream_begins(api: str) -> None:
    for place in (f"tasks/{ID}", f"runs/{ID}"):
        answer = httpx.get(f"{api}/{place}/events")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert httpx.get(f"{api}/tasks/nonsense/events").status_code == 404
    assert httpx.get(f"{api}/status/events", params={"seconds": 0}).status_code == 422
    head = httpx.head(f"{api}/status/events")
    assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


def test_a_stream_ends_after_the_requested_seconds(api: str) -> None:
    answer = httpx.get(f"{api}/status/events", params={"seconds": 0.2})
    assert "event: snapshot" in answer.text
    assert answer.headers["cache-control"] == "no-store"


def test_a_run_is_followed_to_its_end(api: str) -> None:
    httpx.post(f"{api}/workflows", json={"definition": DAG}).raise_for_status()
    run = httpx.post(f"{api}/workflows/live_dag/runs", json={}).raise_for_status().json()["id"]
    events = Listener(f"{api}/runs/{run}/events").join()
    assert (events[0].kind, events[0].data["id"]) == ("snapshot", run)
    assert (events[-1].data["status"], events[-1].data["success"]) == ("success", 2)
    ended = Listener(f"{api}/runs/{run}/events").join()
    assert [event.kind for event in ended] == ["snapshot", "end"]


def test_log_lines_of_a_run_are_streamed_while_it_runs(api: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    httpx.post(f"{api}/workflows", json={"definition": TALKING}).raise_for_status()
    run = (
        httpx.post(f"{api}/workflows/live_talk/runs", json={"params": {"go": str(go)}}).raise_for_status().json()["id"]
    )
    with listening(f"{api}/runs/{run}/logs/events") as listener:
        listener.wait_for(lambda: listener.of("log"), "a line, while the run goes on")
        go.touch()
        events = listener.join()
    assert (events[0].kind, events[0].data["id"]) == ("snapshot", run)
    assert (events[-1].kind, events[-1].data["status"]) == ("end", "success")
    lines = listener.of("log")
    assert [line["text"] for line in lines if line["step"] == "first"] == ["begins", "is done"]
    [said] = [line for line in lines if line["step"] == "second"]
    assert (said["text"], len(lines)) == ("hello", 3)
    second = httpx.get(f"{api}/tasks/{said['task']}").json()["task"]
    assert (second["run_id"], second["name"]) == (run, "project.says")
    last = next(event.id for event in events if event.kind == "log")
    again = Listener(f"{api}/runs/{run}/logs/events", last=last).join()
    assert {event.data["text"] for event in again if event.kind == "log"} == {"is done", "hello"}


def test_a_run_of_a_code_workflow_is_followed_to_its_end(api: str) -> None:
    run = project.both.start(1, 2).id
    events = Listener(f"{api}/runs/{run}/events").join()
    assert (events[-1].kind, events[-1].data["status"], events[-1].data["success"]) == ("end", "success", 2)


def test_a_queue_stream_reports_every_move_of_its_tasks(api: str) -> None:
    with listening(f"{api}/queues/watched/events") as listener:
        listener.begun()
        tasks = [enqueue(api, "add", number, 1, queue="watched") for number in range(50)]
        enqueue(api, "add", 1, 1)
        listener.wait_for(lambda: set(ended(listener)) >= set(tasks), "the ends of all")
    assert Counter(ended(listener)) == Counter(tasks)
    moves = [move for told in listener.of("tasks") for move in told["tasks"]]
    assert {move["queue"] for move in moves} == {"watched"}
    assert Counter(move["id"] for move in moves if move["status"] == "dispatched") == Counter(tasks)


def test_a_queue_stream_sends_a_snapshot_after_pause_and_resume(api: str) -> None:
    with listening(f"{api}/queues/halting/events") as listener:
        listener.begun()
        httpx.post(f"{api}/queues/halting/pause?new=true").raise_for_status()
        listener.wait_for(lambda: listener.of("snapshot")[-1]["paused"], "a snapshot of a paused queue")
        httpx.post(f"{api}/queues/halting/resume").raise_for_status()
        listener.wait_for(lambda: not listener.of("snapshot")[-1]["paused"], "a snapshot of one that goes on")


def test_the_status_stream_reports_activity_and_workers(served: tuple[Stack, str]) -> None:
    stack, api = served
    with listening(f"{api}/status/events") as listener:
        listener.begun()
        for number in range(30):
            enqueue(api, "add", number, 1)

        def succeeded() -> int:
            return sum(told["queues"].get("default", {}).get("success", 0) for told in listener.of("activity"))

        listener.wait_for(lambda: succeeded() == 30, "thirty ends")
        worker = stack.worker("--queues", "elsewhere")
        listener.wait_for(lambda: "live" in states_of_workers(listener), "a worker that came")
        worker.stop()
        listener.wait_for(lambda: "gone" in states_of_workers(listener), "and left")


def test_the_curl_commands_of_the_guide_listen_as_written(api: str) -> None:
    task, run = enqueue(api, "add", 1, 2), project.both.start(1, 2).id
    listened = [command.line for command in pages.commands(GUIDE) if command.line.startswith("curl -N")]
    assert len(listened) == 4
    for line in listened:
        words = shlex.split(line.replace("http://127.0.0.1:8000/api/v1", api))
        words = [word.replace("$TASK", task).replace("$RUN", run) for word in words]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        assert said.startswith("retry: 1000\n\n"), line
        assert "event: snapshot\ndata: {" in said, line
        assert ("event: end" in said) == ("$" in line), line


def states_of_workers(listener: Listener) -> set[str]:
    return {worker["state"] for told in listener.of("workers") for worker in told["workers"]}
