"""What a reset would do, for people who think about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from orchestrator.domain.code import history
from orchestrator.domain.code.history import Event, HistoryItem
from orchestrator.domain.code.resets import Created, Cut, EndFact, kind_of


class Fate(StrEnum):
    """What becomes of something that the old run has or had."""

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
    """Return the fate of what was recorded up to the cut; what a later fact settles is told of there."""
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
        case history.PromiseResolved(id=id) | history.PromiseRejected(id=id):
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
