"""Two runs side by side: parameters, definitions, steps and outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from functools import partial
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
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.flow.definition import body_of
from orchestrator.errors import NotFound
from orchestrator.monitoring.times import present
from orchestrator.sdk.dag import document
from orchestrator.store.insights import RunDetail

routes = pages("/ui/compare")

_VISIBLE_ROWS, _MAX_ROWS = 25, 200
"""Steps that are visible before the others are expanded, and steps in total."""
_MAX_LINES = 2_000
"""Lines of a text that are compared."""
_MAX_SHOWN, _MAX_LINE_LENGTH = 600, 500
"""Lines of a difference, or of the differences of all outputs, and characters of a line."""
_MAX_OUTPUTS = 50
"""Different outputs whose difference is shown."""
_MAX_TASKS = 2_000
"""Tasks of a run up to which outputs are compared."""
_MAX_BYTES = 1_000_000
"""Bytes of outputs that are read from the payload store."""


class CompareQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The runs to compare. One run is compared with the last successful run before it, or the first after it."""

    run: tuple[UUID, ...] = ()


class StepTiming(NamedTuple):
    """The state and duration of a step."""

    state: str
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the compared runs."""

    run: RunDetail
    params: Any
    times: dict[str, StepTiming]
    outputs: dict[str, Any] | None
    """The stored outputs, to compare; None if the run has too many tasks."""
    shown: Callable[[list[str]], dict[str, Any]]
    """Returns some outputs, redacted for display."""


class Pair(NamedTuple):
    """A step in both runs."""

    name: str
    old: StepTiming | None
    new: StepTiming | None

    @property
    def change(self) -> float | None:
        """The seconds by which the step became slower; None unless both runs have a duration."""
        has_both = self.old and self.new and self.old.seconds is not None and self.new.seconds is not None
        return self.new.seconds - self.old.seconds if has_both else None  # type: ignore[union-attr, operator]

    @property
    def weight(self) -> float:
        """The rank of the difference: different states rank before different durations."""
        has_other_state = (self.old and self.old.state) != (self.new and self.new.state)
        return float("inf") if has_other_state else abs(self.change or 0.0)


@routes.get("", about=WITHIN, is_expensive=True)
def compare(api: Api, query: CompareQuery, key_scope: KeyScope) -> Response:
    """Compare two runs; the older one is the baseline."""
    ids = sorted({*query.run}, reverse=True)  # ids sort by time
    if not ids or len(query.run) > 2:
        return page("compare.html", 422 if ids else 200, new=None, old=None, marked=len(query.run))
    check_runs(api, key_scope, set(ids))
    new = _side(api, ids[0])
    before = ids[1] if len(ids) > 1 else run_before(api, new.run, key_scope)
    after = run_before(api, new.run, key_scope, "when") if before is None else None
    if before is None and after is None:
        return page("compare.html", new=new, old=None)
    old = new if before is None else _side(api, before)
    new = new if after is None else _side(api, after)
    outputs, left_outputs = _outputs(old, new)
    pairs = [Pair(name, old.times.get(name), new.times.get(name)) for name in dict.fromkeys((*new.times, *old.times))]
    is_long = len(pairs) > _VISIBLE_ROWS + 5
    displayed = sorted(pairs, key=lambda pair: -pair.weight)[:_MAX_ROWS] if is_long else pairs
    return page(
        "compare.html",
        new=new,
        old=old,
        pairs=displayed,
        few=_VISIBLE_ROWS if is_long else len(displayed),
        left_out=len(pairs) - len(displayed),
        params=_difference(words.data(old.params), words.data(new.params)),
        definition=_definitions(api, old.run, new.run),
        outputs=outputs,
        left_outputs=left_outputs,
    )


def _side(api: Api, id: UUID) -> Side:
    found = run_routes.find(api, id)
    run = found.run
    if found.code is not None:
        params = {"args": found.code.args, **found.code.kwargs} if found.code.args else found.code.kwargs
        rows = gantt_of_events(run, events_of(api, id)[1], present()).rows
        outputs = {"result": found.code.result}
        return Side(run=run, params=params, times=_timings(rows), outputs=outputs, shown=lambda _: outputs)
    if run.flow:
        shown = flow_pages.of_run(api, id)
        view, rows = shown["view"], shown["gantt"].rows
        outputs = {"shared state": view.shared}
        return Side(run=run, params=view.params, times=_timings(rows), outputs=outputs, shown=lambda _: outputs)
    times = {step.name: StepTiming(step.state, words.between(step.started_at, step.ended_at)) for step in found.steps}
    stored = api.backend.runs.stored_outputs(id.bytes) if run.total <= _MAX_TASKS else None
    return Side(run=run, params=run.params, times=times, outputs=stored, shown=partial(_shown_outputs, api, id))


def _shown_outputs(api: Api, id: UUID, names: list[str]) -> dict[str, Any]:
    read, _ = api.backend.runs.outputs_within(id.bytes, _MAX_BYTES, names)
    shown: dict[str, Any] = api.redaction_of_run(id).redacted(read)
    return shown


def _timings(rows: Any) -> dict[str, StepTiming]:
    """Return the rows of a timeline by name; repeated names are numbered."""
    counts: Counter[str] = Counter()
    times = {}
    for row in rows:
        counts[row.name] += 1
        name = row.name if counts[row.name] == 1 else f"{row.name} #{counts[row.name]}"
        times[name] = StepTiming(row.state, row.seconds)
    return times


def _definitions(api: Api, old: RunDetail, new: RunDetail) -> list[str]:
    """Return the changed lines of two runs' definitions. In large definitions, each step is one line."""
    if (old.workflow, old.version) == (new.workflow, new.version):
        return []
    first, second = _definition(api, old), _definition(api, new)
    if isinstance(first, Definition) and isinstance(second, Definition):
        if max(len(first.steps), len(second.steps)) <= _MAX_ROWS:  # YAML of thousands of steps takes seconds
            return _difference(document.to_yaml(first), document.to_yaml(second))
        was, now = (_by_line(document.to_data(one)) for one in (first, second))
        gone, added = ("\n".join(line for line in one if line not in other) for one, other in ((was, now), (now, was)))
        return _difference(gone, added)
    return _difference(words.data(first) if first else "", words.data(second) if second else "")


