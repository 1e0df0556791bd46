"""The steps of a run as they are drawn: very many are folded into groups, which can be opened."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from orchestrator.api.dashboard.layout import layers_of
from orchestrator.store.insights import StepView

MOST_DRAWN = 150
"""Steps of a run beyond which some are drawn as one."""
_MOST_GROUPS = 60
"""What these are drawn as, at most: as much as a pane shows with names that can be read."""
_BANDS = 40
"""Groups of layers, at most, of a run with very many."""
_STEM = re.compile(r"[\d\s_.:\[\]-]+$")
_WORST = ("failed", "open", "waiting", "cancelled", "skipped", "success")
"""The state of a group is the first of these that one of its steps has."""


def planned_step(**known: Any) -> StepView:
    """Return a step that has not begun, as it is drawn."""
    fields: dict[str, Any] = {"state": "waiting", "fan_out": False, "total": None, "ended": 0, "failed": 0}
    return StepView(**fields | dict.fromkeys(("reason", "started_at", "ended_at", "error")) | known)


@dataclass(frozen=True)
class Folded:
    """Steps of which some stand for many others."""

    steps: list[StepView]
    critical: frozenset[str]
    groups: frozenset[str]
    """Those that stand for others."""
    firsts: Mapping[str, StepView] = field(default_factory=dict)
    """Of each of these, the step that began first."""
    frames: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of each group that is opened, what is drawn in its place."""


