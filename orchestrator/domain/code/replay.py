"""The ledger of a run compares the commands of its code with the records of its history.

During replay, the code issues its commands again. The n-th command of a kind is compared with the n-th record of that
kind. If they match, the command was applied before and is dropped. If they differ, the code no longer fits its history.
A command without a record is progress, and is added to the next batch. A record without a command is allowed in a live
run, whose code may have become shorter; a strict `replay` rejects it. Code that raises where it continued before does
not fit, either: a deployment never fails a run.

Cancels and answers have no ordinals: `CancelTimer` and similar commands name what they cancel, and answers name their
update.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NoReturn

from orchestrator.domain import timezones
from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Violation
from orchestrator.domain.code.commands import Command, Kind
from orchestrator.domain.code.ends import Stage, stages
from orchestrator.domain.code.history import Event, Record
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import DeterminismViolation

_MAX_DIFFERENCE = 60
_MAX_VALUE = 200

_Identity = tuple[Kind, int, dict[str, str]]
"""Kind, ordinal, and the values that command and record must share, by their displayed names."""


class Ledger:
    """Counts the commands of the code, compares them with records, and collects new ones."""

    def __init__(self, run_id: bytes) -> None:
        self._run = run_id
        self._counts: dict[Kind, int] = {}
        self._records: dict[tuple[Kind, int], tuple[int, Record]] = {}
        """Records that no command has matched yet, with the numbers of their events."""
        self._named: dict[bytes | str, tuple[int, Record]] = {}
        """Records without ordinals, by the id that was cancelled or answered, or by the name of the patch."""
        self._batch: list[Command] = []
        self._expected: list[str] = []
        self._commanded: list[str] = []
        self.shown = 0
        """The number of the last event that the code had been shown when its last batch was applied."""
        self.continued_after = 0
        """The number of the last event after which the code is known to have continued."""
        self.has_answers = False
        """The history contains answers to updates."""
        self.accepted: set[str] = set()
        """Ids of updates that were accepted, but not answered in the same turn."""
        self.refusals = 0
        """The number of refused ends of the code since the last turn that counts."""
        self.merged_facts: dict[int, list[Stage]] = {}
        """By number, facts that the code is shown together with others because it had ended too early."""
        self.held: set[int] = set()
        """Ordinals of side effects whose results wait until the code has been shown the messages after them."""
        self.is_copy = False
        """The run was reset, and its history is a copy without records of what was open."""
        self.reopened: dict[str, float] = {}
        """In a copy, what was open, such as `timer 3`, and the time of its first record."""
        self.violation: Violation | None = None
        self.end: Record | None = None
        """How the run ended, according to the history."""
        self.compares_values = False
        """Also compare values, state and waits, to check that the code is deterministic."""
        self.in_order = False
        """Also compare the order of commands of different kinds."""
        self._last = 0, ""
        """The number of the last record that a command has matched, and its description."""
        self.trace: list[Command] | None = None
        """Every command, old or new, if set to a list."""

    def learn(self, events: Sequence[Event]) -> None:
        """Read the records and markers of a whole history, before any code runs."""
        any_refused = False
        for event in events:
            what = event.what
            if isinstance(what, history.ActivationApplied):
                if what.ended:
                    any_refused = True
                    self.refusals += 1
                    continue
                self.refusals = 0
                self.continued_after, self.shown = self.shown, max(self.shown, what.through)
                self.accepted.update(what.accepted)
            elif isinstance(what, history.RunReset):
                self.is_copy = True
            elif isinstance(what, history.Reopened):
                self.reopened.setdefault(" ".join(what.what.split(maxsplit=2)[:2]), event.at)
            elif isinstance(what, history.PatchRecorded):
                self._named[what.name] = event.number, what
            elif isinstance(what, _NAMED_RECORDS):
                self._named[what.id] = event.number, what
                self.has_answers = self.has_answers or isinstance(what, history.UpdateAnswered)
            elif isinstance(what, history.EndRecord):
                self.end = what
            elif (identity := _identity_of(what)) is not None:
                self._records[identity[:2]] = event.number, what  # type: ignore[assignment]  # a fact makes no claim
                self._expected.append(_describe(identity))
        if self.end is None:
            self.continued_after = self.shown
        if any_refused:
            self.merged_facts = stages(events)
            groups = {id(group): group for group in self.merged_facts.values()}.values()
            self.held = {stage.operation for group in groups for stage in group}

    def next(self, kind: Kind) -> tuple[int, bytes]:
        """Count one more command of a kind. Return its ordinal and the id of the object that it creates."""
        ordinal = self._counts[kind] = self._counts.get(kind, 0) + 1
        return ordinal, commands.command_id(self._run, kind, ordinal)

    def issue(self, command: Command) -> Record | None:
        """Accept a command of the code. Return its record if it was applied before."""
        self._trace(command)
        if not self._records:
            self._batch.append(command)
            return None
        identity = _identity_of(history.record(command))
        assert identity is not None, command
        self._commanded.append(_describe(identity))
        match = self._records.pop(identity[:2], None)
        if match is None:
            self._batch.append(command)
            return None
        number, record = match
        self._compare(number, identity, record)
        if self.in_order and identity[0] != "operation":  # operations are recorded as they end
            self._compare_order(number, identity)
        self._compare_arguments(number, identity, history.record(command), record)
        self._compare_values(number, _describe(identity), history.record(command), record)
        if not self._records:
            self._expected.clear()
            self._commanded.clear()
        return record

    def issue_once(self, command: Command, key: bytes | str) -> None:
        """Accept a command that has a name or id instead of an ordinal."""
        self._trace(command)
        match = self._named.pop(key, None)
        if match is None:
            self._batch.append(command)
        elif isinstance(command, commands.AnswerUpdate):
            if command.error is not None:
                self._compare_answer(*match, command.error)
            self._compare_values(match[0], "answer to an update", history.record(command), match[1])

    def issue_end(self, command: commands.EndCommand, number: int) -> None:
        """Accept the final command of the code, given after event `number`."""
        self._trace(command)
        if isinstance(command, commands.FailRun) and number <= self.continued_after:
            self.violate_by_raising(number, command.error)
        if self.end is None:
            self._batch.append(command)
        elif type(history.record(command)) is not type(self.end):
            expected, actual = type(self.end).__name__, type(history.record(command)).__name__
            self.violate(0, "RunEndMismatch", f"Run end mismatch: history has {expected} and the code says {actual}.")
        else:
            self._compare_values(0, "end of the run", history.record(command), self.end)

    def is_patched(self, name: str) -> bool:
        """Return whether the history records that the run took the new branch of a patch."""
        return name in self._named

    def answer(self, update: bytes) -> history.UpdateAnswered | None:
        """Return the recorded answer to an update that the code has not answered yet."""
        record = self._named.get(update, (0, None))[1]
        return record if isinstance(record, history.UpdateAnswered) else None

    def check_answered(self, update: history.UpdateRequested, kind: Kind, ordinal: int) -> None:
        """Reject a new command of an update's handler if the history has its answer without it."""
        number, record = self._named.get(update.id, (0, None))
        if not was_handled(record) or self.is_copy or (kind, ordinal) in self._records:
            return
        self._commanded.append(f"{kind} {ordinal}, by update {update.name}")
        self.violate(
            number,
            "UpdateMismatch",
            f"Update mismatch at {kind} {ordinal} (event {number}): the history has the answer to update "
            f"{update.name!r} without it, but the code issues it. A handler must not repeat what it did before it "
            f"answered.",
        )

    def operation(self, ordinal: int, name: str) -> history.OperationRecorded | None:
        """Return the recorded outcome of the `ordinal`-th operation, or None if it has not run."""
        if ("operation", ordinal) not in self._records:
            return None
        record = self._records["operation", ordinal][1]
        assert isinstance(record, history.OperationRecorded)
        self.issue(commands.RecordOperation(ordinal, name, record.result, record.error))
        return record

    def check_met(self) -> None:
        """Reject code that has not issued every command in the history.

        Copies are exempt: their open work is commanded again, perhaps by different code.
        """
        answers = (match for match in self._named.values() if isinstance(match[1], history.UpdateAnswered))
        unmatched = sorted((*self._records.values(), *answers), key=lambda match: match[0])
        if not unmatched or self.is_copy:
            return
        number, record = unmatched[0]
        identity = _identity_of(record)
        self.violate(
            number,
            "CommandMissing",
            f"Command missing at {'an answer to an update' if identity is None else _describe(identity)} "
            f"(event {number}): the history has it, but the code no longer issues it.",
        )

    def withdraw(self, command: commands.StartTimer) -> bool:
        """Remove a timer from the unsent batch. Return False if it was sent."""
        for index in range(len(self._batch) - 1, -1, -1):
            if self._batch[index] is command:
                del self._batch[index]
                if self.trace is not None:
                    self.trace.remove(command)
                return True
        return False

    def take(self) -> list[Command]:
        """Return the new commands in order, and start the next batch."""
        batch, self._batch = self._batch, []
        return batch

    def _trace(self, command: Command) -> None:
        if self.trace is not None:
            self.trace.append(command)

    def _compare(self, number: int, identity: _Identity, record: Record) -> None:
        recorded = _identity_of(record)
        assert recorded is not None
        kind, ordinal, fields = identity
        for field, actual in fields.items():
            expected = recorded[2][field]
            if actual == expected or (kind == "timer" and not (actual and expected)):  # names are optional
                continue
            del self._expected[self._expected.index(_describe(recorded)) + 1 :]  # later records are not to blame
            self.violate(
                number,
                f"{field.title().replace(' ', '')}Mismatch",
                f"{field} mismatch at {kind} {ordinal} (event {number}): "
                f"history has {expected!r} and the code says {actual!r}.",
            )

    def violate_by_raising(self, number: int, error: TaskError) -> NoReturn:
        """Record the violation that the code raises where it continued according to the history."""
        self.violate(
            number,
            "RunEndMismatch",
            f"Run end mismatch (event {number}): the history continues here, but the code raises "
            f"{error.kind}: {error.message}",
            error.traceback,
        )

    def _compare_answer(self, number: int, record: Record, error: TaskError) -> None:
        """Compare a refused or failed update with its recorded answer."""
        assert isinstance(record, history.UpdateAnswered)
        if record.error is None:
            self.violate(
                number,
                "UpdateAnswerMismatch",
                f"Update answer mismatch (event {number}): the history has a result, but the code raises "
                f"{error.kind}: {error.message}",
                error.traceback,
            )

    def _compare_order(self, number: int, identity: _Identity) -> None:
        """Reject a command whose record precedes the record of an earlier command."""
        last, previous = self._last
        if number < last:
            self.violate(
                number,
                "OrderMismatch",
                f"Order mismatch at {_describe(identity)} (event {number}): the history has it before {previous} "
                f"(event {last}), but the code issues it afterwards.",
            )
        self._last = number, _describe(identity)

    def _compare_arguments(self, number: int, identity: _Identity, issued: Record, record: Record) -> None:
        """Compare the arguments of a task or child, if both sides have a digest."""
        recorded, actual = getattr(record, "digest", ""), getattr(issued, "digest", "")
        if recorded and actual and recorded != actual:
            entry = _describe(identity)
            del self._expected[self._expected.index(entry) + 1 :]
            self._commanded[-1] = f"{entry}, with different arguments"
            self.violate(
                number,
                "ArgumentsMismatch",
                f"Arguments mismatch at {entry} (event {number}): the code passes different arguments from those in "
                f"the history. Either the code has changed, or it depends on something that is not in the history.",
            )

    def _compare_values(self, number: int, subject: str, issued: Record, record: Record) -> None:
        """Compare all other values of a command, if requested. A deployment may legitimately change them."""
        expected, actual = _value(record), _value(issued)
        if self.compares_values and actual != expected:
            self.violate(
                number,
                "ValueMismatch",
                f"Value mismatch at {subject} (event {number}): history has {_displayed(expected)} and the code says "
                f"{_displayed(actual)}. The code depends on something that is not in the history.",
            )

    def violate(self, number: int, kind: str, message: str, difference: str = "") -> NoReturn:
        """Record that the code does not fit its history, and stop the code."""
        if self.violation is None:
            from difflib import unified_diff  # imported late: only needed for violations

            lines = unified_diff(self._expected, self._commanded, "history", "code", lineterm="")
            difference = difference or "\n".join(islice(lines, _MAX_DIFFERENCE))
            self.violation = Violation(number, kind, message, difference)
        raise DeterminismViolation(self.violation.message, self.violation.event, self.violation.difference)


