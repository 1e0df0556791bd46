"""Histories that another workflow engine recorded: replay gives the same commands and finds the same violations."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator import DeterminismViolation
from orchestrator.domain.code import history
from orchestrator.testing import replay
from tests.unit.code_workflows.foreign_histories import Foreign, Json, as_file_writes

CONFORMANCE = os.environ.get("ORCHESTRATOR_CONFORMANCE")
FILES = sorted(Path(CONFORMANCE, "replay").glob("*.json")) if CONFORMANCE else []
NO_FILES = pytest.param(None, marks=pytest.mark.skip("ORCHESTRATOR_CONFORMANCE is not set: no recorded histories"))


def plain(text: str) -> str:
    """Return an error's text without the words in which the two engines differ."""
    return re.sub(r" (type|name|kind|key|id)(?= mismatch)", "", text.lower())


@pytest.mark.parametrize("path", FILES or [NO_FILES], ids=lambda path: path.stem if path else "none")
def test_recorded_histories_replay_as_recorded(path: Path) -> None:
    check(Foreign(json.loads(path.read_text())))


def check(foreign: Foreign) -> None:
    """Replay one file, and compare the outcome with what the file expects."""
    test = foreign.content.get("determinism_test", {})
    if test.get("type") == "expect_violation":
        with pytest.raises(DeterminismViolation) as found:
            replay(foreign.workflow(), foreign.recording)
        for part in test.get("expected_error_contains", []):
            text = str(found.value)
            assert part.lower() in text.lower() or plain(part) in plain(text)
        return
    made = [as_file_writes(command) for command in replay(foreign.workflow(), foreign.recording)]
    expected = foreign.content["expected_commands"]
    assert [one["type"] for one in made] == [one["type"] for one in expected]
    for command, wanted in zip(made, expected, strict=True):
        assert {key: value for key, value in command.items() if key in wanted} == {
            key: value for key, value in wanted.items() if key in command
        }


def synthetic_file(events: list[tuple[str, Json]], replayed: list[Json], **more: Any) -> Foreign:
    """Return a file in the format of the recorded files."""
    started: tuple[str, Json] = ("WorkflowStarted", {"input": {}})
    return Foreign(
        {
            "workflow_execution_id": "aaaa0000-0000-0000-0000-000000000009",
            "workflow_kind": "made-up",
            "events": [{"event_type": kind, "data": data} for kind, data in [started, *events]],
            "replay_commands": replayed,
            **more,
        }
    )


@pytest.mark.parametrize(
    ("event", "command", "contains"),
    [
        (("TaskScheduled", {"taskType": "a"}), {"type": "ScheduleTask", "taskType": "b"}, "Task type mismatch"),
        (
            ("OperationCompleted", {"operation_name": "a", "result": 1}),
            {"type": "RecordOperation", "name": "b"},
            "Operation name mismatch",
        ),
        (("PromiseCreated", {"promise_name": "a"}), {"type": "CreatePromise", "promise_name": "b"}, "Promise name"),
        (("TimerStarted", {"timer_id": "a"}), {"type": "StartTimer", "timer_id": "b"}, "Timer ID mismatch"),
        (("StateSet", {"key": "a", "value": 1}), {"type": "SetState", "key": "b", "value": 1}, "State key mismatch"),
        (("StateSet", {"key": "a", "value": 1}), {"type": "ClearState", "key": "a"}, "State change mismatch"),
        (
            ("ChildWorkflowInitiated", {"child_workflow_name": "n", "child_workflow_kind": "a"}),
            {"type": "ScheduleChildWorkflow", "name": "n", "kind": "b"},
            "Child workflow kind mismatch",
        ),
        (
            ("ChildWorkflowInitiated", {"childWorkflowName": "a", "childWorkflowKind": "k"}),
            {"type": "ScheduleChildWorkflow", "name": "b", "kind": "k"},
            "Child workflow name mismatch",
        ),
    ],
)
def test_every_kind_of_violation_is_found(event: tuple[str, Json], command: Json, contains: str) -> None:
    check(
        synthetic_file(
            [event],
            [command],
            determinism_test={"type": "expect_violation", "expected_error_contains": [contains]},
        )
    )


