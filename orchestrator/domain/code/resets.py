"""Reset: a new run repeats another run up to one of its events, and continues on its own from there.

    old run   1 … to │ to + 1 …                                   unchanged
    new run   1 … to │ run_reset │ messages to the old run after `to` │ its own events

**The copy** has the same facts with the same times and numbers, so that the code repeats its actions, and the markers
tell which of them are repetitions. Ids are those of the new run, derived from kind and ordinal as usual.

**Open work** at `to` belongs to the old run, so the new run cannot wait for it. The record of an open task, timer or
child is replaced by `Reopened`. The command then has no record, so the code issues it again. A timer keeps its due
time, because it counts from the time of the old record. A promise needs no work: it is open in the new run from the
start. A detached child outlives the old run, so the new run takes it over. Work that the code had cancelled stays
cancelled.

**Messages** to the old run after `to` are repeated right after the marker: signals, updates that were not refused, and
answers to promises that were open at `to`. Cancel requests are not repeated. Stored answers to promises that the code
never created are kept for the new run, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.commands import Kind, command_id
from orchestrator.domain.code.history import Event, Fact, HistoryItem
from orchestrator.domain.code.other_runs import Target, is_wait
from orchestrator.domain.ids import successor_id, to_text
from orchestrator.errors import WrongState

Created = history.TaskScheduled | history.TimerStarted | history.PromiseCreated | history.ChildStarted
"""Records of tasks, timers, promises and children."""
Cancelled = (
    history.TaskCancelRequested | history.TimerCancelled | history.PromiseCancelled | history.ChildCancelRequested
)
EndFact = history.Outcome | history.TimerFired | history.PromiseSettled
"""Facts that report the end of a task, timer, promise or child."""
T = TypeVar("T", bound=HistoryItem)

_KINDS: dict[type, Kind] = {
    history.TaskScheduled: "task",
    history.TimerStarted: "timer",
    history.PromiseCreated: "promise",
    history.ChildStarted: "child",
    history.SignalSent: "signal",
}


class ResetBeginning(NamedTuple):
    """The start of the new run."""

    copy: list[Event]
    """The first events of its history, up to the marker."""
    facts: list[Fact]
    """The next facts to append."""
    promises: list[history.PromiseCreated]
    """Promises that are open in the new run."""
    settled: list[str]
    """Names of promises that are no longer open."""
    handed_over: dict[bytes, bytes]
    """Detached children whose end the old run has not learned: their ids in the old and the new run."""

    @property
    def shown(self) -> int:
        """The number of the last event that the code had been shown, according to the markers."""
        marks = (event.what for event in self.copy if isinstance(event.what, history.ActivationApplied))
        return max((mark.through for mark in marks), default=0)


class Cut:
    """A history cut after one of its events, and what was open there."""

    def __init__(self, run: bytes, events: Sequence[Event], to: int) -> None:
        check(run, events, to)
        self.past, self.later = events[:to], events[to:]
        ended = {event.what.id for event in self.past if isinstance(event.what, EndFact)}
        cancelled = {event.what.id for event in self.past if isinstance(event.what, Cancelled)}
        self.reopened: set[bytes] = set()
        """Ids of commands that the code issues again."""
        self.waiting: dict[bytes, history.PromiseCreated] = {}
        """The promises open at the cut, by id."""
        self.followed: dict[bytes, history.ChildStarted] = {}
        """Children that are not started again, but whose end the code may await."""
        for event in self.past:
            what = event.what
            if not isinstance(what, Created) or what.id in ended:
                continue
            if isinstance(what, history.ChildStarted) and (what.detached or what.id in cancelled):
                self.followed[what.id] = what
            elif what.id in cancelled:
                continue
            elif isinstance(what, history.PromiseCreated):
                self.waiting[what.id] = what
            else:
                self.reopened.add(what.id)
        sent = {event.what.id: event for event in events if isinstance(event.what, history.SignalSent)}
        self.sent = {id for id in sent if id is not None}
        """Signals whose sender waits for the outcome."""
        self.undelivered = {id for id in self.sent if sent[id].number <= to and id not in ended}
        """Signals sent before the cut whose outcome was reported after it."""
        self.refused = {
            event.what.id
            for event in self.later
            if isinstance(event.what, history.UpdateAnswered) and event.what.error is not None
        }
        """Updates that were answered with an error."""

    def facts_after(self) -> list[Fact]:
        """Return the facts after the cut that apply to the new run, too, with ids of the old run."""
        facts: list[Fact] = []
        for event in self.later:
            match event.what:
                case history.SignalReceived() as fact:
                    facts.append(fact)
                case history.UpdateRequested(id=id) as fact if id not in self.refused:
                    facts.append(fact)
                case history.PromiseResolved(id=id) | history.PromiseRejected(id=id) as fact:
                    if id in self.waiting or id in self.undelivered:
                        facts.append(fact)
                case history.ChildCompleted(id=id) | history.ChildFailed(id=id) | history.ChildCancelled(id=id) as fact:
                    if id in self.followed:
                        facts.append(fact)
        return facts


def allowed(events: Sequence[Event]) -> list[int]:
    """Return the events to which a run can be reset: those not within a batch of commands, and before its end."""
    numbers: list[int] = []
    for position, event in enumerate(events, 1):
        if isinstance(event.what, history.EndRecord):
            break
        if position == len(events) or not isinstance(events[position].what, history.Record):
            numbers.append(event.number)
    return numbers


def check(run: bytes, events: Sequence[Event], to: int) -> None:
    """Raise WrongState if a run cannot be reset to an event, and name the nearest possible events."""
    possible = allowed(events)
    if to in possible:
        return
    start = f"Run {to_text(run)} cannot be reset to event {to}: "
    if not 1 <= to <= len(events):
        raise WrongState(f"{start}its events are numbered 1 to {len(events)}.")
    lower = max(number for number in possible if number < to)
    upper = min((number for number in possible if number > to), default=None)
    if upper is None:
        raise WrongState(f"{start}the code ended the run there. The last event that it can be reset to is {lower}.")
    raise WrongState(
        f"{start}that event is inside a batch of commands, which is kept whole or not at all. Reset it to event "
        f"{lower} or {upper}."
    )


def reset(run: bytes, events: Sequence[Event], new: bytes, to: int, now: float, reason: str = "") -> ResetBeginning:
    """Return the start of the run `new`, which repeats `run` up to event `to`."""
    if any(isinstance(event.what, history.EndRecord) for event in events):
        events = [msgspec.structs.replace(event, what=_delivered(event.what)) for event in events]
    cut = Cut(run, events, to)
    ids = {run: new} | {
        event.what.id: command_id(new, kind_of(event.what), event.what.ordinal)
        for event in cut.past
        if isinstance(event.what, Created | history.SignalSent) and event.what.id is not None
    }
    copy = [Event(event.number, event.at, _copied(event.what, run, ids, cut.reopened)) for event in cut.past]
    copy.append(Event(to + 1, now, history.RunReset(run, to, reason)))
    repeated = cut.facts_after()
    settled_ids = {fact.id for fact in repeated if isinstance(fact, EndFact)}
    facts = [_with_new_ids(fact, ids) for fact in repeated]
    created = [event.what for event in cut.past if isinstance(event.what, history.PromiseCreated)]
    unfinished = {child: what for child, what in cut.followed.items() if child not in settled_ids}
    facts += [history.ChildCancelled(ids[child]) for child, what in unfinished.items() if not what.detached]
    return ResetBeginning(
        copy,
        facts,
        [
            msgspec.structs.replace(promise, id=ids[promise.id])  # a wait continues for the existing child
            for promise in cut.waiting.values()
            if promise.id not in settled_ids
        ],
        sorted({promise.name for promise in created if promise.id not in cut.waiting or promise.id in settled_ids}),
        {child: ids[child] for child, what in unfinished.items() if what.detached},
    )


def _copied(what: HistoryItem, run: bytes, ids: dict[bytes, bytes], reopened: set[bytes]) -> HistoryItem:
    if isinstance(what, history.RunStarted):
        first = what.first or run if ids[run] == successor_id(run) else None
        return msgspec.structs.replace(what, origin=what.origin or run, first=first)
    if isinstance(what, Created) and what.id in reopened:
        return history.Reopened(f"{kind_of(what)} {what.ordinal} {what.name}".rstrip())
    return _with_new_ids(what, ids)


def _with_new_ids(what: T, ids: Mapping[bytes, bytes]) -> T:
    """Replace ids of the old run by ids of the new run. Updates keep their ids."""
    if isinstance(what, history.PromiseCreated) and is_wait(what.name):  # for a child, or the run itself
        target = Target.of_wait(what.name)
        name = target._replace(run=ids.get(target.run, target.run)).wait
        return msgspec.structs.replace(what, id=ids[what.id], name=name)
    if isinstance(what, (Created, Cancelled, EndFact)):
        return msgspec.structs.replace(what, id=ids.get(what.id, what.id))
    if isinstance(what, history.SignalSent):  # the signal may be to the run itself
        return msgspec.structs.replace(what, run=ids.get(what.run, what.run), id=ids.get(what.id or b""))
    return what


def _delivered(what: HistoryItem) -> HistoryItem:
    """Return a signal of an ended run without the run to start: unseen signals have already started it."""
    return msgspec.structs.replace(what, otherwise=None) if isinstance(what, history.SignalReceived) else what


def kind_of(record: Created | history.SignalSent) -> Kind:
    """Return the kind of command that a record belongs to."""
    return _KINDS[type(record)]


# -- previews of resets


class Fate(StrEnum):
    """The effect of a reset on something in the old run."""

    KEPT = "is kept"
    AGAIN = "was open, and is repeated"
    MAYBE = "came later, and is repeated if the code reaches it"
    OPEN = "stays open"
    GOES_ON = "continues, and is adopted by the new run"
    LEFT = "continues on its own; the code may start another"
    TOLD = "is delivered again"
    ANEW = "came later, and must be settled again"
    DROPPED = "is dropped"


class PreviewLine(NamedTuple):
    """A number of objects of the same kind and name that have the same fate."""

    number: int
    what: str
    fate: Fate


def preview(run: bytes, events: Sequence[Event], to: int) -> list[PreviewLine]:
    """Return the effects of a reset to an event, without doing it. Raises WrongState if it is impossible."""
    cut = Cut(run, events, to)
    names = {event.what.id: _named(event.what) for event in events if isinstance(event.what, Created)}
    settled = {fact.id for fact in cut.facts_after() if isinstance(fact, EndFact)}
    fates: Counter[tuple[str, Fate]] = Counter()
    for event in cut.past:
        fate = _past(event.what, cut, settled)
        if fate is not None:
            fates[_named(event.what), fate] += 1
    for event in cut.later:
        fate = _later(event.what, cut)
        if fate is not None:
            about = names[event.what.id] if isinstance(event.what, EndFact) else _named(event.what)
            fates[about, fate] += 1
    order = list(Fate)
    return [PreviewLine(fates[key], *key) for key in sorted(fates, key=lambda key: (order.index(key[1]), key[0]))]


def _past(what: HistoryItem, cut: Cut, settled: set[bytes]) -> Fate | None:
    """Return the fate of a record up to the cut. If a later fact settles the object, that fact is listed instead."""
    if isinstance(what, (history.OperationRecorded, history.SignalSent)):
        return Fate.KEPT
    if not isinstance(what, Created) or what.id in settled:
        return None
    if what.id in cut.reopened:
        return Fate.AGAIN
    if what.id in cut.waiting:
        return Fate.OPEN
    return Fate.GOES_ON if what.id in cut.followed and cut.followed[what.id].detached else Fate.KEPT


def _later(what: HistoryItem, cut: Cut) -> Fate | None:
    match what:
        case history.SignalReceived():
            return Fate.TOLD
        case history.UpdateRequested(id=id):
            return Fate.DROPPED if id in cut.refused else Fate.TOLD
        case history.PromiseResolved(id=id) | history.PromiseRejected(id=id) if id not in cut.sent:
            return Fate.TOLD if id in cut.waiting else Fate.ANEW
        case history.ChildCompleted(id=id) | history.ChildFailed(id=id) | history.ChildCancelled(id=id):
            return Fate.TOLD if id in cut.followed else None
        case history.RunCancelRequested():
            return Fate.DROPPED
        case history.ChildStarted(detached=True):
            return Fate.LEFT
        case history.TaskScheduled() | history.ChildStarted() | history.OperationRecorded() | history.SignalSent():
            return Fate.MAYBE
        case _:
            return None


def _named(what: HistoryItem) -> str:
    match what:
        case history.OperationRecorded(name=name):
            return f"operation {name}"
        case history.SignalReceived(name=name):
            return f"signal {name}"
        case history.SignalSent(name=name):
            return f"signal {name} to another run"
        case history.UpdateRequested(name=name):
            return f"update {name}"
        case history.RunCancelRequested():
            return "request to cancel"
        case _:
            assert isinstance(what, Created)
            return f"{kind_of(what)} {what.name}".rstrip()