def was_handled(answer: Record | None) -> bool:
    """Return whether an answer comes from an update's handler, which returned or failed."""
    return isinstance(answer, history.UpdateAnswered) and (answer.error is None or answer.error.phase == "failed")


_NAMED_RECORDS = (
    history.TaskCancelRequested,
    history.TimerCancelled,
    history.PromiseCancelled,
    history.ChildCancelRequested,
    history.UpdateAnswered,
)


def _identity_of(what: history.HistoryItem) -> _Identity | None:
    """Return the kind, ordinal and compared values of a record, or None for other events."""
    match what:
        case history.TaskScheduled(ordinal=ordinal, name=name):
            return "task", ordinal, {"Task type": name}
        case history.TimerStarted(ordinal=ordinal, name=name):
            return "timer", ordinal, {"Timer name": name}
        case history.PromiseCreated(ordinal=ordinal, name=name):
            return "promise", ordinal, {"Promise name": name}
        case history.ChildStarted(ordinal=ordinal, workflow=workflow, name=name):
            return "child", ordinal, {"Child workflow kind": workflow, "Child workflow name": name}
        case history.OperationRecorded(ordinal=ordinal, name=name):
            return "operation", ordinal, {"Operation name": name}
        case history.StateSet(ordinal=ordinal, key=key):
            return "state", ordinal, {"State change": "set", "State key": key}
        case history.StateCleared(ordinal=ordinal, key=key):
            return "state", ordinal, {"State change": "clear", "State key": key}
        case history.SignalSent(ordinal=ordinal, run=run, name=name, key=key):
            return "signal", ordinal, {"Signal name": name, "Signalled run": key or to_text(run)}
        case _:
            return None


def _value(record: Record) -> object:
    """Return the value of a record beyond its names."""
    match record:
        case history.StateSet(value=data) | history.RunCompleted(result=data) | history.RunContinued(payload=data):
            return data
        case history.UpdateAnswered(result=data) if data is not None:
            return data
        case history.TimerStarted(seconds=seconds):
            return seconds
        case history.RunFailed(error=error):
            return error.kind
        case _:
            return None


def _displayed(value: object) -> str:
    return repr(timezones.decode(value) if isinstance(value, bytes) else value)[:_MAX_VALUE]


def _describe(identity: _Identity) -> str:
    kind, ordinal, fields = identity
    return " ".join([kind, str(ordinal), *dict.fromkeys(filter(None, fields.values()))])
