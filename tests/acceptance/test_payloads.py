"""Large values are in the payload store; rows and messages refer to them."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import storing

from orchestrator import Orchestrator, PayloadError, Settings, TaskFailed
from orchestrator.domain.redaction import HIDDEN
from orchestrator.executors import Process
from orchestrator.payloads import keeping
from orchestrator.sdk.code.engine import replay
from orchestrator.sdk.dag.definitions import loads
from orchestrator.workers.container import folder_of
from tests import forking
from tests.acceptance.stack import Stack
from tests.acceptance.storehouse import LARGE, WORKER, collect, largest_rows, objects, storing_stack
from tests.emptying import empty
from tests.waiting import eventually


@pytest.fixture(scope="module")
def house(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A scheduler and a worker for many tests. Tests with a stack of their own come after them."""
    with storing_stack(database_url, redis_url, tmp_path_factory.mktemp("house")) as stack:
        stack.scheduler()
        stack.worker(*WORKER, "--allow-command", sys.executable)
        yield stack


def forget(stack: Stack) -> None:
    with stack.engine.connect() as connection:
        empty(connection, "ended_tasks", "histories", "runs")


@pytest.fixture
def running(house: Stack) -> Stack:
    """The stack of `house`, without earlier rows and payloads."""
    forget(house)
    for path in objects(house):
        path.unlink()
    return house


def test_large_arguments_and_results_are_not_in_rows(running: Stack) -> None:
    for task in (storing.echo, storing.echo_async, storing.echo.options(isolation="process")):
        assert task.enqueue(LARGE).result(60) == LARGE
    assert storing.app.start_many(storing.length, [(LARGE,), ([1] * 200_000,)]).results(60) == [len(LARGE), 200_000]
    assert storing.followed.enqueue().result(60) == b"z" * 500_000
    following = "SELECT result FROM orchestrator.ended_tasks WHERE name = 'storing.follow'"
    eventually(lambda: running.sql(following))
    assert storing.flow.start(100_000).result(60) == 101_000
    assert largest_rows(running) < 20_000
    assert len(objects(running)) == 3 * 2 + 2 + 1 + 3


def test_a_large_result_of_an_executor_is_not_in_its_row(running: Stack) -> None:
    program = [sys.executable, "-c", "print(chr(34) + 'x' * 200_000 + chr(34))"]
    task = storing.echo.options(executor=Process(command=program))
    assert task.enqueue("small").result(60) == "x" * 200_000
    assert largest_rows(running) < 10_000
    assert len(objects(running)) == 1


def test_a_large_list_fans_out_by_reference(running: Stack) -> None:
    storing.app.workflows.apply(
        loads("""
name: fan
tasks:
  some: {task: storing.numbers, input: {count: 1500}}
  each: {task: storing.number_of, depends_on: [some], foreach: some}
  all:  {task: storing.length, depends_on: [each], input: {value: "${each}"}}
  bad:  {task: storing.length, depends_on: [some], input: {value: "${some[0]}"}}
""")
    )
    run = storing.app.workflows["fan"].start()
    assert run.wait_ended(60) == "failed"
    outputs = run.outputs()
    assert outputs["each"] == list(range(1_500))
    assert outputs["all"] == 1_500
    assert len(outputs["some"]) == 1_500
    assert largest_rows(running) < 20_000
    assert len(objects(running)) == 1
    reason = forking.run("runs", "show", run.id, environment=running.environment).stdout
    assert "payload store, which the scheduler does not read" in " ".join(reason.split())


@pytest.mark.long  # 200 MB; smaller values are written and read the same way in the other tests
def test_large_payloads_are_streamed_with_little_memory(running: Stack) -> None:
    storing.app.workflows.apply(
        loads("""
name: stream
tasks:
  write:  {task: storing.write, input: {megabytes: 200}}
  copy:   {task: storing.copy, depends_on: [write]}
  digest: {task: storing.digest, depends_on: [copy]}
""")
    )
    run = storing.app.workflows["stream"].start()
    assert run.wait_ended(100) == "success"
    expected = hashlib.sha256()
    for number in range(200):
        expected.update(bytes([number % 256]) * 1_000_000)
    task = running.scalar("SELECT id FROM orchestrator.ended_tasks WHERE step = 'copy'")
    found = hashlib.sha256()
    with storing.app.handle(str(task)).open_result() as source:
        while data := source.read(1_000_000):
            found.update(data)
    assert found.digest() == expected.digest()
    made = run_output(running, "digest")
    assert made["sha256"] == expected.hexdigest()
    assert made["size"] == 200_000_000
    assert made["peak"] < 150_000, f"{made['peak']} kB"


