"""Workflows as DAGs, through real processes."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import project
import psutil
import pytest

from orchestrator import InvalidWorkflow, RunHandle
from orchestrator.sdk.dag.definitions import loads
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Stack
from tests.acceptance.ways import Way, both_ways, use_route  # noqa: F401
from tests.waiting import eventually

pytestmark = pytest.mark.long_for("http")  # test_enqueue_to_result.py covers HTTP in each build

WORKER = ("--allow", "steps.py")


@pytest.fixture(scope="module")
def running(way: Way, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A scheduler and a worker that may run the plain functions in steps.py."""
    folder = tmp_path_factory.mktemp("stack")
    with fresh_stack(database_url, redis_url, folder, webhook_allow="127.0.0.1") as stack:
        stack.scheduler()
        stack.worker(*WORKER, processes=2)
        use_route(way, stack, project.app)
        yield stack


def start(text: str, **params: Any) -> RunHandle[Any]:
    definition = loads(text)
    project.app.workflows.apply(definition)
    return project.app.workflows[definition.name].start(**params)


NIGHTLY = """
name: nightly
params: {day: {type: date, default: today}, count: {type: integer, default: 3}}
defaults: {retries: 1, timeout: 10m}
tasks:
  discover: {task: "steps.py:discover", input: {count: "${params.count}"}}
  process:  {task: "steps.py:double", depends_on: [discover], foreach: discover.files, concurrency: 2}
  shards:   {task: "steps.py:echo", depends_on: [discover], parallel: discover.count,
             input: {which: "${index}/${count}", day: "${params.day}"}}
  report:   {task: "steps.py:echo", depends_on: [process, shards], on_failure: run,
             input: {first: "${process[0]}", many: "${len(process)}"}}
  publish:  {task: "steps.py:echo", depends_on: [report], when: "${report.many > 100}"}
  tell:     {task: "steps.py:echo", depends_on: [publish], trigger: all_ended, input: {whole: "${discover}"}}
"""


def test_foreach_parallel_when_and_triggers_combine_in_one_dag(running: Stack) -> None:
    run = start(NIGHTLY, count=4, day="2026-05-01")
    assert run.wait_ended(60) == "success"
    outputs = run.outputs()
    assert outputs["process"] == [f"file-{number}" * 2 for number in range(4)]
    assert outputs["shards"] == [{"which": f"{index}/4", "day": "2026-05-01"} for index in range(4)]
    assert outputs["report"]["first"] == "file-0file-0"
    assert outputs["report"]["many"] == 4
    assert outputs["report"]["process"] == outputs["process"], "upstream outputs come under their names"
    assert "publish" not in outputs
    assert outputs["tell"] == {"publish": None, "whole": outputs["discover"]}
    counters = run.progress().counters
    assert (counters.total, counters.success, counters.skipped, counters.failed) == (12, 11, 1, 0)


def test_a_failure_skips_downstream_tasks_which_a_retry_then_runs(running: Stack, tmp_path: Path) -> None:
    run = start(
        f"""
        name: broken
        tasks:
          bad:    {{task: "steps.py:fail_until", input: {{path: "{tmp_path}/go"}}}}
          below:  {{task: "steps.py:nothing", depends_on: [bad]}}
          deeper: {{task: "steps.py:nothing", depends_on: [below]}}
          other:  {{task: "steps.py:nothing"}}
          alarm:  {{task: "steps.py:nothing", depends_on: [bad, other], trigger: any_failed}}
          last:   {{task: "steps.py:echo", depends_on: [deeper, other], trigger: all_ended}}
        """
    )
    assert run.wait_ended(60) == "failed"
    counters = run.progress().counters
    assert (counters.success, counters.failed, counters.skipped) == (3, 1, 2)
    assert run.outputs()["last"] == {"deeper": None, "other": None}
    (tmp_path / "go").touch()
    run.retry()
    assert run.wait_ended(60) == "success"
    counters = run.progress().counters
    assert (counters.total, counters.success, counters.failed, counters.skipped) == (6, 6, 0, 0)
    attempts = running.sql(
        "SELECT count(*) FROM orchestrator.ended_tasks WHERE run_id = :id AND step = 'other'", id=run.id
    )
    assert attempts == [(1,)], "what had succeeded was not run again"


