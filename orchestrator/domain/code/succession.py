"""What a run that continues as new leaves to the run in which it goes on.

Whatever people say to a run is for its code to hear, and the code is gone once it has continued. So everything that it
had not been shown by then (`ContinueRun.seen`) is said again to the successor, in the same order: requests to cancel,
also because its time is up or its parent has ended, updates, and what became of promises. Signals are kept until the
code takes them, so of those it is the ones that were not taken. An update that the code was shown is its own to answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.domain.code import history
from orchestrator.domain.code.commands import ContinueRun
from orchestrator.domain.code.history import Event, Fact, PromiseSettled

SAID = (history.UpdateRequested, history.RunCancelRequested)
"""Facts that hold for whichever run goes on."""


class CarriedOver(NamedTuple):
    """The beginning of the successor."""

    facts: list[Fact]
    """Shown to its code after its beginning."""
    settled: list[PromiseSettled]
    """Answers to promises that the code waited for and has not seen; `id` is the promise's in the old run."""


def carried_over(events: Iterable[Event], command: ContinueRun) -> CarriedOver:
    """Return what a run leaves, from those of its events that are signals, or that it has not been shown."""
    left = dict(command.signals)
    facts: list[Fact] = []
    settled: list[PromiseSettled] = []
    for event in events:
        what = event.what
        if isinstance(what, history.SignalReceived):
            left[what.name] = left.get(what.name, 0) - 1
            if left[what.name] < 0:
                facts.append(what)
        elif event.number <= command.seen:
            continue
        elif isinstance(what, SAID):
            facts.append(what)
        elif isinstance(what, PromiseSettled):
            settled.append(what)
    return CarriedOver(facts, settled)


def ignores_cancel(events: Iterable[Event], command: ContinueRun, began_at: float) -> bool:
    """Say whether a run continues that began with a request to cancel itself, and never waited to hear of it.

    Its successor would do the same, and could never be cancelled: so that one is ended without its code.
    """
    return command.seen == 1 and any(
        event.at <= began_at and isinstance(event.what, history.RunCancelRequested) for event in events
    )


def with_seen(command: ContinueRun, through: int) -> ContinueRun:
    """Return the command of a worker that does not say what its code was shown: everything that it was sent."""
    return command if command.seen else ContinueRun(command.payload, command.signals, through)
