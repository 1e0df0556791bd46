"""The steps of a workflow, and which follow which."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable

from orchestrator.domain.dag.definition import Definition, EventTrigger, Step


class Graph:
    """A definition, compiled for planning; shared by all runs of it."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.steps = definition.steps
        self.index = {step.name: place for place, step in enumerate(self.steps)}
        self.upstream = [tuple(dict.fromkeys(self.index[name] for name in step.depends_on)) for step in self.steps]
        below: list[list[int]] = [[] for _ in self.steps]
        for place, parents in enumerate(self.upstream):
            for parent in parents:
                below[parent].append(place)
        self.downstream = [tuple(children) for children in below]
        self.leaves = [place for place, children in enumerate(self.downstream) if not children]

    @functools.cached_property
    def order(self) -> list[int]:
        """All steps, each after those that it depends on."""
        waits = [len(parents) for parents in self.upstream]
        order = [place for place, number in enumerate(waits) if not number]
        for place in order:  # which grows meanwhile
            for child in self.downstream[place]:
                waits[child] -= 1
                if not waits[child]:
                    order.append(child)
        return order

    def below(self, places: Iterable[int]) -> set[int]:
        found: set[int] = set()
        unvisited = list(places)
        while unvisited:
            for child in self.downstream[unvisited.pop()]:
                if child not in found:
                    found.add(child)
                    unvisited.append(child)
        return found


# -- workflows that would start themselves without end: refused where that is certain, whatever their tasks return

MOST_FOLLOWED = 1_000
"""Workflows that are looked at from one that is applied."""

Read = Callable[[str], Definition | None]
"""Returns the newest version of a workflow."""


def certain_children(definition: Definition) -> list[Step]:
    """Return the steps that start a child run in every run in which nothing fails."""
    names = {step.name for step in definition.steps}
    below: defaultdict[str, list[Step]] = defaultdict(list)
    uncertain: dict[str, int] = {}
    certain: list[Step] = []
    for step in filter(_is_unconditional, definition.steps):
        above = {*step.depends_on} & names - {step.name}
        uncertain[step.name] = len(above)
        for up in above:
            below[up].append(step)
        if not above:
            certain.append(step)
    for step in certain:  # which grows meanwhile
        for down in below[step.name]:
            uncertain[down.name] -= 1
            if not uncertain[down.name]:
                certain.append(down)
    return [step for step in definition.steps if step.workflow is not None and uncertain.get(step.name) == 0]


def _is_unconditional(step: Step) -> bool:
    fans_out = step.foreach is not None or isinstance(step.parallel, str)
    return step.when is None and not fans_out and step.trigger != "any_failed"


def certain_triggers(definition: Definition) -> list[EventTrigger]:
    """Return what starts a run of the workflow whenever a run of another succeeds."""
    return [
        trigger
        for trigger in definition.on
        if trigger.workflow is not None and trigger.filter is None and trigger.state in ("success", "ended")
    ]


def find_cycle(definition: Definition, read: Read) -> list[str] | None:
    """Return the way on which every run of a workflow would lead to another run of it, by names; None if there is none.

    That is followed forwards through child workflows and backwards through `on`, so that only what is named is read.
    """
    started = _reach(definition, read, lambda found: (str(step.workflow) for step in certain_children(found)))
    starting = _reach(definition, read, lambda found: (str(one.workflow) for one in certain_triggers(found)))
    for name in started:
        if name == definition.name or name in starting:
            back = starting.get(name, [])
            return [definition.name, *started[name], *reversed(back[:-1]), *([definition.name] if back else [])]
    if definition.name in starting:
        return [definition.name, *reversed(starting[definition.name][:-1]), definition.name]
    return None


def _reach(definition: Definition, read: Read, follow: Callable[[Definition], Iterable[str]]) -> dict[str, list[str]]:
    """Return the workflows that can be reached from one, each with the names on the way to it, its own last."""
    ways: dict[str, list[str]] = {}
    ahead: list[tuple[Definition, list[str]]] = [(definition, [])]
    for found, way in ahead:  # which grows meanwhile
        for name in follow(found):
            if name in ways or len(ways) >= MOST_FOLLOWED:
                continue
            ways[name] = [*way, name]
            other = read(name) if name != definition.name else None
            if other is not None:
                ahead.append((other, ways[name]))
    return ways