def run_output(running: Stack, step: str) -> Any:
    task = running.scalar(f"SELECT id FROM orchestrator.ended_tasks WHERE step = '{step}'")
    return storing.app.handle(str(task)).result(60)


def test_small_output_stays_in_its_row(running: Stack) -> None:
    handle = storing.write.enqueue(0)
    with handle.open_result(60) as source:
        assert source.read() == b""
    with pytest.raises(PayloadError, match="if it is bytes"):
        storing.length.enqueue("abc").open_result(60)
    assert objects(running) == []


def test_a_payload_of_a_worker_killed_before_its_report_is_collected(running: Stack, tmp_path: Path) -> None:
    handle = storing.die_once.enqueue(str(tmp_path / "died"))
    assert handle.result(60) == b"y" * 500_000
    assert len(objects(running)) == 2
    collect(running)
    assert len(objects(running)) == 1
    assert storing.app.handle(handle.id).result(60) == b"y" * 500_000
    running.sql("DELETE FROM orchestrator.ended_tasks RETURNING 1")
    collect(running)
    assert objects(running) == []


def test_large_values_of_code_workflows_are_not_in_rows(running: Stack) -> None:
    courier = storing.courier.start(LARGE, 1)
    storing.wrap.start(courier.id, LARGE).result(60)
    assert courier.result(60) == f"{LARGE}nop{LARGE}"
    assert largest_rows(running) < 20_000
    # Arguments of the two started runs, of a successor and of a child; the signal, once for all its receivers; the
    # note; the argument and the result of `echo`; and two results.
    assert len(objects(running)) == 10
    last = running.scalar("SELECT run_id FROM orchestrator.histories WHERE kind = 'operation_recorded'")
    history = storing.app.workflow_run(str(last)).history()
    replay(storing.courier, history, exactly=True)
    assert LARGE not in history.to_json()
    collect(running)
    assert len(objects(running)) == 10
    # The successor keeps the signal that was stored for the run before it, and the result of its child.
    running.sql(f"DELETE FROM orchestrator.ended_tasks WHERE id <> '{last}' RETURNING 1")
    running.sql(f"DELETE FROM orchestrator.runs WHERE id <> '{last}' RETURNING 1")
    collect(running)
    replay(storing.courier, history, exactly=True)
    forget(running)
    collect(running)
    assert objects(running) == []
    assert running.scalar("SELECT count(*) FROM orchestrator.payload_keeps") == 0


def test_a_payload_of_a_turn_killed_before_its_report_is_collected(running: Stack, tmp_path: Path) -> None:
    handle = storing.doomed.start(str(tmp_path / "died"))
    assert handle.result(60) == b"y" * 500_000
    assert len(objects(running)) == 2
    collect(running)
    assert len(objects(running)) == 1
    assert storing.app.workflow_run(handle.id).result(60) == b"y" * 500_000


def test_a_rerun_keeps_the_arguments_of_a_deleted_run(running: Stack) -> None:
    first = storing.porter.start(LARGE)
    assert first.result(60) == f"{LARGE}p"
    again = first.rerun()
    assert again.result(60) == f"{LARGE}p"
    running.sql(f"DELETE FROM orchestrator.ended_tasks WHERE id = '{first.id}' RETURNING 1")
    running.sql(f"DELETE FROM orchestrator.runs WHERE id = '{first.id}' RETURNING 1")
    collect(running)
    assert again.rerun().result(60) == f"{LARGE}p"


