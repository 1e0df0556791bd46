"""The steps of a run as they are drawn. Large runs are folded into groups, which can be expanded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from orchestrator.api.dashboard.layout import layers_of
from orchestrator.store.insights import StepView

MAX_DRAWN = 150
"""Steps of a run that are drawn without groups, at most."""
_MAX_GROUPS = 60
"""Groups that are drawn, at most: as many as fit into a pane with readable names."""
_BANDS = 40
"""Groups of layers, at most, of a run with very many layers."""
_STEM = re.compile(r"[\d\s_.:\[\]-]+$")
_WORST = ("failed", "open", "waiting", "cancelled", "skipped", "success")
"""The order of states: a group has the first state that one of its steps has."""


def planned_step(**values: Any) -> StepView:
    """Return a step that has not started."""
    fields: dict[str, Any] = {"state": "waiting", "fan_out": False, "total": None, "ended": 0, "failed": 0}
    return StepView(**fields | dict.fromkeys(("reason", "started_at", "ended_at", "error")) | values)


@dataclass(frozen=True)
class Folded:
    """The steps to draw, some of which are groups."""

    steps: list[StepView]
    critical: frozenset[str]
    groups: frozenset[str]
    """The names of the groups."""
    firsts: Mapping[str, StepView] = field(default_factory=dict)
    """The step that started first in each group."""
    frames: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The steps that are drawn in place of each expanded group."""