def fold(steps: Sequence[StepView], critical: frozenset[str], opened: Collection[str] = ()) -> Folded:
    """Return the steps as they are drawn: of very many, those of one layer with like names are one group.

    Where that leaves too many, those of a layer are, or of some layers. A group that is opened is drawn step by step,
    the failed ones first. Lines lead from layer to layer, so groups of whole layers form no circle.
    """
    if len(steps) <= MOST_DRAWN:
        return Folded([*steps], critical, frozenset())
    layers = layers_of({step.name: step.depends_on for step in steps})
    depths = {name: depth for depth, layer in enumerate(layers) for name in layer}
    groups: dict[tuple[int, str], list[StepView]] = {}
    for wide, by_name in ((1, True), (1, False), (-(-len(layers) // _BANDS), False)):
        groups = {}
        for step in steps:
            stem = _STEM.sub("", step.name) if by_name else ""
            groups.setdefault((depths[step.name] // wide, stem), []).append(step)
        if len(groups) <= _MOST_GROUPS:
            break
    owners: dict[str, str] = {}
    members: dict[str, list[StepView]] = {}
    frames: dict[str, list[str]] = {}
    stems = Counter(stem for _, stem in groups)
    for (depth, stem), found in groups.items():
        inside = sorted(found, key=lambda step: (depths[step.name], urgency(step)))
        names = [step.name for step in inside]
        label = "" if not stem else _common(names) if stems[stem] == 1 else _range(names)
        name = inside[0].name if len(inside) == 1 else f"{label or stem or f'layer {depth}'} ({len(inside)})"
        if len(inside) > 1 and (name in members or name in depths):
            name = f"{inside[0].name}… ({len(inside)})"
        shown = inside[:MOST_DRAWN] if name in opened or len(inside) == 1 else []
        owners |= {step.name: step.name for step in shown} | {step.name: name for step in inside[len(shown) :]}
        members |= {step.name: [step] for step in shown}
        if len(inside) > len(shown):
            members[name] = inside[len(shown) :]
        if name in opened:
            frames[name] = [*(step.name for step in shown), *([name] if len(inside) > len(shown) else [])]
    return Folded(
        [_group(name, found, owners) for name, found in members.items()],
        frozenset(name for name, found in members.items() if all(step.name in critical for step in found)),
        frozenset(name for name in members if name not in depths),
        {name: min(found, key=_begin) for name, found in members.items() if name not in depths},
        frames,
    )


def _begin(step: StepView) -> tuple[bool, float]:
    return step.started_at is None, step.started_at.timestamp() if step.started_at else 0.0


def _group(name: str, inside: Sequence[StepView], owners: Mapping[str, str]) -> StepView:
    """Return a step that stands for others, or the step itself, behind the groups that it depends on."""
    above = dict.fromkeys(owners[one] for step in inside for one in step.depends_on if one in owners)
    depends_on = tuple(one for one in above if one != name)
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
        ended=sum(step.state in ("success", "failed") for step in inside),  # the bar is not green for the others
        failed=sum(step.state == "failed" for step in inside),
        reason=counts_of([step.state for step in inside]),
        depends_on=depends_on,
        started_at=min((step.started_at for step in inside if step.started_at is not None), default=None),
        ended_at=None if any(step.state in ("waiting", "open") for step in inside) else max(ends, default=None),
        error=None,
    )


def rows_of(
    names: Sequence[str], most: int, failed: Collection[str] = (), opened: Collection[str] = ()
) -> dict[str, list[str]]:
    """Return the rows of a table of steps: each has its own, or those with like names share one.

    A failed one has its own as well, and so have those of a group that is opened.
    """
    if len(names) <= most:
        return {name: [name] for name in names}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_STEM.sub("", name) or name, []).append(name)
    if rest := [*groups.values()][most:]:
        groups = dict([*groups.items()][:most]) | {"others": [name for inside in rest for name in inside]}
    rows: dict[str, list[str]] = {}
    for stem, inside in groups.items():
        label = inside[0] if len(inside) == 1 else f"{stem} ({len(inside)})"
        alone = inside if label in opened else [name for name in inside if name in failed]
        rows |= {name: [name] for name in alone[:MOST_DRAWN]}
        if left := [name for name in inside if name not in rows]:
            rows[label] = left if label in opened else inside
    return rows


def _common(names: Sequence[str]) -> str:
    """Return what names begin with, without a part of a number."""
    first, last = min(names), max(names)
    prefix = first[
        : next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    ]
    if any(name[len(prefix) : len(prefix) + 1].isdigit() for name in names):
        prefix = prefix.rstrip("0123456789")
    return prefix.rstrip("_.:[- ")


def _range(names: Sequence[str]) -> str:
    """Return the first of like names, and what the last one has in its stead."""
    first, last = min(names, key=_in_order), max(names, key=_in_order)
    return f"{first}…{last.removeprefix(_STEM.sub('', first)).lstrip('_.:[- ')}"


def _in_order(name: str) -> tuple[int, str]:
    return len(name), name


def urgency(step: StepView) -> int:
    """Return where a step stands in a long list: what failed or was skipped comes before what is open."""
    return {"failed": 0, "skipped": 1, "cancelled": 1, "open": 2}.get(step.state, 3)


def worst(states: Collection[str]) -> str:
    """Return the state of several steps together; nothing, if there is none."""
    found = next((state for state in (*_WORST, *sorted(states)) if state in states), "")
    return "open" if found == "waiting" and len({*states}) > 1 else found


def counts_of(states: Sequence[str]) -> str | None:
    """Return how many steps of a group are in which state, the worst first; None if all succeeded."""
    counts = Counter(states)
    found = [f"{counts[state]:,} {state}" for state in _WORST if state in counts]
    return None if [*counts] == ["success"] else ", ".join(found)


def critical_path(steps: Sequence[StepView]) -> frozenset[str]:
    """Return the steps that the run took as long as: from the one that ended last, each that the next waited for."""
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
    """Return when each step was over. One that was skipped was so as soon as all above it were."""
    by_name = {step.name: step for step in steps}
    ends: dict[str, datetime | None] = {}
    for layer in layers_of({step.name: step.depends_on for step in steps}):
        for step in map(by_name.__getitem__, layer):
            above = (ends.get(name) for name in step.depends_on)
            is_skipped = step.ended_at is None and step.state == "skipped"
            ends[step.name] = max(filter(None, above), default=None) if is_skipped else step.ended_at
    return ends
