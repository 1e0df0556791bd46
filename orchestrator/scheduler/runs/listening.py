"""The workflows that wait for an event, in which order their filters are evaluated, and how many in one tick.

A filter decides whether an event starts a workflow, and one of thousands of filters may be expensive. So they are
evaluated in an order, workflows without a filter first, as far as a tick has time; the position is stored with the
event, and the next tick continues from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from orchestrator.domain.dag.definition import EventTrigger
from orchestrator.domain.dag.scope import ENOUGH_WORK
from orchestrator.scheduler.budget import TickBudget

_MOST_WORK = 2 * ENOUGH_WORK
"""After filters that cost this much together, the remaining ones are evaluated in the next tick."""

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
    """The span of the runs that it starts."""
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
        """Return the name under which the time of evaluating an event is counted."""
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
        """Say whether a workflow waits for a run that ends like this."""
        return any(one.trigger.state in (state, "ended") for one in self._for_ends.get(workflow, ()))

    def _of(self, event: Posted) -> Sequence[Listener]:
        if event.name is not None:
            return self._for_events.get(event.name, ())
        return self._for_ends.get(event.workflow, ())

    def in_turn(
        self, budget: TickBudget, posted: Sequence[Posted], left: dict[int, Position | None]
    ) -> Iterator[tuple[Posted, Listener]]:
        """Yield workflows and events to evaluate, as long as there is time; the first one in any case.

        `left` holds events for which some workflows are left, and the last workflow that was evaluated.
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