def test_child_workflows_return_outputs_and_are_cancelled_with_their_parent(running: Stack, tmp_path: Path) -> None:
    project.app.workflows.apply(
        loads(
            """
            name: child
            params: {number: {type: integer}}
            tasks:
              twice: {task: "steps.py:double", input: {item: "${params.number}"}}
            """
        )
    )
    run = start(
        """
        name: parent
        tasks:
          make:  {task: "steps.py:echo", input: {list: [1, 2, 3]}}
          child: {workflow: child, depends_on: [make], foreach: make.list, input: {number: "${item}"}}
          sum:   {task: "steps.py:echo", depends_on: [child]}
        """
    )
    assert run.wait_ended(60) == "success"
    assert run.outputs()["sum"] == {"child": [{"twice": 2}, {"twice": 4}, {"twice": 6}]}
    project.app.workflows.apply(
        loads(
            f"""
            name: slow
            tasks:
              wait: {{task: "steps.py:wait_for", input: {{path: "{tmp_path}/no", started: "{tmp_path}/s"}}}}
            """
        )
    )
    run = start(
        "name: outer\ntasks:\n  inner: {workflow: slow}\n  after: {task: 'steps.py:nothing', depends_on: [inner]}"
    )
    eventually((tmp_path / "s").exists, "the child runs")
    run.cancel()
    assert run.wait_ended(60) == "cancelled"
    assert running.sql("SELECT status FROM orchestrator.runs WHERE workflow = 'slow'") == [("cancelled",)]
    assert run.progress().counters.open == 0


def test_versions_are_immutable_and_runs_keep_their_version(running: Stack, tmp_path: Path) -> None:
    text = f'name: pinned\ntasks:\n  a: {{task: "steps.py:wait_for", input: {{path: "{tmp_path}/go"}}}}\n'
    first = project.app.workflows.apply(loads(text))
    assert project.app.workflows.apply(loads(text)) == first, "the same body is a no-op"
    run = project.app.workflows["pinned"].start()
    second = project.app.workflows.apply(loads(text + '  b: {task: "steps.py:nothing", depends_on: [a]}\n'))
    assert second == first + 1
    with pytest.raises(InvalidWorkflow, match="exists with a different body"):
        project.app.workflows.apply(loads(f"version: {first}\n{text}  c: {{task: 'steps.py:nothing'}}\n"))
    (tmp_path / "go").touch()
    assert run.wait_ended(60) == "success"
    assert set(run.outputs()) == {"a"}
    assert running.scalar("SELECT version FROM orchestrator.runs WHERE id = :id", id=run.id) == first


def test_a_rerun_from_a_task_does_not_repeat_upstream_tasks(running: Stack, tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = start(
        f"""
        name: again
        tasks:
          a: {{task: "steps.py:record", input: {{path: "{log}", name: a}}}}
          b: {{task: "steps.py:record", depends_on: [a], input: {{path: "{log}", name: "b${{a}}"}}}}
          c: {{task: "steps.py:record", depends_on: [b], input: {{path: "{log}", name: "c${{b}}"}}}}
        """
    )
    assert run.wait_ended(60) == "success"
    again = run.rerun(from_step="b")
    assert again.wait_ended(60) == "success"
    assert again.outputs() == {"a": "a", "b": "ba", "c": "cba"}
    begun = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("begin")]
    assert begun == ["a", "ba", "cba", "ba", "cba"]
    assert again.progress().counters.success == 3
    with pytest.raises(InvalidWorkflow, match="has no task 'z'"):
        run.rerun(from_step="z")
    assert run.rerun().wait_ended(60) == "success"


