"""The graph of a workflow's steps, and checks for workflows that start themselves endlessly."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable

from orchestrator.domain.dag.definition import Definition, EventTrigger, Step


class Graph:
    """A definition prepared for planning, shared by all runs of it."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.steps = definition.steps
        self.index = {step.name: index for index, step in enumerate(self.steps)}
        self.upstream = [tuple(dict.fromkeys(self.index[name] for name in step.depends_on)) for step in self.steps]
        below: list[list[int]] = [[] for _ in self.steps]
        for index, parents in enumerate(self.upstream):
            for parent in parents:
                below[parent].append(index)
        self.downstream = [tuple(children) for children in below]
        self.leaves = [index for index, children in enumerate(self.downstream) if not children]

    @functools.cached_property
    def order(self) -> list[int]:
        """The indexes of all steps in topological order."""
        remaining = [len(parents) for parents in self.upstream]
        order = [index for index, number in enumerate(remaining) if not number]
        for index in order:  # grows during the loop
            for child in self.downstream[index]:
                remaining[child] -= 1
                if not remaining[child]:
                    order.append(child)
        return order

    def below(self, indexes: Iterable[int]) -> set[int]:
        descendants: set[int] = set()
        unvisited = list(indexes)
        while unvisited:
            for child in self.downstream[unvisited.pop()]:
                if child not in descendants:
                    descendants.add(child)
                    unvisited.append(child)
        return descendants


# -- workflows that would start themselves endlessly: rejected if that is certain, whatever their tasks return

MAX_FOLLOWED = 1_000
"""Workflows read to check one definition, at most."""

Read = Callable[[str], Definition | None]
"""Returns the newest version of a workflow."""


def certain_children(definition: Definition) -> list[Step]:
    """Return the steps that start a child run in every run without failures."""
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
    for step in certain:  # grows during the loop
        for down in below[step.name]:
            uncertain[down.name] -= 1
            if not uncertain[down.name]:
                certain.append(down)
    return [step for step in definition.steps if step.workflow is not None and uncertain.get(step.name) == 0]


def _is_unconditional(step: Step) -> bool:
    fans_out = step.foreach is not None or isinstance(step.parallel, str)
    return step.when is None and not fans_out and step.trigger != "any_failed"


def certain_triggers(definition: Definition) -> list[EventTrigger]:
    """Return the triggers that start a run whenever a run of another workflow succeeds."""
    return [
        trigger
        for trigger in definition.on
        if trigger.workflow is not None and trigger.filter is None and trigger.state in ("success", "ended")
    ]


def find_cycle(definition: Definition, read: Read) -> list[str] | None:
    """Return a cycle of workflow names in which every run would lead to another run of the first, or None.

    The search follows child workflows forwards and `on` backwards, so that it reads only workflows that are named.
    """
    started = _reach(definition, read, lambda current: (str(step.workflow) for step in certain_children(current)))
    starting = _reach(
        definition, read, lambda current: (str(trigger.workflow) for trigger in certain_triggers(current))
    )
    for name in started:
        if name == definition.name or name in starting:
            back = starting.get(name, [])
            return [definition.name, *started[name], *reversed(back[:-1]), *([definition.name] if back else [])]
    if definition.name in starting:
        return [definition.name, *reversed(starting[definition.name][:-1]), definition.name]
    return None


def _reach(definition: Definition, read: Read, follow: Callable[[Definition], Iterable[str]]) -> dict[str, list[str]]:
    """Return the workflows that can be reached from one, with the names on the path to each, its own name last."""
    paths: dict[str, list[str]] = {}
    pending: list[tuple[Definition, list[str]]] = [(definition, [])]
    for current, path in pending:  # grows during the loop
        for name in follow(current):
            if name in paths or len(paths) >= MAX_FOLLOWED:
                continue
            paths[name] = [*path, name]
            reached = read(name) if name != definition.name else None
            if reached is not None:
                pending.append((reached, paths[name]))
    return paths