def test_child_workflow_fields_are_read_in_every_spelling() -> None:
    """A file may call a child by `workflowKind` and `workflowName`, and identify it by `childworkflowExecutionId`."""
    known = {"childworkflowExecutionId": "c-1"}
    events: list[tuple[str, Json]] = [
        ("ChildWorkflowInitiated", {"workflowName": "n", "workflowKind": "k", "input": 1, **known}),
        ("ChildWorkflowStarted", {"workflowName": "n", **known}),
        ("ChildWorkflowCompleted", {"workflowName": "n", "result": 2, **known}),
        ("WorkflowCompleted", {"output": 2}),
    ]
    child = {"type": "ScheduleChildWorkflow", "workflowName": "n", "workflowKind": "k", "input": 1}
    script: list[Json] = [child, {"type": "CompleteWorkflow", "output": 2}]
    foreign = synthetic_file(events, script, expected_commands=script)
    assert isinstance(foreign.events[2].what, history.ChildCompleted)
    check(foreign)
    with pytest.raises(AssertionError):
        check(synthetic_file(events, script, expected_commands=[{**child, "workflowKind": "another"}, script[1]]))


@pytest.mark.parametrize("asked", [[], [("TaskCancellationRequested", {"taskExecutionId": "1"})]])
def test_a_task_that_the_code_cancels_is_replayed(asked: list[tuple[str, Json]]) -> None:
    events: list[tuple[str, Json]] = [
        ("TaskScheduled", {"kind": "slow", "taskExecutionId": "1"}),
        ("TaskScheduled", {"kind": "fast", "taskExecutionId": "2"}),
        ("TaskCompleted", {"taskExecutionId": "2", "result": 2}),
        *asked,
        ("TaskCancelled", {"taskExecutionId": "1"}),
        ("WorkflowCompleted", {"output": 2}),
    ]
    script: list[Json] = [
        {"type": "ScheduleTask", "kind": "slow"},
        {"type": "ScheduleTask", "kind": "fast"},
        {"type": "RequestCancelTask", "taskExecutionId": "1"},
        {"type": "CompleteWorkflow", "output": 2},
    ]
    check(synthetic_file(events, script, expected_commands=script))


def test_failures_in_the_history_are_raised_in_the_code() -> None:
    events: list[tuple[str, Json]] = [
        ("TaskScheduled", {"kind": "charge", "taskExecutionId": "1"}),
        ("TaskFailed", {"taskExecutionId": "1", "error": "no money"}),
        ("OperationFailed", {"operation_name": "look", "error": "dark"}),
        ("ChildWorkflowInitiated", {"child_workflow_name": "n", "child_workflow_kind": "k", "child_execution_id": "2"}),
        ("ChildWorkflowFailed", {"child_execution_id": "2", "error": "ill"}),
        ("PromiseCreated", {"promise_name": "approval"}),
        ("PromiseRejected", {"promise_name": "approval", "error": "no"}),
        ("WorkflowFailed", {"error": "given up"}),
    ]
    script: list[Json] = [
        {"type": "ScheduleTask", "kind": "charge"},
        {"type": "RecordOperation", "name": "look"},
        {"type": "ScheduleChildWorkflow", "name": "n", "kind": "k"},
        {"type": "CreatePromise", "promise_name": "approval"},
        {"type": "FailWorkflow", "error": "given up"},
    ]
    check(synthetic_file(events, script, expected_commands=script))


def test_a_cancelled_workflow_replays_as_cancelled() -> None:
    events: list[tuple[str, Json]] = [
        ("TimerStarted", {"timerId": "t", "durationMs": 1000}),
        ("CancellationRequested", {"reason": "enough"}),
        ("WorkflowCancelled", {}),
    ]
    script: list[Json] = [{"type": "StartTimer", "timerId": "t", "durationMs": 1000}, {"type": "CancelWorkflow"}]
    check(synthetic_file(events, script, expected_commands=script))


def test_commands_after_the_end_of_the_history_are_accepted() -> None:
    events: list[tuple[str, Json]] = [
        ("TaskScheduled", {"kind": "a", "taskExecutionId": "1"}),
        ("TaskCompleted", {"taskExecutionId": "1", "result": 1}),
    ]
    script: list[Json] = [{"type": "ScheduleTask", "kind": "a"}, {"type": "ScheduleTask", "kind": "b"}]
    check(synthetic_file(events, script, expected_commands=script))
