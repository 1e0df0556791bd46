"""One run: found, read with all that belongs to it, and followed to its end."""

from __future__ import annotations

import dataclasses
from typing import Any
from uuid import UUID

from orchestrator.cli.code.view import code_document, watch_code
from orchestrator.cli.runs.progress import watch_run, watch_workflow
from orchestrator.cli.terminal.data import hidden
from orchestrator.cli.terminal.ids import existing
from orchestrator.cli.terminal.output import echo, print_json
from orchestrator.cli.terminal.reading import looking
from orchestrator.domain.states import RunState
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.calls.insights import list_runs
from orchestrator.sdk.calls.interface import Calls
from orchestrator.store.insights import CodeView, RunDetail, RunFilter, RunView, readable_params

MOST_CHILDREN = 100


def find_run(calls: Calls, run: UUID) -> RunDetail:
    found = existing(calls.insights.show_run(run), "run", run)
    shown = hidden().shown
    return dataclasses.replace(
        found, params=shown(readable_params(found.params)), attributes=shown(found.attributes or {})
    )


def _code(calls: Calls, run: UUID) -> CodeView:
    return existing(calls.insights.show_code(run), "run", run)


def children_of(calls: Calls, run: UUID) -> list[RunView]:
    return list_runs(calls.insights, RunFilter(parent=run), limit=MOST_CHILDREN).runs


def run_document(calls: Calls, run: RunView) -> dict[str, Any]:
    """Return a run with its steps and its newest child runs; a plain run has none."""
    document = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    steps = calls.insights.list_steps(run.id)
    code = calls.insights.show_code(run.id)
    about_code = {} if code is None else code_document(code)
    return document | about_code | {"steps": steps, "children": children_of(calls, run.id)}


def follow_run(app: Orchestrator, run: UUID, *, as_json: bool) -> int:
    """Follow a run to its end and return the exit code."""
    with looking() as calls:
        definition = calls.insights.definition_of_run(run)
        try:
            if not as_json and find_run(calls, run).code:
                ended = watch_code(app, run, lambda run: (find_run(calls, run), _code(calls, run)))
            elif definition is None or as_json:
                ended = watch_run(lambda: find_run(calls, run), quiet=as_json)
            else:
                ended = watch_workflow(
                    app.run(run),
                    lambda: (
                        find_run(calls, run),
                        calls.insights.list_steps(run),
                    ),
                )
        except KeyboardInterrupt:
            echo(f"\nThe run goes on. To cancel it: orchestrator runs cancel {run}", err=True)
            return 130
        if as_json:
            print_json(run_document(calls, ended))
    return 0 if ended.status == RunState.SUCCESS else 1
