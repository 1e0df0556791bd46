"""The steps of a workflow, and which follow which."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from orchestrator.domain.dag.definition import Definition


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
        """Return all steps below some."""
        found: set[int] = set()
        unvisited = list(places)
        while unvisited:
            for child in self.downstream[unvisited.pop()]:
                if child not in found:
                    found.add(child)
                    unvisited.append(child)
        return found