def test_the_end_of_a_run_with_large_arguments_starts_a_workflow(running: Stack) -> None:
    storing.app.workflows.apply(
        loads("""
name: after-porter
params: {of: {type: string, default: ""}}
on: [{workflow: storing.porter, params: {of: "${event.run_id}"}}]
tasks:
  given: {task: storing.echo, input: {value: "${params.of}"}}
""")
    )
    porter = storing.porter.start(LARGE)
    porter.result(60)
    told = "SELECT id FROM orchestrator.ended_tasks WHERE step = 'given'"
    eventually(lambda: running.sql(told), "the workflow that waits for its end has run", 60)
    assert storing.app.handle(str(running.scalar(told))).result(60) == porter.id


def test_a_payload_that_another_row_refers_to_is_kept(running: Stack) -> None:
    first = storing.followed.enqueue()
    first.result(60)
    eventually(lambda: running.sql("SELECT 1 FROM orchestrator.ended_tasks WHERE name = 'storing.follow'"))
    running.sql("DELETE FROM orchestrator.ended_tasks WHERE name = 'storing.followed' RETURNING 1")
    collect(running)
    assert len(objects(running)) == 1
    running.sql("DELETE FROM orchestrator.ended_tasks RETURNING 1")
    collect(running)
    assert objects(running) == []
    assert running.scalar("SELECT count(*) FROM orchestrator.payload_keeps") == 0


def test_execution_folders_of_ended_tasks_are_collected(running: Stack) -> None:
    ended, waiting = storing.length.enqueue("abc"), storing.length.options(delay=600).enqueue("abc")
    ended.result(60)
    left = Path(running.settings.payload_store) / running.settings.namespace / "executions"
    for handle in (ended, waiting):
        folder_of(str(left / f"task-{handle.id}-1")).write("status.json", b"{}")
    collect(running)
    assert [path.name for path in left.iterdir()] == [f"task-{waiting.id}-1"]
    waiting.cancel()
    eventually(lambda: waiting.status() == "cancelled", "nobody will read it")
    collect(running)
    assert list(left.iterdir()) == []


def test_changed_truncated_or_missing_payloads_are_reported(running: Stack) -> None:
    handle = storing.echo.enqueue("b" * 100_000)
    handle.result(60)
    for path in objects(running):
        data = bytearray(path.read_bytes())
        data[50] ^= 1
        path.write_bytes(data)
    with pytest.raises(PayloadError, match="was changed"):
        storing.app.handle(handle.id).result(60)
    late = storing.length.options(queue="late").enqueue("c" * 100_000)
    for path in objects(running):
        path.write_bytes(path.read_bytes()[:-1])
    running.worker(*WORKER, "--queues", "late")
    with pytest.raises(TaskFailed, match="was changed or truncated"):
        late.result(60)
    for path in objects(running):
        path.unlink()
    with pytest.raises(PayloadError, match="is not in the payload store"):
        storing.app.handle(handle.id).result(60)