def fold(steps: Sequence[StepView], critical: frozenset[str], opened: Collection[str] = ()) -> Folded:
    """Fold the steps of a large run into groups: steps in one layer with similar names form a group.

    If there are still too many groups, each layer forms a group, or several layers do. An expanded group is drawn step
    by step, failed steps first. Edges lead from layer to layer, so groups of whole layers form no cycle.
    """
    if len(steps) <= MAX_DRAWN:
        return Folded([*steps], critical, frozenset())
    layers = layers_of({step.name: step.depends_on for step in steps})
    depths = {name: depth for depth, layer in enumerate(layers) for name in layer}
    groups: dict[tuple[int, str], list[StepView]] = {}
    for layers_per_group, by_name in ((1, True), (1, False), (-(-len(layers) // _BANDS), False)):
        groups = {}
        for step in steps:
            stem = _STEM.sub("", step.name) if by_name else ""
            groups.setdefault((depths[step.name] // layers_per_group, stem), []).append(step)
        if len(groups) <= _MAX_GROUPS:
            break
    owners: dict[str, str] = {}
    members: dict[str, list[StepView]] = {}
    frames: dict[str, list[str]] = {}
    stems = Counter(stem for _, stem in groups)
    for (depth, stem), unsorted in groups.items():
        grouped = sorted(unsorted, key=lambda step: (depths[step.name], urgency(step)))
        names = [step.name for step in grouped]
        label = "" if not stem else _common(names) if stems[stem] == 1 else _range(names)
        name = grouped[0].name if len(grouped) == 1 else f"{label or stem or f'layer {depth}'} ({len(grouped)})"
        if len(grouped) > 1 and (name in members or name in depths):
            name = f"{grouped[0].name}… ({len(grouped)})"
        drawn = grouped[:MAX_DRAWN] if name in opened or len(grouped) == 1 else []
        owners |= {step.name: step.name for step in drawn} | {step.name: name for step in grouped[len(drawn) :]}
        members |= {step.name: [step] for step in drawn}
        if len(grouped) > len(drawn):
            members[name] = grouped[len(drawn) :]
        if name in opened:
            frames[name] = [*(step.name for step in drawn), *([name] if len(grouped) > len(drawn) else [])]
    return Folded(
        [_group(name, unsorted, owners) for name, unsorted in members.items()],
        frozenset(name for name, unsorted in members.items() if all(step.name in critical for step in unsorted)),
        frozenset(name for name in members if name not in depths),
        {name: min(unsorted, key=_begin) for name, unsorted in members.items() if name not in depths},
        frames,
    )


def _begin(step: StepView) -> tuple[bool, float]:
    return step.started_at is None, step.started_at.timestamp() if step.started_at else 0.0


def _group(name: str, inside: Sequence[StepView], owners: Mapping[str, str]) -> StepView:
    """Return a step that stands for a group, or the step itself, with dependencies on groups instead of steps."""
    dependencies = dict.fromkeys(owners[upper] for step in inside for upper in step.depends_on if upper in owners)
    depends_on = tuple(upper for upper in dependencies if upper != name)
    if len(inside) == 1 and inside[0].name == name:
        return replace(inside[0], depends_on=depends_on)
    ends = [step.ended_at for step in inside if step.ended_at is not None]
    return StepView(
        name=name,
        kind="group",
        calls=f"{len(inside):,} steps",
        state=worst([step.state for step in inside]),
        fan_out=True,
        total=len(inside),
        ended=sum(step.state in ("success", "failed") for step in inside),  # skipped steps do not count as done
        failed=sum(step.state == "failed" for step in inside),
        reason=counts_of([step.state for step in inside]),
        depends_on=depends_on,
        started_at=min((step.started_at for step in inside if step.started_at is not None), default=None),
        ended_at=None if any(step.state in ("waiting", "open") for step in inside) else max(ends, default=None),
        error=None,
    )


def rows_of(
    names: Sequence[str], maximum: int, failed: Collection[str] = (), opened: Collection[str] = ()
) -> dict[str, list[str]]:
    """Return the rows of a table of steps: one per step or, for many steps, one per group of similar names.

    Failed steps, and steps of expanded groups, have a row of their own as well.
    """
    if len(names) <= maximum:
        return {name: [name] for name in names}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_STEM.sub("", name) or name, []).append(name)
    if excess := [*groups.values()][maximum:]:
        groups = dict([*groups.items()][:maximum]) | {"others": [name for inside in excess for name in inside]}
    rows: dict[str, list[str]] = {}
    for stem, inside in groups.items():
        label = inside[0] if len(inside) == 1 else f"{stem} ({len(inside)})"
        alone = inside if label in opened else [name for name in inside if name in failed]
        rows |= {name: [name] for name in alone[:MAX_DRAWN]}
        if remaining := [name for name in inside if name not in rows]:
            rows[label] = remaining if label in opened else inside
    return rows


def _common(names: Sequence[str]) -> str:
    """Return the common prefix of names, without a part of a number."""
    first, last = min(names), max(names)
    prefix = first[
        : next((index for index, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    ]
    if any(name[len(prefix) : len(prefix) + 1].isdigit() for name in names):
        prefix = prefix.rstrip("0123456789")
    return prefix.rstrip("_.:[- ")


def _range(names: Sequence[str]) -> str:
    """Return a label of similar names: the first name, and the suffix of the last one."""
    first, last = min(names, key=_in_order), max(names, key=_in_order)
    return f"{first}…{last.removeprefix(_STEM.sub('', first)).lstrip('_.:[- ')}"


def _in_order(name: str) -> tuple[int, str]:
    return len(name), name


def urgency(step: StepView) -> int:
    """Return the rank of a step in a long list: failed and skipped steps come before open ones."""
    return {"failed": 0, "skipped": 1, "cancelled": 1, "open": 2}.get(step.state, 3)


def worst(states: Collection[str]) -> str:
    """Return the common state of several steps; empty if there are none."""
    found = next((state for state in (*_WORST, *sorted(states)) if state in states), "")
    return "open" if found == "waiting" and len({*states}) > 1 else found


def counts_of(states: Sequence[str]) -> str | None:
    """Return the number of steps in each state, the worst state first; None if all succeeded."""
    counts = Counter(states)
    found = [f"{counts[state]:,} {state}" for state in _WORST if state in counts]
    return None if [*counts] == ["success"] else ", ".join(found)


def critical_path(steps: Sequence[StepView]) -> frozenset[str]:
    """Return the critical path: from the step that ended last, back through the dependency that ended last."""
    by_name, ends = {step.name: step for step in steps}, ends_of(steps)
    last = max(((step.ended_at, step.name) for step in steps if step.ended_at and step.started_at), default=None)
    found: list[str] = []
    while last is not None:
        step = by_name[last[1]]
        if step.ended_at is not None:
            found.append(step.name)
        last = max(((end, name) for name in step.depends_on if (end := ends.get(name)) is not None), default=None)
    return frozenset(found)


def ends_of(steps: Sequence[StepView]) -> dict[str, datetime | None]:
    """Return the end of each step. A skipped step without an end has the end of its last dependency."""
    by_name = {step.name: step for step in steps}
    ends: dict[str, datetime | None] = {}
    for layer in layers_of({step.name: step.depends_on for step in steps}):
        for step in map(by_name.__getitem__, layer):
            above = (ends.get(name) for name in step.depends_on)
            is_skipped = step.ended_at is None and step.state == "skipped"
            ends[step.name] = max(filter(None, above), default=None) if is_skipped else step.ended_at
    return ends
