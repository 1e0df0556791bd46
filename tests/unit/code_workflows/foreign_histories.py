"""Recorded histories of another workflow engine, translated to histories and programs of this one.

A file contains the commands of a workflow and its events, but not its code. Therefore the code is synthesized: it
issues the file's commands in order. Before each command it waits for the outcomes that precede it in the history.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from orchestrator import CodeWorkflow, Orchestrator, OrchestratorError, WorkflowContext, WorkflowFailed
from orchestrator.domain.code import commands, history
from orchestrator.domain.code.commands import Kind, command_id
from orchestrator.domain.code.history import Event
from orchestrator.domain.tasks.task import TaskError
from orchestrator.sdk.values.payload import decode_value, encode_value
from orchestrator.testing import Recording

Json = dict[str, Any]
KINDS: dict[str, Kind] = {
    "ScheduleTask": "task",
    "StartTimer": "timer",
    "CreatePromise": "promise",
    "ScheduleChildWorkflow": "child",
    "RecordOperation": "operation",
    "SetState": "state",
    "ClearState": "state",
}
ENDS = ("CompleteWorkflow", "FailWorkflow", "CancelWorkflow")
NAMES = ("kind", "task_type", "operation_name", "name", "promise_name")
CHILD_NAMES = ("child_workflow_name", "child_execution_name", "workflow_name")
CHILD_KINDS = ("child_workflow_kind", "workflow_kind", "kind")
IDS = (
    *("task_execution_id", "timer_id", "promise_id"),
    *("child_execution_id", "child_workflow_execution_id", "workflow_execution_id"),
)
CANCELS: dict[str, Kind] = {
    "CancelTimer": "timer",
    "RequestCancelTask": "task",
    "RequestCancelChildWorkflow": "child",
}


def first(data: Json, *names: str, default: Any = None) -> Any:
    """Return the value of the first field that exists; files spell names as `timer_id` or `timerId`."""
    by_name = {_normalized(name): value for name, value in data.items()}
    return next((by_name[_normalized(name)] for name in names if _normalized(name) in by_name), default)


def _normalized(name: str) -> str:
    return name.replace("_", "").lower()


def encoded(value: Any) -> bytes:
    return encode_value(value, "a value of the file", 10_000_000)


def error_of(data: Json) -> TaskError:
    return TaskError("Error", str(first(data, "error", "message", "reason", default="it failed")))


@dataclass
class Opened:
    """A command of the history: its event number, and its name and id in the file."""

    kind: Kind
    ordinal: int
    number: int
    name: str
    file_id: str | None
    ended: bool = False


@dataclass
class Foreign:
    """One file, translated to a history."""

    content: Json
    run_id: bytes = field(init=False)
    events: list[Event] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)
    inputs: dict[tuple[Kind, int], Any] = field(default_factory=dict)
    outcomes: dict[tuple[Kind, int], int] = field(default_factory=dict)
    """Event number of each outcome."""
    cancelled: dict[tuple[Kind, int], int] = field(default_factory=dict)
    """Event number of each cancellation or request to cancel."""

    def __post_init__(self) -> None:
        self.run_id = UUID(first(self.content, "workflow_execution_id")).bytes
        for event in self.content["events"]:
            self._translate(event["event_type"], event["data"])

    @property
    def kind(self) -> str:
        return str(first(self.content, "workflow_kind", "workflow_name"))

    @property
    def recording(self) -> Recording:
        return Recording(self.run_id, self.events)

    # -- events

    def _add(self, what: Any) -> int:
        self.events.append(Event(len(self.events) + 1, 1_700_000_000.0 + len(self.events), what))
        return len(self.events)

    def _open(self, kind: Kind, data: Json, name: str) -> tuple[int, bytes]:
        ordinal = sum(one.kind == kind for one in self.opened) + 1
        self.opened.append(Opened(kind, ordinal, len(self.events) + 1, name, first(data, *IDS)))
        self.inputs[kind, ordinal] = data.get("input")
        return ordinal, command_id(self.run_id, kind, ordinal)

    def _ended(self, kind: Kind, data: Json) -> bytes:
        """Find the command that an outcome belongs to, mark it as ended, and return its id."""
        one = self._find(kind, data)
        one.ended = True
        self.outcomes[kind, one.ordinal] = len(self.events) + 1
        return command_id(self.run_id, kind, one.ordinal)

    def _cancelled(self, kind: Kind, data: Json) -> bytes:
        """Find the command that the code has cancelled, and return its id."""
        one = self._find(kind, data)
        one.ended = kind == "timer"
        self.cancelled[kind, one.ordinal] = len(self.events) + 1
        return command_id(self.run_id, kind, one.ordinal)

    def _find(self, kind: Kind, data: Json) -> Opened:
        """Find an open command: by the file's id if it has one, else the oldest with that name."""
        file_id, name = first(data, *IDS), first(data, *(CHILD_NAMES if kind == "child" else NAMES))
        for one in self.opened:
            if one.kind == kind and not one.ended and (one.file_id == file_id if file_id else one.name == name):
                return one
        raise AssertionError(f"{kind} {file_id or name} ends but was never begun")

    def _translate(self, kind: str, data: Json) -> None:
        name = first(data, *NAMES)
        match kind:
            case "WorkflowStarted":
                payload = encoded(([data.get("input")], {}))
                self._add(history.RunStarted(self.kind, 1, payload))
            case "TaskScheduled":
                self._add(history.TaskScheduled(*self._open("task", data, name), name))
            case "TaskCompleted":
                result = encoded(first(data, "result", "output"))
                self._add(history.TaskCompleted(self._ended("task", data), result))
            case "TaskFailed":
                self._add(history.TaskFailed(self._ended("task", data), error_of(data)))
            case "TaskCancelled":
                self._add(history.TaskCancelled(self._ended("task", data)))
            case "TimerStarted":
                name = first(data, "timer_id", default="")
                seconds = first(data, "duration_ms", default=0) / 1000
                self._add(history.TimerStarted(*self._open("timer", data, name), seconds, name))
            case "TimerFired":
                self._add(history.TimerFired(self._ended("timer", data)))
            case "TimerCancelled":
                self._add(history.TimerCancelled(self._cancelled("timer", data)))
            case "TaskCancelRequested" | "TaskCancellationRequested":
                self._add(history.TaskCancelRequested(self._cancelled("task", data)))
            case "ChildWorkflowCancelRequested" | "ChildWorkflowCancellationRequested":
                self._add(history.ChildCancelRequested(self._cancelled("child", data)))
            case "PromiseCreated":
                self._add(history.PromiseCreated(*self._open("promise", data, name), name))
            case "PromiseResolved":
                value = encoded(first(data, "value", "result"))
                self._add(history.PromiseResolved(self._ended("promise", data), value))
            case "PromiseRejected" | "PromiseTimeout":
                self._add(history.PromiseRejected(self._ended("promise", data), error_of(data)))
            case "OperationCompleted":
                ordinal, _ = self._open("operation", data, name)
                result = encoded(first(data, "result", "output"))
                self._add(history.OperationRecorded(ordinal, name, result))
            case "OperationFailed":
                ordinal, _ = self._open("operation", data, name)
                self._add(history.OperationRecorded(ordinal, name, error=error_of(data)))
            case "ChildWorkflowInitiated":
                name = first(data, *CHILD_NAMES, default="")
                child = first(data, *CHILD_KINDS, default=name)
                self._add(history.ChildStarted(*self._open("child", data, name), child, name))
            case "ChildWorkflowCompleted":
                result = encoded(first(data, "result", "output"))
                self._add(history.ChildCompleted(self._ended("child", data), result))
            case "ChildWorkflowFailed":
                self._add(history.ChildFailed(self._ended("child", data), error_of(data)))
            case "ChildWorkflowCancelled":
                self._add(history.ChildCancelled(self._ended("child", data)))
            case "StateSet":
                ordinal, _ = self._open("state", data, data["key"])
                self._add(history.StateSet(ordinal, data["key"], encoded(data.get("value"))))
            case "StateCleared":
                ordinal, _ = self._open("state", data, data["key"])
                self._add(history.StateCleared(ordinal, data["key"]))
            case "SignalReceived":
                name = first(data, "signal_name", "name")
                self._add(history.SignalReceived(name, encoded(first(data, "value", "payload", "input"))))
            case "CancellationRequested" | "WorkflowCancellationRequested":
                self._add(history.RunCancelRequested(str(data.get("reason") or "")))
            case "WorkflowCompleted":
                self._add(history.RunCompleted(encoded(data.get("output"))))
            case "WorkflowFailed" | "WorkflowExecutionFailed":
                self._add(history.RunFailed(error_of(data)))
            case "WorkflowCancelled":
                self._add(history.RunCancelled())
            case "ChildWorkflowStarted" | "WorkflowSuspended" | "WorkflowResumed" | "TaskStarted":
                pass  # no effect on the code of a workflow
            case _:
                raise AssertionError(f"a history may not hold an event {kind!r}")

    # -- code

    @property
    def file_commands(self) -> list[Json]:
        """The commands that the code issues."""
        expected: list[Json] = self.content.get("expected_commands", [])
        replayed: list[Json] = self.content.get("replay_commands", expected)
        ends = [one for one in expected if one["type"] in ENDS]
        return replayed if any(one["type"] in ENDS for one in replayed) else [*replayed, *ends]

    def workflow(self) -> CodeWorkflow[..., Any]:
        """Return the synthesized workflow."""
        app = Orchestrator()
        for name in {first(one, *NAMES) for one in self.file_commands if one["type"] == "ScheduleTask"}:
            app.task(name=name)(_anything)
        for child in {_child(one) for one in self.file_commands if one["type"] == "ScheduleChildWorkflow"}:
            app.workflow(name=child)(_any_workflow)

        async def code(ctx: WorkflowContext, _: Any) -> Any:
            return await self._run_commands(app, ctx)

        return app.workflow(name=self.kind)(code)

    async def _run_commands(self, app: Orchestrator, ctx: WorkflowContext) -> Any:
        counts: dict[Kind, int] = {}
        futures: dict[tuple[Kind, int], asyncio.Future[Any]] = {}
        for command in self.file_commands:
            kind = KINDS.get(command["type"])
            if kind is not None:
                counts[kind] = counts.get(kind, 0) + 1
                key = kind, counts[kind]
                at = next((one.number for one in self.opened if (one.kind, one.ordinal) == key), len(self.events))
            elif command["type"] in CANCELS:
                key = self._find_cancelled(CANCELS[command["type"]], command)
                at = self.cancelled.get(key, self.outcomes.get(key, len(self.events)))
            else:
                at = len(self.events)
            for outcome_key, number in self.outcomes.items():
                if number < at and outcome_key in futures and not futures[outcome_key].cancelled():
                    with contextlib.suppress(OrchestratorError):
                        await futures[outcome_key]
            match command["type"]:
                case "CompleteWorkflow":
                    return command.get("output", self._output())
                case "FailWorkflow":
                    raise WorkflowFailed(str(first(command, "error", "message", default="it failed")))
                case "CancelTimer" | "RequestCancelTask" | "RequestCancelChildWorkflow":
                    futures[key].cancel()
                case "CancelWorkflow":
                    break  # then wait to be cancelled
                case _:
                    future = self._issue(app, ctx, command, key)
                    if future is not None:
                        futures[key] = future
        await asyncio.Event().wait()  # the file contains no further commands

    def _output(self) -> Any:
        ended = [event.what for event in self.events if isinstance(event.what, history.RunCompleted)]
        return decode_value(ended[0].result) if ended else None

    def _find_cancelled(self, kind: Kind, command: Json) -> tuple[Kind, int]:
        """Find the command to cancel: by the file's id or, without one, by its name."""
        file_id, name = first(command, *IDS), first(command, *(CHILD_NAMES if kind == "child" else NAMES))
        return next(
            (kind, one.ordinal)
            for one in self.opened
            if one.kind == kind and (file_id in (one.file_id, one.name) if file_id else one.name == name)
        )

    def _issue(
        self, app: Orchestrator, ctx: WorkflowContext, command: Json, key: tuple[Kind, int]
    ) -> asyncio.Future[Any] | None:
        name = first(command, *NAMES)
        input_value = command.get("input", self.inputs.get(key))
        match command["type"]:
            case "ScheduleTask":
                return ctx.schedule(name, input_value)
            case "StartTimer":
                milliseconds = first(command, "duration_ms", default=1000)
                return ctx.sleep(milliseconds / 1000, name=first(command, "timer_id", default=""))
            case "CreatePromise":
                return ctx.promise(name)
            case "ScheduleChildWorkflow":
                return app.code_workflows[_child(command)].options(name=_child_name(command)).schedule(input_value)
            case "RecordOperation":
                return ctx.run(name, lambda: command.get("result"))
            case "SetState":
                ctx.set(command["key"], command.get("value"))
            case "ClearState":
                ctx.clear(command["key"])
            case other:
                raise AssertionError(f"code may not command {other!r}")
        return None


