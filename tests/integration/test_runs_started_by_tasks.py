"""Runs started by running tasks: repeated requests start one run, and invalid requests start none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from orchestrator import Duplicate, WorkflowContext
from orchestrator.domain.code import history
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.starts import START, Start, StartCode, StartMany, StartSteps, as_task
from orchestrator.domain.tasks.task import Enqueued, KeyHolder, NewTask, UniqueKey
from orchestrator.sdk.dag import definitions
from tests.integration.stage import System, Worker

ID = bytes(range(15)) + b"\x01"
OTHER = bytes(range(15)) + b"\x02"
THIRD = bytes(range(15)) + b"\x03"
CODE = history.RunStarted("flow", 1, b"\x92\x90\x80")


@pytest.fixture
def worker(system: System) -> Worker:
    @system.app.workflow(name="flow")
    async def flow(ctx: WorkflowContext) -> None: ...

    system.app.workflows.apply(definitions.loads("name: steps\nparams: {n: {type: integer}}\ntasks: {a: {task: job}}"))
    system.app.flows.publish("graph", {"start": "a", "nodes": {"a": {"kind": "approval"}}})
    worker = system.worker(knows=("job", "flow"))
    system.pass_seconds()
    return worker


def start_runs(system: System, worker: Worker, *asked: NewTask) -> dict[bytes, KeyHolder]:
    worker.report(Enqueued(list(asked)))
    system.pass_seconds(2)
    return worker._streams.key_holders([task.id for task in asked])


MANY = StartMany("many", [NewTask(OTHER, "job", "default", b"\x92\x90\x80", run_id=ID, position=0)])


@pytest.mark.parametrize(
    "start",
    [
        StartCode(CODE),
        StartCode(CODE, key="flow/k"),
        StartSteps("steps", '{"n": 1}', "k"),
        StartSteps("graph", '{"n": 1}', "k", flow=True),
        StartSteps("graph", '{"n": 1}', version=1, flow=True),
        MANY,
    ],
)
def test_a_repeated_request_starts_one_run(system: System, worker: Worker, start: Start) -> None:
    for _ in range(2):
        assert start_runs(system, worker, as_task(ID, start)) == {ID: KeyHolder(ID)}
    assert system.count("runs") == 1
    assert system.sql(f"SELECT 1 FROM orchestrator.tasks WHERE name = '{START}'") == []


ANY = "name: any\nparams: {n: {type: any, default: 0}}\ntasks: {a: {task: job}}"


@pytest.mark.parametrize("other", ["true", "1.0", "[1]", "2"])
def test_a_key_with_different_parameters_is_rejected(system: System, worker: Worker, other: str) -> None:
    system.app.workflows.apply(definitions.loads(ANY))
    assert start_runs(system, worker, as_task(ID, StartSteps("any", '{"n": 1}', "k"))) == {ID: KeyHolder(ID)}
    assert start_runs(system, worker, as_task(OTHER, StartSteps("any", '{"n": 1}', "k"))) == {OTHER: KeyHolder(ID)}
    (refused,) = start_runs(system, worker, as_task(THIRD, StartSteps("any", f'{{"n": {other}}}', "k"))).values()
    assert refused.error is not None
    assert refused.error.kind == "Duplicate"
    assert "with different parameters; this run was not started" in refused.error.message
    workflow = system.app.workflows["any"].options(key="k")
    assert workflow.start(n=1).id == to_text(ID)
    with pytest.raises(Duplicate, match="with different parameters"):
        workflow.start(n=msgspec.json.decode(other))
    assert system.count("runs") == 1


@pytest.mark.parametrize("value", [-0.0, 1e16, 1e-7, 12345678901234567, 100000.0, None, {"b": 1.0, "a": True}])
def test_stored_parameters_equal_the_same_parameters_of_a_new_call(system: System, worker: Worker, value: Any) -> None:
    system.app.workflows.apply(definitions.loads(ANY))
    workflow = system.app.workflows["any"].options(key="k")
    assert workflow.start(n=value).id == workflow.start(n=value).id


def test_a_repeated_signal_is_received_once(system: System, worker: Worker) -> None:
    start_runs(system, worker, as_task(ID, StartCode(CODE, key="flow/k")))
    start = StartCode(CODE, key="flow/k", signal=history.SignalReceived("go", b"\x01"))
    for _ in range(2):
        assert start_runs(system, worker, as_task(OTHER, start)) == {OTHER: KeyHolder(ID)}
    assert len(system.sql("SELECT 1 FROM orchestrator.histories WHERE kind = 'signal_received'")) == 1


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (StartSteps("nowhere", "{}"), "NotFound"),
        (StartSteps("steps", '{"n": "many"}'), "InvalidWorkflow"),
        (StartSteps("steps", "[1]"), "TypeError"),
        (StartSteps("steps", "{"), "DecodeError"),
        (StartSteps("steps", '{"n": 1}', key="a\0b"), "CannotBeApplied"),
    ],
)
def test_an_invalid_start_is_rejected_and_does_not_block_others(
    system: System, worker: Worker, start: Any, kind: str
) -> None:
    good = as_task(OTHER, StartSteps("steps", '{"n": 1}'))
    found = start_runs(system, worker, as_task(ID, start), good)
    error = found[ID].error
    assert error is not None
    assert error.kind == kind
    assert found[OTHER] == KeyHolder(OTHER)
    assert system.count("runs") == 1


def test_an_undecodable_request_is_rejected(system: System, worker: Worker) -> None:
    found = start_runs(system, worker, NewTask(ID, START, "default", b"\xc1", unique=UniqueKey("x", "pending")))
    assert found[ID].error is not None
    assert system.count("runs") == 0


@pytest.mark.parametrize(("name", "version", "words"), [("nowhere", None, "flow 'nowhere'"), ("graph", 7, "version 7")])
def test_a_start_of_an_unknown_flow_is_rejected(
    system: System, worker: Worker, name: str, version: int | None, words: str
) -> None:
    (refused,) = start_runs(system, worker, as_task(ID, StartSteps(name, flow=True, version=version))).values()
    assert refused.error is not None
    assert words in refused.error.message
    assert system.count("runs") == 0
