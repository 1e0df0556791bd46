"""Two runs side by side: parameters, definitions, step after step, and outputs."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard import words
from orchestrator.api.dashboard.gantt import gantt_of_events
from orchestrator.api.dashboard.pages import flows as flow_pages
from orchestrator.api.dashboard.pages.runs import events_of, run_before
from orchestrator.api.dashboard.rendering import page, pages
from orchestrator.api.key_scope import WITHIN, check_runs
from orchestrator.api.routes import runs as run_routes
from orchestrator.domain.access import KeyScope
from orchestrator.domain.flow.definition import body_of
from orchestrator.errors import NotFound
from orchestrator.monitoring.times import present
from orchestrator.sdk.dag import writing
from orchestrator.store.insights import RunDetail

routes = pages("/ui/compare")

_MOST_ROWS = 200
_MOST_LINES = 5_000
"""Lines of a text that are compared."""
_MOST_TASKS = 2_000
"""Tasks of a run whose outputs are read."""
_MOST_BYTES = 1_000_000
"""Bytes of outputs that are read from the payload store."""


class CompareQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which runs; one alone is compared with the last good run before it."""

    run: tuple[UUID, ...] = ()


class Lap(NamedTuple):
    """A step of one run."""

    state: str
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs."""

    run: RunDetail
    params: Any
    laps: dict[str, Lap]
    outputs: dict[str, Any] | None
    """None if the run has too many tasks to read them all."""


class Pair(NamedTuple):
    """A step in both runs."""

    name: str
    old: Lap | None
    new: Lap | None

    @property
    def change(self) -> float | None:
        """By how many seconds it became slower, where both runs have a time."""
        known = self.old and self.new and self.old.seconds is not None and self.new.seconds is not None
        return self.new.seconds - self.old.seconds if known else None  # type: ignore[union-attr, operator]

    @property
    def weight(self) -> float:
        """How much it says: another state comes before another time."""
        is_other = (self.old and self.old.state) != (self.new and self.new.state)
        return float("inf") if is_other else abs(self.change or 0.0)


@routes.get("", about=WITHIN, is_expensive=True)
def compare(api: Api, query: CompareQuery, key_scope: KeyScope) -> Response:
    """Compare two runs: the older one is the measure."""
    chosen = sorted({*query.run}, reverse=True)  # ids sort by time
    if not chosen or len(query.run) > 2:
        return page("compare.html", 422 if chosen else 200, new=None, old=None, marked=len(query.run))
    check_runs(api, key_scope, set(chosen))
    new = _side(api, chosen[0])
    before = chosen[1] if len(chosen) > 1 else run_before(api, new.run, key_scope)
    if before is None:
        return page("compare.html", new=new, old=None)
    old = _side(api, before)
    pairs = [Pair(name, old.laps.get(name), new.laps.get(name)) for name in dict.fromkeys((*new.laps, *old.laps))]
    shown = pairs if len(pairs) <= _MOST_ROWS else sorted(pairs, key=lambda pair: -pair.weight)[:_MOST_ROWS]
    return page(
        "compare.html",
        new=new,
        old=old,
        pairs=shown,
        left_out=len(pairs) - len(shown),
        params=_difference(words.data(old.params), words.data(new.params)),
        definition=_difference(_definition(api, old.run), _definition(api, new.run)) if _differ(old, new) else [],
        outputs=_outputs(old.outputs, new.outputs),
    )


def _side(api: Api, id: UUID) -> Side:
    found = run_routes.find(api, id)
    run = found.run
    if found.code is not None:
        given = {"args": found.code.args, **found.code.kwargs} if found.code.args else found.code.kwargs
        rows = gantt_of_events(run, events_of(api, id)[1], present()).rows
        return Side(run=run, params=given, laps=_laps(rows), outputs={"result": found.code.result})
    if run.flow:
        shown = flow_pages.of_run(api, id)
        view, rows = shown["view"], shown["gantt"].rows
        return Side(run=run, params=view.params, laps=_laps(rows), outputs={"shared state": view.shared})
    laps = {step.name: Lap(step.state, words.between(step.started_at, step.ended_at)) for step in found.steps}
    outputs = None
    if run.total <= _MOST_TASKS:
        read, _ = api.backend.runs.outputs_within(id.bytes, _MOST_BYTES)
        outputs = api.redaction_of_run(id).shown(read)
    return Side(run=run, params=run.params, laps=laps, outputs=outputs)


def _laps(rows: Any) -> dict[str, Lap]:
    """Return the rows of a timeline by name; one that comes again is numbered."""
    seen: Counter[str] = Counter()
    laps = {}
    for row in rows:
        seen[row.name] += 1
        name = row.name if seen[row.name] == 1 else f"{row.name} #{seen[row.name]}"
        laps[name] = Lap(row.state, row.seconds)
    return laps


def _differ(old: Side, new: Side) -> bool:
    return (old.run.workflow, old.run.version) != (new.run.workflow, new.run.version)


def _definition(api: Api, run: RunDetail) -> str:
    """Return the definition that a run is pinned to, as a file has it; nothing for code, or if it was deleted."""
    if run.workflow is None or run.version is None or run.code:
        return ""
    with suppress(NotFound):
        if run.flow:
            return words.data(body_of(api.backend.flows.read(run.workflow, run.version).flow))
        found = api.backend.workflows.read(run.workflow, run.version).definition
        if len(found.steps) > _MOST_ROWS:  # YAML of thousands of steps takes seconds
            return msgspec.json.format(msgspec.json.encode(writing.to_data(found))).decode()
        return writing.to_yaml(found)
    return ""


def _outputs(old: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, list[str]] | None:
    """Return the outputs that differ, as changed lines."""
    if old is None or new is None:
        return None
    names = [name for name in {**new, **old} if old.get(name) != new.get(name)][:_MOST_ROWS]
    return {name: _difference(*(words.data(one[name]) if name in one else "" for one in (old, new))) for name in names}


def _difference(old: str, new: str) -> list[str]:
    """Return the changed lines of a text, each with its sign, and some around them."""
    first, second = (text.splitlines()[:_MOST_LINES] for text in (old, new))
    return [*unified_diff(first, second, lineterm="")][2:]
