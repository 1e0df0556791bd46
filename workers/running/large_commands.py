"""What the code of a workflow commands, if it is too large for a report: it goes to the payload store first.

Each value goes with whom it is for: the arguments of a child or a successor with that run, a signal with the run that
gets it, and all else with the run itself, for as long as that is there. The result is that of an attempt, like the
result of a task: if another attempt follows, it is nobody's.
"""

from __future__ import annotations

import msgspec

from orchestrator.domain.code import commands
from orchestrator.domain.code.commands import Command
from orchestrator.domain.ids import successor_id
from orchestrator.payloads.keeping import PayloadStore
from orchestrator.sdk.values.sealing import left_task

_replace = msgspec.structs.replace


def left_command(command: Command, store: PayloadStore, run: bytes, attempt: int) -> Command:
    """Return a command with its value in the store, if that is large; what people are shown of a run stays."""
    match command:
        case commands.ScheduleTask(task=task):
            return _replace(command, task=left_task(task, store))
        case commands.StartChildRun(id=child, payload=payload):
            return _replace(command, payload=store.arguments(payload, child, None))
        case commands.ContinueRun(payload=payload):
            return _replace(command, payload=store.arguments(payload, successor_id(run), None))
        case commands.SignalRun(run=target, value=value):
            return _replace(command, value=store.arguments(value, target, None))
        case commands.RecordOperation(result=bytes() as result):
            return _replace(command, result=store.arguments(result, run, None))
        case commands.CompleteRun(result=result):
            return _replace(command, result=store.result(result, run, run, attempt))
        case _:
            return command
