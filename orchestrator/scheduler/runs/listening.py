"""Who waits for an event, in which order they are asked, and how many of them in one tick.

Whether a workflow starts by an event is for its filter to say, and one of thousands that wait for the same event may
have an expensive one. So they are asked in an order, those without a filter first, as far as a tick has time; how far
it has come stays with the event, and the next tick goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from orchestrator.domain.dag.definition import EventTrigger
from orchestrator.domain.dag.scope import ENOUGH_WORK
from orchestrator.scheduler.budget import TickBudget

_MOST_WORK = 2 * ENOUGH_WORK
"""After expressions that cost so much together, whoever else listens is asked in the next tick."""

Position = tuple[bool, str, int]
"""A place in the order of listeners: whether it has a filter, its workflow, and which of the triggers of that it is."""


class Posted(NamedTuple):
    """Something that happened: an event that was posted, or a run that ended."""

    id: bytes
    name: str | None
    """The event's name; None for the end of a run."""
    body: Any
    workflow: str | None = None
    state: str | None = None
    depth: int = -1
    """Of the run that ended: how many started each other before it."""
    root: bytes | None = None
    trace: str | None = None
    """What comes of it belongs to this span."""
    after: Position | None = None
    """The listener that was asked last, if some were in an earlier tick."""


class Listener(NamedTuple):
    """One of the triggers of a workflow."""

    workflow: str
    version: int
    place: int
    trigger: EventTrigger

    @property
    def position(self) -> Position:
        return self.trigger.filter is not None, self.workflow, self.place

    def name(self, event: Posted) -> bytes:
        """Return for whom the time is taken in which it is asked about an event."""
        return b"listener %b %d %b" % (event.id, self.place, self.workflow.encode())

    def is_for(self, event: Posted) -> bool:
        """Say whether it waits for such an event, whatever its filter says."""
        return self.trigger.event is not None or self.trigger.state in (event.state, "ended")


class Listeners:
    """All that wait for events, and for ends of runs, in their order."""

    def __init__(self, found: Iterable[Listener] = ()) -> None:
        self._for_events: dict[str, list[Listener]] = {}
        self._for_ends: dict[str | None, list[Listener]] = {}
        for listener in sorted(found, key=lambda one: one.position):
            if listener.trigger.event is not None:
                self._for_events.setdefault(listener.trigger.event, []).append(listener)
            else:
                self._for_ends.setdefault(listener.trigger.workflow, []).append(listener)

    def are_for_end(self, workflow: str | None, state: str) -> bool:
        """Say whether anybody waits for a run of a workflow that ends like this."""
        return any(one.trigger.state in (state, "ended") for one in self._for_ends.get(workflow, ()))

    def _of(self, event: Posted) -> Sequence[Listener]:
        if event.name is not None:
            return self._for_events.get(event.name, ())
        return self._for_ends.get(event.workflow, ())

    def in_turn(
        self, budget: TickBudget, posted: Sequence[Posted], left: dict[int, Position | None]
    ) -> Iterator[tuple[Posted, Listener]]:
        """Yield who is to be asked about what, as long as there is time; the first is asked however little there is.

        In `left` stand the places of events about which not all have been asked, and who was asked last.
        """
        for place, event in enumerate(posted):
            last = event.after
            for listener in self._of(event):
                if not listener.is_for(event) or (event.after is not None and listener.position <= event.after):
                    continue
                if budget.asked and not _has_room(budget, event):
                    left[place] = last
                    break
                budget.asked += 1
                yield event, listener
                last = listener.position


def _has_room(budget: TickBudget, event: Posted) -> bool:
    """Say whether one more may be asked in this tick."""
    if budget.asked >= budget.slice or budget.asking_cost > _MOST_WORK or budget.is_spent:
        return False
    return budget.has_room_for_data(event.root or event.id)
