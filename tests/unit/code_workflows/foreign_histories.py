"""Recorded histories of another system, as histories and programs of this one.

A file tells what a workflow commanded and what happened, but not its code. So the code is made up: it issues the
commands of the file in order, and before each waits for whatever had happened when the history recorded that command.
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
    """Return the first of these fields that there is; files write `timer_id`, `timerId` and the like as they please."""
    spelt = {_plain(name): value for name, value in data.items()}
    return next((spelt[_plain(name)] for name in names if _plain(name) in spelt), default)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def encoded(value: Any) -> bytes:
    return encode_value(value, "a value of the file", 10_000_000)


def error_of(data: Json) -> TaskError:
    return TaskError("Error", str(first(data, "error", "message", "reason", default="it failed")))


@dataclass
class Opened:
    """Something that was begun in the history: where, and under which of the file's names."""

    kind: Kind
    ordinal: int
    number: int
    name: str
    file_id: str | None
    ended: bool = False


@dataclass
class Foreign:
    """One file."""

    content: Json
    run_id: bytes = field(init=False)
    events: list[Event] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)
    inputs: dict[tuple[Kind, int], Any] = field(default_factory=dict)
    outcomes: dict[tuple[Kind, int], int] = field(default_factory=dict)
    """The number of the event by which something ended."""
    cancelled: dict[tuple[Kind, int], int] = field(default_factory=dict)
    """The number of the event by which something was cancelled, or asked to be."""

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
        """Find what an outcome is of, and note that it has ended."""
        one = self._find(kind, data)
        one.ended = True
        self.outcomes[kind, one.ordinal] = len(self.events) + 1
        return command_id(self.run_id, kind, one.ordinal)

    def _cancelled(self, kind: Kind, data: Json) -> bytes:
        """Find what was cancelled by the code."""
        one = self._find(kind, data)
        one.ended = kind == "timer"
        self.cancelled[kind, one.ordinal] = len(self.events) + 1
        return command_id(self.run_id, kind, one.ordinal)

    def _find(self, kind: Kind, data: Json) -> Opened:
        """Find something that is open: by the file's id if it has one, else the oldest of that name."""
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
                pass  # says nothing that the code of a workflow could notice
            case _:
                raise AssertionError(f"a history may not hold an event {kind!r}")

    # -- code

    @property
    def commanded(self) -> list[Json]:
        """What the code commands."""
        expected: list[Json] = self.content.get("expected_commands", [])
        replayed: list[Json] = self.content.get("replay_commands", expected)
        ends = [one for one in expected if one["type"] in ENDS]
        return replayed if any(one["type"] in ENDS for one in replayed) else [*replayed, *ends]

    def workflow(self) -> CodeWorkflow[..., Any]:
        """Return the code that the file is about."""
        app = Orchestrator()
        for name in {first(one, *NAMES) for one in self.commanded if one["type"] == "ScheduleTask"}:
            app.task(name=name)(_anything)
        for child in {_child(one) for one in self.commanded if one["type"] == "ScheduleChildWorkflow"}:
            app.workflow(name=child)(_any_workflow)

        async def code(ctx: WorkflowContext, _: Any) -> Any:
            return await self._play(app, ctx)

        return app.workflow(name=self.kind)(code)

    async def _play(self, app: Orchestrator, ctx: WorkflowContext) -> Any:
        counts: dict[Kind, int] = {}
        futures: dict[tuple[Kind, int], asyncio.Future[Any]] = {}
        for command in self.commanded:
            kind = KINDS.get(command["type"])
            if kind is not None:
                counts[kind] = counts.get(kind, 0) + 1
                place = kind, counts[kind]
                at = next((one.number for one in self.opened if (one.kind, one.ordinal) == place), len(self.events))
            elif command["type"] in CANCELS:
                place = self._begun(CANCELS[command["type"]], command)
                at = self.cancelled.get(place, self.outcomes.get(place, len(self.events)))
            else:
                at = len(self.events)
            for waited, number in self.outcomes.items():
                if number < at and waited in futures and not futures[waited].cancelled():
                    with contextlib.suppress(OrchestratorError):
                        await futures[waited]
            match command["type"]:
                case "CompleteWorkflow":
                    return command.get("output", self._output())
                case "FailWorkflow":
                    raise WorkflowFailed(str(first(command, "error", "message", default="it failed")))
                case "CancelTimer" | "RequestCancelTask" | "RequestCancelChildWorkflow":
                    futures[place].cancel()
                case "CancelWorkflow":
                    break  # and wait to be cancelled
                case _:
                    made = self._issue(app, ctx, command, place)
                    if made is not None:
                        futures[place] = made
        await asyncio.Event().wait()  # the file says no more of what the code does

    def _output(self) -> Any:
        ended = [event.what for event in self.events if isinstance(event.what, history.RunCompleted)]
        return decode_value(ended[0].result) if ended else None

    def _begun(self, kind: Kind, command: Json) -> tuple[Kind, int]:
        """Find what a command cancels: by the file's id or, if it has none, by its name."""
        file_id, name = first(command, *IDS), first(command, *(CHILD_NAMES if kind == "child" else NAMES))
        return next(
            (kind, one.ordinal)
            for one in self.opened
            if one.kind == kind and (file_id in (one.file_id, one.name) if file_id else one.name == name)
        )

    def _issue(
        self, app: Orchestrator, ctx: WorkflowContext, command: Json, place: tuple[Kind, int]
    ) -> asyncio.Future[Any] | None:
        name = first(command, *NAMES)
        given = command.get("input", self.inputs.get(place))
        match command["type"]:
            case "ScheduleTask":
                return ctx.schedule(name, given)
            case "StartTimer":
                milliseconds = first(command, "duration_ms", default=1000)
                return ctx.sleep(milliseconds / 1000, name=first(command, "timer_id", default=""))
            case "CreatePromise":
                return ctx.promise(name)
            case "ScheduleChildWorkflow":
                return app.code_workflows[_child(command)].options(name=_child_name(command)).schedule(given)
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


async def _any_workflow(ctx: WorkflowContext, given: Any = None) -> Any: ...


def _anything(given: Any = None) -> Any: ...


def as_file_writes(command: commands.Command) -> Json:
    """Return a command with every field that a file may tell of it, under all its spellings."""
    match command:
        case commands.ScheduleTask(task=task):
            given = decode_value(task.payload)[0][0]
            return {"type": "ScheduleTask", "kind": task.name, "task_type": task.name, "input": given}
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
            given = decode_value(payload)[0][0]
            names = dict.fromkeys(("name", "workflow_name", "workflowName", "childWorkflowName"), name)
            kinds = dict.fromkeys(("kind", "workflow_kind", "workflowKind", "childWorkflowKind"), workflow)
            return {"type": "ScheduleChildWorkflow", **names, **kinds, "input": given}
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