def _child_name(command: Json) -> str:
    return str(first(command, "name", *CHILD_NAMES, default=""))


def _child(command: Json) -> str:
    return str(first(command, *CHILD_KINDS, default=_child_name(command)))


async def _any_workflow(ctx: WorkflowContext, input_value: Any = None) -> Any: ...


def _anything(input_value: Any = None) -> Any: ...


def as_file_writes(command: commands.Command) -> Json:
    """Return a command as JSON of the file, with all fields in all spellings."""
    match command:
        case commands.ScheduleTask(task=task):
            input_value = decode_value(task.payload)[0][0]
            return {"type": "ScheduleTask", "kind": task.name, "task_type": task.name, "input": input_value}
        case commands.StartTimer(name=name, seconds=seconds):
            milliseconds = seconds * 1000
            fields = {"timerId": name, "timer_id": name, "duration_ms": milliseconds, "durationMs": milliseconds}
            return {"type": "StartTimer", **fields}
        case commands.CancelTimer():
            return {"type": "CancelTimer"}
        case commands.CancelTask():
            return {"type": "RequestCancelTask"}
        case commands.CancelChildRun():
            return {"type": "RequestCancelChildWorkflow"}
        case commands.CreatePromise(name=name):
            return {"type": "CreatePromise", "promise_name": name, "promiseName": name, "name": name}
        case commands.StartChildRun(workflow=workflow, name=name, payload=payload):
            input_value = decode_value(payload)[0][0]
            names = dict.fromkeys(("name", "workflow_name", "workflowName", "childWorkflowName"), name)
            kinds = dict.fromkeys(("kind", "workflow_kind", "workflowKind", "childWorkflowKind"), workflow)
            return {"type": "ScheduleChildWorkflow", **names, **kinds, "input": input_value}
        case commands.RecordOperation(name=name, result=result):
            value = None if result is None else decode_value(result)
            return {"type": "RecordOperation", "name": name, "operation_name": name, "result": value}
        case commands.SetState(key=key, value=value):
            return {"type": "SetState", "key": key, "value": decode_value(value)}
        case commands.ClearState(key=key):
            return {"type": "ClearState", "key": key}
        case commands.CompleteRun(result=result):
            return {"type": "CompleteWorkflow", "output": decode_value(result)}
        case commands.FailRun(error=error):
            return {"type": "FailWorkflow", "error": error.message}
        case commands.CancelRun():
            return {"type": "CancelWorkflow"}
        case _:
            return {"type": type(command).__name__}