def _by_line(data: dict[str, Any]) -> dict[str, None]:
    """Return the options and steps of a definition, each as one line."""
    named = {**data, **data.pop("tasks")}
    return {f"{name}: {msgspec.json.encode(value).decode()}": None for name, value in named.items()}


def _definition(api: Api, run: RunDetail) -> Any:
    """Return the definition of a run; None for code, or if it was deleted."""
    if run.workflow is None or run.version is None or run.code:
        return None
    with suppress(NotFound):
        if run.flow:
            return body_of(api.backend.flows.read(run.workflow, run.version).flow)
        return api.backend.workflows.read(run.workflow, run.version).definition
    return None


def _outputs(old: Side, new: Side) -> tuple[dict[str, list[str]] | None, int]:
    """Return the changed lines of the first different outputs, and the number of further different outputs."""
    if old.outputs is None or new.outputs is None:
        return None, 0
    old_outputs, new_outputs = old.outputs, new.outputs
    names = [name for name in {**new_outputs, **old_outputs} if old_outputs.get(name) != new_outputs.get(name)]
    first, second = (side.shown(names[:_MAX_OUTPUTS]) for side in (old, new))
    differences: dict[str, list[str]] = {}
    remaining_lines = _MAX_SHOWN
    for name in names[:_MAX_OUTPUTS]:
        texts = [words.data(side[name]) if name in side else "" for side in (first, second)]
        if lines := _difference(texts[0], texts[1], remaining_lines):
            differences[name] = lines
            remaining_lines -= min(remaining_lines, len(lines))
        if not remaining_lines:
            break
    return differences, max(0, len(names) - _MAX_OUTPUTS) if remaining_lines else len(names) - len(differences)


def _difference(old: str, new: str, maximum: int = _MAX_SHOWN) -> list[str]:
    """Return the changed lines of a text with their sign and some context."""
    first, second = old.splitlines(), new.splitlines()
    lines = [*unified_diff(first[:_MAX_LINES], second[:_MAX_LINES], lineterm="")][2:]
    shown = [line if len(line) <= _MAX_LINE_LENGTH else f"{line[:_MAX_LINE_LENGTH]}…" for line in lines[:maximum]]
    if len(lines) > maximum:
        shown.append(f"… {len(lines) - maximum:,} more lines differ")
    if first[_MAX_LINES:] != second[_MAX_LINES:]:
        shown.append(f"… lines after the first {_MAX_LINES:,} differ, too")
    return shown
