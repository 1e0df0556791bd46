"""Reset: how a run begins that repeats another one up to one of its events, and goes on by itself from there.

    old run   1 … to │ to + 1 …                                   never touched
    new run   1 … to │ run_reset │ what people told the old run after `to` │ its own events

**The copy** has the same facts at the same times under the same numbers, so that the code does again what it did, and
knows by the marks how far that was done before. Ids are those of the new run, derived from kind and ordinal as ever.

**What was open** at `to` belongs to the old run, and is nothing that the new one could wait for. The record of a task,
a timer or a child is replaced by `Reopened`: a command without a record is progress, so the code commands it again,
and a timer is due when it was due, for it counts from the time of the record. A promise needs nobody's work: it is open
in the new run from the start. A detached child outlives the old run, so the new one takes it over instead of starting
another. What the code had cancelled by then stays cancelled.

**What people said** after `to` is said again, right behind the mark: signals, updates that were not refused, and what
became of promises that were open at `to`. Requests to cancel are not. What was said of promises that the code has never
made by the end is kept for the new run, too.
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
"""Records of what can be waited for."""
Cancelled = (
    history.TaskCancelRequested | history.TimerCancelled | history.PromiseCancelled | history.ChildCancelRequested
)
EndFact = history.Outcome | history.TimerFired | history.PromiseSettled
"""How that ended."""
T = TypeVar("T", bound=HistoryItem)

_KINDS: dict[type, Kind] = {
    history.TaskScheduled: "task",
    history.TimerStarted: "timer",
    history.PromiseCreated: "promise",
    history.ChildStarted: "child",
    history.SignalSent: "signal",
}


class ResetBeginning(NamedTuple):
    """How the new run begins."""

    copy: list[Event]
    """The beginning of its history, up to the mark."""
    facts: list[Fact]
    """The next event that it is shown."""
    promises: list[history.PromiseCreated]
    """Those that are open in it."""
    settled: list[str]
    """Names of promises that are not open any more."""
    handed_over: dict[bytes, bytes]
    """Detached children whose ends the old run never learnt: their ids there, and here."""

    @property
    def shown(self) -> int:
        """The last event that code has been shown before, as the marks say."""
        marks = (event.what for event in self.copy if isinstance(event.what, history.ActivationApplied))
        return max((mark.through for mark in marks), default=0)


class Cut:
    """A history that is cut behind one of its events, and what was open there."""

    def __init__(self, run: bytes, events: Sequence[Event], to: int) -> None:
        check(run, events, to)
        self.past, self.later = events[:to], events[to:]
        ended = {event.what.id for event in self.past if isinstance(event.what, EndFact)}
        cancelled = {event.what.id for event in self.past if isinstance(event.what, Cancelled)}
        self.reopened: set[bytes] = set()
        """The commands that the code gives again."""
        self.waiting: dict[bytes, history.PromiseCreated] = {}
        """Open promises."""
        self.followed: dict[bytes, history.ChildStarted] = {}
        """Children that are not started again, and whose ends the code may still wait for."""
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
        """Signals whose sender learns what became of them."""
        self.undelivered = {id for id in self.sent if sent[id].number <= to and id not in ended}
        """Those of which it learnt after the cut."""
        self.refused = {
            event.what.id
            for event in self.later
            if isinstance(event.what, history.UpdateAnswered) and event.what.error is not None
        }
        """Updates that were answered with a failure."""

    def facts_after(self) -> list[Fact]:
        """Return what happened after the cut and holds for the new run as well, with ids of the old one."""
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
    """Return the events that a run can be reset to: neither amid what its code commanded at once, nor its end."""
    found: list[int] = []
    for place, event in enumerate(events, 1):
        if isinstance(event.what, history.EndRecord):
            break
        if place == len(events) or not isinstance(events[place].what, history.Record):
            found.append(event.number)
    return found


def check(run: bytes, events: Sequence[Event], to: int) -> None:
    """Refuse an event that a run cannot be reset to, and name those that come nearest."""
    possible = allowed(events)
    if to in possible:
        return
    start = f"Run {to_text(run)} cannot be reset to event {to}: "
    if not 1 <= to <= len(events):
        raise WrongState(f"{start}its events have the numbers 1 to {len(events)}.")
    before = max(number for number in possible if number < to)
    after = min((number for number in possible if number > to), default=None)
    if after is None:
        raise WrongState(f"{start}there the code ended it. The last one that it can be reset to is {before}.")
    raise WrongState(
        f"{start}it is amid what the code commanded at once, which is kept as a whole or not at all. "
        f"Reset it to event {before} or {after}."
    )


def reset(run: bytes, events: Sequence[Event], new: bytes, to: int, now: float, reason: str = "") -> ResetBeginning:
    """Return how the run `new` begins that repeats `run` up to event `to`."""
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
    again = cut.facts_after()
    known = {fact.id for fact in again if isinstance(fact, EndFact)}
    facts = [_renamed(fact, ids) for fact in again]
    made = [event.what for event in cut.past if isinstance(event.what, history.PromiseCreated)]
    lost = {child: what for child, what in cut.followed.items() if child not in known}
    facts += [history.ChildCancelled(ids[child]) for child, what in lost.items() if not what.detached]
    return ResetBeginning(
        copy,
        facts,
        [
            msgspec.structs.replace(promise, id=ids[promise.id])  # a wait goes on for the child that there is
            for promise in cut.waiting.values()
            if promise.id not in known
        ],
        sorted({promise.name for promise in made if promise.id not in cut.waiting or promise.id in known}),
        {child: ids[child] for child, what in lost.items() if what.detached},
    )


def _copied(what: HistoryItem, run: bytes, ids: dict[bytes, bytes], reopened: set[bytes]) -> HistoryItem:
    if isinstance(what, history.RunStarted):
        first = what.first or run if ids[run] == successor_id(run) else None
        return msgspec.structs.replace(what, origin=what.origin or run, first=first)
    if isinstance(what, Created) and what.id in reopened:
        return history.Reopened(f"{kind_of(what)} {what.ordinal} {what.name}".rstrip())
    return _renamed(what, ids)


def _renamed(what: T, ids: Mapping[bytes, bytes]) -> T:
    """Give what belonged to the old run its id in the new one; an update has an id of its own."""
    if isinstance(what, history.PromiseCreated) and is_wait(what.name):  # it may be for a child, or for itself
        target = Target.of_wait(what.name)
        name = target._replace(run=ids.get(target.run, target.run)).wait
        return msgspec.structs.replace(what, id=ids[what.id], name=name)
    if isinstance(what, (Created, Cancelled, EndFact)):
        return msgspec.structs.replace(what, id=ids.get(what.id, what.id))
    if isinstance(what, history.SignalSent):  # it may have been to itself
        return msgspec.structs.replace(what, run=ids.get(what.run, what.run), id=ids.get(what.id or b""))
    return what


def _delivered(what: HistoryItem) -> HistoryItem:
    """Return an event of a run that has ended: signals that it was not shown have started another run by then."""
    return msgspec.structs.replace(what, otherwise=None) if isinstance(what, history.SignalReceived) else what


def kind_of(record: Created | history.SignalSent) -> Kind:
    """Return what kind of thing a record created or sent."""
    return _KINDS[type(record)]


# -- previews: what a reset would do


class Fate(StrEnum):
    """The fate of something that the old run has or had."""

    KEPT = "is kept"
    AGAIN = "was open, and is done again"
    MAYBE = "came later, and is done again if the code comes there"
    OPEN = "stays open"
    GOES_ON = "goes on, and is taken over"
    LEFT = "goes on by itself; the code may start another"
    TOLD = "is told again"
    ANEW = "came later, and has to be settled anew"
    DROPPED = "is dropped"


class PreviewLine(NamedTuple):
    """So many things of a kind and name have the same fate."""

    number: int
    what: str
    fate: Fate


def preview(run: bytes, events: Sequence[Event], to: int) -> list[PreviewLine]:
    """Return what would become of everything if a run were reset to an event; WrongState if it cannot be."""
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
    """Return the fate of what was recorded up to the cut; what a later fact settles is listed there."""
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