class TestEvents:
    """Events that start runs, and hooks that a run calls."""

    def test_a_posted_event_starts_a_run_if_its_filter_matches(self, running: Stack) -> None:
        project.app.workflows.apply(
            loads(
                """
                name: on-order
                params: {order: {type: integer}}
                on: [{event: order-placed, filter: "${event.total > 100}", params: {order: "${event.id}"}}]
                tasks:
                  a: {task: "steps.py:echo", input: {order: "${params.order}"}}
                """
            )
        )
        project.app.post_event("order-placed", {"id": 1, "total": 50})
        project.app.post_event("order-placed", {"id": 2, "total": 500})
        project.app.post_event("something-else", {"id": 3, "total": 500})
        ended = "SELECT id::text FROM orchestrator.runs WHERE workflow = 'on-order' AND status = 'success'"
        rows = eventually(lambda: running.sql(ended), "the run ends")
        assert len(rows) == 1
        assert project.app.run(str(rows[0][0])).outputs() == {"a": {"order": 2}}

    def test_the_success_of_a_workflow_starts_another_workflow(self, running: Stack) -> None:
        project.app.workflows.apply(
            loads("name: follower\non: [{workflow: leader}]\ntasks:\n  a: {task: 'steps.py:nothing'}")
        )
        run = start("name: leader\ntasks:\n  a: {task: 'steps.py:nothing'}")
        assert run.wait_ended(60) == "success"
        ended = "SELECT status FROM orchestrator.runs WHERE workflow = 'follower'"
        eventually(lambda: running.sql(ended) == [("success",)], "the follower ends")

    def test_a_failed_run_starts_its_hook_task_and_calls_its_webhook(self, running: Stack, tmp_path: Path) -> None:
        received: list[dict[str, Any]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            run = start(
                f"""
                name: hooked
                on_failure: [{{task: "steps.py:echo"}}, {{webhook: "http://127.0.0.1:{server.server_port}/"}}]
                tasks:
                  a: {{task: "steps.py:fail_until", input: {{path: "{tmp_path}/never"}}}}
                """
            )
            assert run.wait_ended(60) == "failed"
            eventually(lambda: received, "the webhook is called")
        finally:
            server.shutdown()
            server.server_close()
        assert received[0] == {"run_id": run.id, "workflow": "hooked", "state": "failed", "params": {}}
        hooks = "SELECT count(*) FROM orchestrator.ended_tasks WHERE name = 'steps.py:echo' AND run_id IS NULL"
        eventually(lambda: running.scalar(hooks) == 1, "the hook task ran")


def test_a_foreach_of_ten_thousand_items_keeps_messages_small(running: Stack) -> None:
    run = start(
        """
        name: many
        tasks:
          make: {task: "steps.py:discover", input: {count: 10000}}
          each: {task: project.noop, depends_on: [make], foreach: make.files}
          last: {task: "steps.py:echo", depends_on: [each], input: {each: null, number: "${len(each)}"}}
        """
    )
    assert run.wait_ended(90) == "success"
    assert run.outputs()["last"] == {"each": None, "number": 10_000}
    assert run.progress().counters.success == 10_002
    longest = "SELECT max(length(payload)) FROM orchestrator.ended_tasks WHERE run_id = :id AND step = 'each'"
    assert running.scalar(longest, id=run.id) < 200, "messages stay constant in size"


def layers(name: str, depth: int, width: int, above: int) -> str:
    """Return a DAG of no-ops: each task depends on `above` tasks of the previous layer."""
    lines = [f"name: {name}", "tasks:"]
    for layer in range(depth):
        for place in range(width):
            parents = [f"s{layer - 1}-{(place + step) % width}" for step in range(above)] if layer else []
            lines.append(f"  s{layer}-{place}: {{task: project.noop, depends_on: [{', '.join(parents)}]}}")
    return "\n".join(lines)


def test_a_dense_dag_costs_the_leader_less_than_a_second(running: Stack) -> None:
    """Measure the leader's CPU time: wall time is below a second on an idle machine, but not on a busy one."""
    project.app.workflows.apply(loads(layers("dense", 10, 100, 100)))
    leader, times = psutil.Process(running.leader().pid), []
    for _ in range(3):
        began = sum(leader.cpu_times()[:2])
        run = project.app.workflows["dense"].start()
        assert run.wait_ended(60) == "success"
        times.append(sum(leader.cpu_times()[:2]) - began)
        assert run.progress().counters.success == 1_000
    print(f"the leader took {', '.join(f'{seconds:.2f}' for seconds in times)} s")
    assert min(times) < 1.0, times


@pytest.mark.long
def test_the_cost_of_a_task_does_not_grow_with_the_size_of_its_run(running: Stack) -> None:
    cost = {}
    for size in (100, 1_000, 10_000):
        text = layers(f"flat-{size}", size // 50, 50, 2)
        project.app.workflows.apply(loads(text))
        best = float("inf")
        for _ in range(2):
            began = time.monotonic()
            assert project.app.workflows[f"flat-{size}"].start().wait_ended(120) == "success"
            best = min(best, time.monotonic() - began)
        cost[size] = best / size
    assert cost[10_000] < 2 * cost[100], cost


CONFORMANCE = os.environ.get("ORCHESTRATOR_CONFORMANCE")


@pytest.mark.skipif(not CONFORMANCE, reason="ORCHESTRATOR_CONFORMANCE is not set: no traces to run")
@pytest.mark.parametrize("trace", sorted(Path(CONFORMANCE or ".").glob("dags/*.json")), ids=lambda path: path.stem)
def test_recorded_real_workflows_run_in_dependency_order(running: Stack, tmp_path: Path, trace: Path) -> None:
    workflow = json.loads(trace.read_text())["workflow"]
    seconds = {task["id"]: task["runtimeInSeconds"] for task in workflow["execution"]["tasks"]}
    scale = 5.0 / max(1.0, sum(seconds.values()))
    tasks = workflow["specification"]["tasks"]
    names = {task["id"]: f"t{number}" for number, task in enumerate(tasks)}
    log = tmp_path / "log"
    document = {
        "name": f"trace-{trace.stem}",
        "tasks": {
            names[task["id"]]: {
                "task": "steps.py:record",
                "depends_on": [names[parent] for parent in task["parents"]],
                "input": {"path": str(log), "name": names[task["id"]], "seconds": seconds[task["id"]] * scale},
            }
            for task in tasks
        },
    }
    run = start(json.dumps(document))
    assert run.wait_ended(60) == "success"
    lines = [line.split() for line in log.read_text().splitlines()]
    begins = {name: place for place, (word, name) in enumerate(lines) if word == "begin"}
    ends = {name: place for place, (word, name) in enumerate(lines) if word == "end"}
    assert len(lines) == 2 * len(tasks), "each task runs once"
    for task in tasks:
        for parent in task["parents"]:
            assert ends[names[parent]] < begins[names[task["id"]]], "every task starts after all its parents ended"