def test_stored_arguments_and_results_are_served_as_json(running: Stack) -> None:
    bytes_, list_, text = storing.write.enqueue(2), storing.numbers.enqueue(3_000), storing.echo.enqueue(LARGE)
    hidden = storing.numbers.options(redact=["text"]).enqueue(3_000)
    for handle in (bytes_, list_, text, hidden):
        handle.open_result(60).close() if handle is bytes_ else handle.result(60)
    run = storing.porter.start(LARGE)
    run.result(60)
    with httpx.Client(base_url=running.api(), timeout=30) as http:
        shown = http.get(f"/api/v1/tasks/{text.id}").json()
        assert (shown["result"], shown["args"]) == (None, [])
        assert shown["result_stored"]["size"] >= len(LARGE)
        assert http.get(shown["result_stored"]["path"]).json() == LARGE
        assert http.get(shown["args_stored"]["path"]).json() == {"args": [LARGE], "kwargs": {}}
        read = base64.b64decode(http.get(f"/api/v1/tasks/{bytes_.id}/result").json())
        assert read == b"".join(bytes([number]) * 1_000_000 for number in range(2))
        assert http.get(f"/api/v1/tasks/{list_.id}/result").json() == list_.result(60)
        assert {item["text"] for item in http.get(f"/api/v1/tasks/{hidden.id}/result").json()} == {HIDDEN}
        small = storing.length.enqueue("abc")
        small.result(60)
        assert http.get(f"/api/v1/tasks/{small.id}/result").json() == 3
        assert http.get(f"/api/v1/tasks/{small.id}").json()["result_stored"] is None
        late = storing.length.options(delay=600).enqueue("abc")
        assert http.get(f"/api/v1/tasks/{late.id}/result").status_code == 409
        late.cancel()
        eventually(lambda: late.status() == "cancelled", "nothing is under way when the next test clears the tables")
        code = http.get(f"/api/v1/runs/{run.id}").json()["code"]
        assert (code["result"], code["args"], code["kwargs"]) == (None, [], {})
        assert http.get(code["result_stored"]["path"]).json() == f"{LARGE}p"
        assert http.get(code["args_stored"]["path"]).json() == {"args": [LARGE], "kwargs": {}}
        assert "bytes in the payload store" in http.get(f"/ui/runs/{run.id}").text
        asked = {"task": base64.b64encode(bytes.fromhex(text.id.replace("-", ""))).decode(), "number": 0}
        altered = base64.b64encode(b"\xc7\x1a\x03\x93payload\x91\x01" + b"x" * 16).decode()
        found = http.post("/api/v1/client/tasks/payload_part", json={**asked, "reference": altered})
        assert found.status_code == 422, found.text


@pytest.mark.long
def test_very_large_outputs_are_returned_by_reference(running: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    storing.app.workflows.apply(
        loads("""
name: heavy
tasks:
  huge: {task: storing.write, input: {megabytes: 17}}
  some: {task: storing.numbers, input: {count: 1500}}
  none: {task: storing.length, input: {value: abc}}
""")
    )
    run = storing.app.workflows["heavy"].start()
    assert run.wait_ended(60) == "success"
    address = running.api()
    with httpx.Client(base_url=address, timeout=30) as http:
        answer = http.get(f"/api/v1/runs/{run.id}/outputs")
        assert len(answer.content) < 1_000_000
        shown = answer.json()
        assert (shown["outputs"]["huge"], shown["outputs"]["none"]) == (None, 3)
        assert len(shown["outputs"]["some"]) == 1_500
        assert [(step, one["size"]) for step, some in shown["stored"].items() for one in some] == [("huge", 17_000_000)]
        huge = base64.b64decode(http.get(shown["stored"]["huge"][0]["path"]).json())
        assert (len(huge), huge[-1]) == (17_000_000, 16)
        asked = {"run": base64.b64encode(bytes.fromhex(run.id.replace("-", ""))).decode()}
        assert len(http.post("/api/v1/client/runs/encoded_outputs", json=asked).content) < 10_000
    with Orchestrator(Settings(api_url=address)) as remote:
        monkeypatch.delitem(keeping._openers, str(Path(running.settings.payload_store) / "orchestrator"))
        outputs = remote.run(run.id).outputs(60)
    assert (outputs["huge"], outputs["none"]) == (huge, 3)
    assert outputs["some"][1_499]["number"] == 1_499


def test_clients_over_http_need_no_store(running: Stack) -> None:
    written = storing.write.enqueue(3)
    fanned = storing.numbers.enqueue(3_000)
    written.open_result(60).close()
    fanned.result(60)
    with Orchestrator(Settings(api_url=running.api())) as remote:
        keeping._openers.pop(str(Path(running.settings.payload_store) / "orchestrator"))
        with remote.handle(written.id).open_result(60) as source:
            assert source.read() == b"".join(bytes([number]) * 1_000_000 for number in range(3))
        assert remote.handle(written.id).result(60)[:3] == b"\0\0\0"
        assert remote.handle(fanned.id).result(60)[2_999]["number"] == 2_999
        remote.task(name="storing.length")(storing.length.function)
        assert remote.enqueue("storing.length", LARGE).result(60) == len(LARGE)
        porter = remote.workflow(name="storing.porter")(storing.porter.function)
        assert porter.start(LARGE).result(60) == f"{LARGE}p"
    assert len(objects(running)) == 5
