"""The ledger of a run: what its code commands, held against what its history records.

On replay the code commands again what it commanded before. The n-th command of a kind meets the n-th record of that
kind: if they agree, nothing happens, for it was applied long ago; if they do not, the code no longer fits. A command
without a record is progress, and goes into the next batch. A record without a command is allowed in a live run,
whose code may have become shorter; a strict `replay` refuses it. But code that raises where it went on before does not
fit: a deploy never fails a run.

Cancelling is the one thing that is not counted: `CancelTimer` and its like name what they cancel, and answers to
updates name the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NoReturn, get_args

from orchestrator.domain import timezones
from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Violation
from orchestrator.domain.code.commands import Command, Kind
from orchestrator.domain.code.history import Event, Record
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import DeterminismViolation

_LONGEST_DIFFERENCE = 60
_LONGEST_VALUE = 200
_FACTS = get_args(history.Fact)

Claim = tuple[Kind, int, dict[str, str]]
"""A kind, an ordinal, and what must be the same on both sides: a field as people call it, and its value."""


class Ledger:
    """Counts commands, compares them with records, and collects those that are new."""

    def __init__(self, run_id: bytes) -> None:
        self._run = run_id
        self._counts: dict[Kind, int] = {}
        self._records: dict[tuple[Kind, int], tuple[int, Record]] = {}
        """Records that the code has not come to yet, with their event's number."""
        self._named: dict[bytes | str, tuple[int, Record]] = {}
        """Ids that were cancelled or answered, and names of patches: records without ordinals."""
        self._batch: list[Command] = []
        self._expected: list[str] = []
        self._commanded: list[str] = []
        self.shown = 0
        """The number of the last event that the code had been shown when its last batch was applied."""
        self.went_on = 0
        """The number of the last event after which the code is known to have gone on."""
        self.has_answers = False
        """The history has updates that were answered."""
        self.accepted: set[str] = set()
        """Ids of updates that were accepted in a turn in which they were not answered."""
        self.refusals = 0
        """How many ends of the code were refused after the last turn that counts."""
        self.together: dict[int, list[Event]] = {}
        """Facts, by number, that the code is shown at once with others, because it had ended too early."""
        self.is_copy = False
        """The history is that of a run that was reset: records of what was open are left out of it."""
        self.reopened: dict[str, float] = {}
        """In such a copy, what was open, such as `timer 3`, and the time of its first record."""
        self.violation: Violation | None = None
        self.end: Record | None = None
        """How the run ended, according to the history."""
        self.exactly = False
        """Compare values, state and waits as well: whether the code does the same thing twice."""
        self.in_order = False
        """Compare the order of commands of different kinds as well."""
        self._last = 0, ""
        """The number of the latest record that a command has met, and its line."""
        self.trace: list[Command] | None = None
        """Every command, new or not; only if a list was put here."""

    def learn(self, events: Iterable[Event]) -> None:
        """Take in the records and marks of a whole history, before any code runs."""
        joined: dict[int, int] = {}
        for event in events:
            what = event.what
            if isinstance(what, history.ActivationApplied):
                if what.ended:
                    joined[what.ended] = event.number
                    self.refusals += 1
                    continue
                self.refusals = 0
                self.went_on, self.shown = self.shown, max(self.shown, what.through)
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
            elif (claim := _claim(what)) is not None:
                self._records[claim[:2]] = event.number, what  # type: ignore[assignment]  # a fact makes no claim
                self._expected.append(_line(claim))
        if self.end is None:
            self.went_on = self.shown
        if joined:
            self._join(events, joined)

    def _join(self, events: Iterable[Event], joined: Mapping[int, int]) -> None:
        """Put facts together: those from one at which the code ended too early, up to the mark that says so."""
        group: list[Event] = []
        until = 0
        for event in events:
            if not isinstance(event.what, _FACTS):
                continue
            if event.number > until:
                group = []
            until = max(until, joined.get(event.number, 0))
            if event.number < until:
                group.append(event)
                self.together[event.number] = group

    def next(self, kind: Kind) -> tuple[int, bytes]:
        """Count one more command of a kind; return its ordinal and the id of what it creates."""
        ordinal = self._counts[kind] = self._counts.get(kind, 0) + 1
        return ordinal, commands.command_id(self._run, kind, ordinal)

    def issue(self, command: Command) -> Record | None:
        """Take a command from the code; return its record if it was applied before."""
        self._note(command)
        if not self._records:
            self._batch.append(command)
            return None
        claim = _claim(history.record(command))
        assert claim is not None, command
        self._commanded.append(_line(claim))
        found = self._records.pop(claim[:2], None)
        if found is None:
            self._batch.append(command)
            return None
        number, record = found
        self._compare(number, claim, record)
        if self.in_order and claim[0] != "operation":  # operations are recorded as they end
            self._compare_order(number, claim)
        self._compare_arguments(number, claim, history.record(command), record)
        self._compare_values(number, _line(claim), history.record(command), record)
        if not self._records:
            self._expected.clear()
            self._commanded.clear()
        return record

    def issue_once(self, command: Command, key: bytes | str) -> None:
        """Take a command that has no ordinal but names what it is about."""
        self._note(command)
        found = self._named.pop(key, None)
        if found is None:
            self._batch.append(command)
        elif isinstance(command, commands.AnswerUpdate):
            if command.error is not None:
                self._compare_answer(*found, command.error)
            self._compare_values(found[0], "answer to an update", history.record(command), found[1])

    def issue_end(self, command: commands.EndCommand, number: int) -> None:
        """Take the last command of all, which the code gives when it has been shown event `number`."""
        self._note(command)
        if isinstance(command, commands.FailRun) and number <= self.went_on:
            self.violate_by_raising(number, command.error)
        if self.end is None:
            self._batch.append(command)
        elif type(history.record(command)) is not type(self.end):
            expected, found = type(self.end).__name__, type(history.record(command)).__name__
            self.violate(0, "RunEndMismatch", f"Run end mismatch: history has {expected} and the code says {found}.")
        else:
            self._compare_values(0, "end of the run", history.record(command), self.end)

    def is_patched(self, name: str) -> bool:
        """Say whether the history records that the run took the new branch of a change."""
        return name in self._named

    def answer(self, update: bytes) -> history.UpdateAnswered | None:
        """Return the recorded answer to an update, if the code has not come to it."""
        record = self._named.get(update, (0, None))[1]
        return record if isinstance(record, history.UpdateAnswered) else None

    def check_answered(self, update: history.UpdateRequested, kind: Kind, ordinal: int) -> None:
        """Refuse a command of an update's handler that gave its answer without it: it would act again."""
        number, record = self._named.get(update.id, (0, None))
        if not was_handled(record) or self.is_copy or (kind, ordinal) in self._records:
            return
        self._commanded.append(f"{kind} {ordinal}, by update {update.name}")
        self.violate(
            number,
            "UpdateMismatch",
            f"Update mismatch at {kind} {ordinal} (event {number}): the history has the answer to update "
            f"{update.name!r} without it, and the code gives it. What a handler has answered it does not do again.",
        )

    def operation(self, ordinal: int, name: str) -> history.OperationRecorded | None:
        """Return what the `ordinal`-th operation gave when it was run, or None if it never was."""
        if ("operation", ordinal) not in self._records:
            return None
        record = self._records["operation", ordinal][1]
        assert isinstance(record, history.OperationRecorded)
        self.issue(commands.RecordOperation(ordinal, name, record.result, record.error))
        return record

    def check_met(self) -> None:
        """Refuse code that has not given every command of the history that it was shown.

        A copy is exempt: what was open in it is done again by other code.
        """
        answers = (found for found in self._named.values() if isinstance(found[1], history.UpdateAnswered))
        left = sorted((*self._records.values(), *answers), key=lambda found: found[0])
        if not left or self.is_copy:
            return
        number, record = left[0]
        claim = _claim(record)
        self.violate(
            number,
            "CommandMissing",
            f"Command missing at {'an answer to an update' if claim is None else _line(claim)} (event {number}): "
            f"the history has it, and the code does not give it any more.",
        )

    def withdraw(self, command: commands.StartTimer) -> bool:
        """Take a timer back that has not left yet; False if it has."""
        for place in range(len(self._batch) - 1, -1, -1):
            if self._batch[place] is command:
                del self._batch[place]
                if self.trace is not None:
                    self.trace.remove(command)
                return True
        return False

    def take(self) -> list[Command]:
        """Return the new commands, in order, and start the next batch."""
        batch, self._batch = self._batch, []
        return batch

    def _note(self, command: Command) -> None:
        if self.trace is not None:
            self.trace.append(command)

    def _compare(self, number: int, claim: Claim, record: Record) -> None:
        recorded = _claim(record)
        assert recorded is not None
        kind, ordinal, fields = claim
        for field, found in fields.items():
            expected = recorded[2][field]
            if found == expected or (kind == "timer" and not (found and expected)):  # a name may be added or dropped
                continue
            del self._expected[self._expected.index(_line(recorded)) + 1 :]  # what follows is not the code's fault
            self.violate(
                number,
                f"{field.title().replace(' ', '')}Mismatch",
                f"{field} mismatch at {kind} {ordinal} (event {number}): "
                f"history has {expected!r} and the code says {found!r}.",
            )

    def violate_by_raising(self, number: int, error: TaskError) -> NoReturn:
        """Remember that the code raises where, according to the history, it went on."""
        self.violate(
            number,
            "RunEndMismatch",
            f"Run end mismatch (event {number}): the history has the code go on, and the code raises "
            f"{error.kind}: {error.message}",
            error.traceback,
        )

    def _compare_answer(self, number: int, record: Record, error: TaskError) -> None:
        """Compare an update that is refused, or has failed, with its recorded answer."""
        assert isinstance(record, history.UpdateAnswered)
        if record.error is None:
            self.violate(
                number,
                "UpdateAnswerMismatch",
                f"Update answer mismatch (event {number}): the history has a result, and the code raises "
                f"{error.kind}: {error.message}",
                error.traceback,
            )

    def _compare_order(self, number: int, claim: Claim) -> None:
        """Refuse a command whose record stands before that of a command that the code has given before it."""
        last, before = self._last
        if number < last:
            self.violate(
                number,
                "OrderMismatch",
                f"Order mismatch at {_line(claim)} (event {number}): the history has it before {before} "
                f"(event {last}), and the code gives it afterwards.",
            )
        self._last = number, _line(claim)

    def _compare_arguments(self, number: int, claim: Claim, made: Record, record: Record) -> None:
        """Compare what is passed to a task or a child, as far as both sides have a digest of it."""
        recorded, found = getattr(record, "digest", ""), getattr(made, "digest", "")
        if recorded and found and recorded != found:
            line = _line(claim)
            del self._expected[self._expected.index(line) + 1 :]
            self._commanded[-1] = f"{line}, with other arguments"
            self.violate(
                number,
                "ArgumentsMismatch",
                f"Arguments mismatch at {line} (event {number}): the code passes others than the history records. "
                f"Either it has changed, or what it does depends on something that is not in the history.",
            )

    def _compare_values(self, number: int, what: str, made: Record, record: Record) -> None:
        """Compare what else a command says, where that is wanted: a deploy may well change it."""
        expected, found = _value(record), _value(made)
        if self.exactly and found != expected:
            self.violate(
                number,
                "ValueMismatch",
                f"Value mismatch at {what} (event {number}): history has {_shown(expected)} and the code says "
                f"{_shown(found)}. What it does depends on something that is not in the history.",
            )

    def violate(self, number: int, kind: str, message: str, difference: str = "") -> NoReturn:
        """Remember that the code no longer fits its history, and stop it."""
        if self.violation is None:
            from difflib import unified_diff  # which code that fits its history does without

            lines = unified_diff(self._expected, self._commanded, "history", "code", lineterm="")
            difference = difference or "\n".join(islice(lines, _LONGEST_DIFFERENCE))
            self.violation = Violation(number, kind, message, difference)
        raise DeterminismViolation(self.violation.message, self.violation.event, self.violation.difference)


def was_handled(answer: Record | None) -> bool:
    """Say whether this is the answer of an update's handler, which has returned or failed."""
    return isinstance(answer, history.UpdateAnswered) and (answer.error is None or answer.error.phase == "failed")


_NAMED_RECORDS = (
    history.TaskCancelRequested,
    history.TimerCancelled,
    history.PromiseCancelled,
    history.ChildCancelRequested,
    history.UpdateAnswered,
)


def _claim(what: history.HistoryItem) -> Claim | None:
    """Return what a record says that is counted; None for all other events."""
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
    """Return what a record says beyond the names of things."""
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


def _shown(value: object) -> str:
    return repr(timezones.decode(value) if isinstance(value, bytes) else value)[:_LONGEST_VALUE]


def _line(claim: Claim) -> str:
    kind, ordinal, fields = claim
    return " ".join([kind, str(ordinal), *dict.fromkeys(filter(None, fields.values()))])
