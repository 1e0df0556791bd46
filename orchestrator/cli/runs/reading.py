"""One run: found, read with all that belongs to it, and followed to its end."""

from __future__ import annotations

import dataclasses
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.cli.code.view import code_document, watch_code
from orchestrator.cli.runs.progress import watch_run, watch_workflow
from orchestrator.cli.terminal.data import hidden
from orchestrator.cli.terminal.ids import existing
from orchestrator.cli.terminal.output import echo, print_json
from orchestrator.cli.terminal.reading import reading
from orchestrator.domain.states import RunState
from orchestrator.sdk.app import Orchestrator
from orchestrator.store import insights
from orchestrator.store.dag import workflows
from orchestrator.store.insights import CodeView, RunDetail, RunFilter, RunView

MOST_CHILDREN = 100


def find_run(connection: Connection, run: UUID) -> RunDetail:
    found = existing(insights.show_run(connection, run), "run", run)
    return dataclasses.replace(found, params=hidden().shown(found.params))


def _code(connection: Connection, run: UUID) -> CodeView:
    return existing(insights.show_code(connection, run), "run", run)


def children_of(connection: Connection, run: UUID) -> list[RunView]:
    return insights.list_runs(connection, RunFilter(parent=run), limit=MOST_CHILDREN).runs


def run_document(connection: Connection, run: RunView) -> dict[str, Any]:
    """Return a run with its steps and its newest child runs; a plain run has none."""
    document = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    steps = insights.list_steps(connection, run.id)
    code = insights.show_code(connection, run.id)
    about_code = {} if code is None else code_document(code)
    return document | about_code | {"steps": steps, "children": children_of(connection, run.id)}


def follow_run(app: Orchestrator, run: UUID, *, as_json: bool) -> int:
    """Follow a run to its end and return the exit code."""
    with reading() as connection:
        definition = workflows.of_run(connection, run.bytes)
        try:
            if not as_json and find_run(connection, run).code:
                ended = watch_code(app, run, lambda run: (find_run(connection, run), _code(connection, run)))
            elif definition is None or as_json:
                ended = watch_run(lambda: find_run(connection, run), quiet=as_json)
            else:
                ended = watch_workflow(
                    app.run(run),
                    lambda: (
                        find_run(connection, run),
                        insights.list_steps(connection, run, definition=definition),
                    ),
                )
        except KeyboardInterrupt:
            echo(f"\nThe run goes on. To cancel it: orchestrator runs cancel {run}", err=True)
            return 130
        if as_json:
            print_json(run_document(connection, ended))
    return 0 if ended.status == RunState.SUCCESS else 1
