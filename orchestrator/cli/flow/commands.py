"""`orchestrator flows`."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import click

from orchestrator.cli.flow.drawing import draw
from orchestrator.cli.terminal.ids import RUN, run_argument
from orchestrator.cli.terminal.options import app_option, json_option
from orchestrator.cli.terminal.output import (
    console,
    counted,
    echo,
    hidden,
    parse_value,
    print_fields,
    print_json,
    print_table,
    state,
)
from orchestrator.cli.terminal.reading import open_app, open_calls
from orchestrator.domain.flow.checks import KnownNames
from orchestrator.domain.flow.decisions import APPROVED, REJECTED
from orchestrator.domain.flow.definition import Flow
from orchestrator.domain.flow.rules import differences
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.errors import InvalidWorkflow, NotFound, did_you_mean
from orchestrator.monitoring.times import ago, between, present
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.calls.interface import Calls
from orchestrator.sdk.flow import reading
from orchestrator.settings import load_settings
from orchestrator.store.flow.reads import FlowRunView, NodeRunView, waiting_for
from orchestrator.terminal_safe import indented, one_line
from orchestrator.workers.functions import load_app

_POLL_INTERVAL = 5.0
"""Seconds after which a watched run is read again, if no notification of a change arrives."""
_MIN_POLL_INTERVAL = 0.05
"""Seconds between two reads of a watched run, at least, however often it changes."""

file_argument = click.argument("file", type=click.Path(exists=True, dir_okay=False))
why_option = click.option("--why", default="", help="The reason, for the audit log and the node.")


@click.group("flows")
def command() -> None:
    """Check, publish and start flow graphs; signal, approve and watch their runs.

    \b
    Example:
      orchestrator flows publish order.yaml
      orchestrator flows start order val=2
      orchestrator flows approve 0199b2f4 --why "within the budget"
    """


@command.command()
@click.argument("files", metavar="FILE…", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--app", metavar="MODULE:APP", help="Also check that this application has the functions.")
@click.option("--service", "services", metavar="NAME", multiple=True, help="Also check the names of services.")
@json_option
def validate(files: tuple[str, ...], app: str | None, services: tuple[str, ...], as_json: bool) -> None:
    """Check flow files and print every problem; exit with 1 if a file is invalid. Needs no services.

    References to other flows are not checked here, but by `publish`. Warnings name features that other flow schedulers
    handle differently; they do not change the exit code.

    \b
    Example:
      orchestrator flows validate flows/*.yaml --app shop.tasks:app
      orchestrator flows validate flows/*.yaml --service pay --service ship
    """
    known_names = KnownNames(functions=load_app(app).tasks if app else None, services=services or None)
    results: dict[str, Flow | InvalidWorkflow] = {}
    for file in files:
        try:
            results[file] = reading.load(file, known_names)
        except InvalidWorkflow as error:
            results[file] = error
    if as_json:
        verdicts = [
            {
                "file": file,
                "valid": isinstance(result, Flow),
                "problems": [] if isinstance(result, Flow) else _problems(result),
                "warnings": differences(result) if isinstance(result, Flow) else [],
            }
            for file, result in results.items()
        ]
        print_json({"files": verdicts})
    else:
        for file, result in results.items():
            if isinstance(result, Flow):
                echo(f"{file}: {counted(len(result.nodes), 'node')}, valid")
                for warning in differences(result):
                    echo(f"{file}: warning: {warning}", colour="yellow", err=True)
            else:
                echo(str(result), colour="red", err=True)
    sys.exit(0 if all(isinstance(result, Flow) for result in results.values()) else 1)


def _problems(error: InvalidWorkflow) -> list[str]:
    return str(error).splitlines()


@command.command()
@file_argument
@click.option("--name", help="The flow's name. Default: the name of the file, without its ending.")
@app_option
@json_option
def publish(file: str, name: str | None, app: str | None, as_json: bool) -> None:
    """Store a flow as a new version, unless it equals the newest; runs keep the version they began with.

    Flows that it references are embedded in their current version.

    \b
    Example:
      orchestrator flows publish order.yaml --app shop.tasks:app
    """
    app_path = app or load_settings().app
    with closing(load_app(app_path) if app_path else Orchestrator(load_settings())) as application:
        flow = application.flows.read(Path(file))
        flow_name = name or Path(file).stem
        done = application._client.backend.flows.publish(flow_name, flow)
    if as_json:
        print_json({"name": flow_name, "version": done.version, "new": done.created})
    else:
        echo(f"{flow_name}: version {done.version} ({'new' if done.created else 'unchanged'})")


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the flows that have been published.

    \b
    Example:
      orchestrator flows list
    """
    with open_calls() as calls:
        flows = calls.flows.names()
    if as_json:
        print_json({"flows": [flow._asdict() for flow in flows]})
    else:
        now = present()
        rows = [(flow.name, str(flow.version) if flow.version else "none", ago(flow.created_at, now)) for flow in flows]
        print_table(("NAME", "VERSION", "SINCE"), rows, empty="No flow has been published.")


@command.command()
@click.argument("flow")
@click.argument("params", metavar="[KEY=VALUE]…", nargs=-1)
@click.option("--version", type=click.IntRange(1), help="The version to start. Default: the newest.")
@click.option("--key", help="An idempotency key: a second start with it returns the first run.")
@click.option("--tag", "tags", multiple=True, help="Add a tag; may be repeated.")
@click.option(
    "--shared", metavar="KEY=VALUE", multiple=True, help="An initial value in the shared state; may be repeated."
)
@click.option("--watch", "is_watched", is_flag=True, help="Draw the run until its end; exit with 1 unless it succeeds.")
@json_option
def start(
    flow: str, params: tuple[str, ...], shared: tuple[str, ...], is_watched: bool, as_json: bool, **options: Any
) -> None:
    """Start a run of a flow, and print its id. A value is JSON, or else text.

    \b
    Example:
      orchestrator flows start order items='[1, 2]' customer=ann --watch
    """
    arguments, initial = _values(params), _values(shared)
    with open_app() as app:
        try:
            run = app.flows[flow].options(**options, shared=initial).start(**arguments)
        except NotFound as error:
            raise NotFound(f"{error}{did_you_mean(flow, app.flows.names())}") from None
    if as_json:
        print_json({"id": run.id})
    else:
        echo(run.id)
    if is_watched:
        sys.exit(_follow(UUID(run.id)))


def _values(pairs: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in pairs:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise click.UsageError(f"Expected KEY=VALUE, found {word!r}.")
        values[name] = parse_value(value)
    return values


@command.command()
@click.argument("what", metavar="FLOW|ID")
@json_option
def show(what: str, as_json: bool) -> None:
    """Draw a flow, or a run of a flow with its current node.

    \b
    Example:
      orchestrator flows show order
      orchestrator flows show 0199b2f4
    """
    with open_calls() as calls:
        names = [flow.name for flow in calls.flows.names()]
        if what in names:
            stored = calls.flows.latest(what)
            if as_json:
                print_json({"name": stored.name, "version": stored.version, "definition": stored.flow})
            else:
                echo(f"{stored.name}, version {stored.version}")
                console().print(draw(stored.flow))
            return
        try:
            run = RUN.convert(what, None, None)
        except NotFound as error:
            raise NotFound(f"There is no flow {what!r}.{did_you_mean(what, names)} {error}") from None
        view = _redacted(calls.flows.show(run.bytes))
        if as_json:
            print_json({"run": view._asdict(), "nodes": [visit._asdict() for visit in _visits(calls, run)]})
            return
        _print_run(calls, view, calls.flows.visited(run.bytes))


def _redacted(view: FlowRunView) -> FlowRunView:
    redaction = hidden({"redact": view.redact})
    return view._replace(params=redaction.redacted(view.params), shared=redaction.redacted(view.shared))


def _visits(calls: Calls, run: UUID, after: int = 0) -> Iterator[NodeRunView]:
    """Yield a run's node visits after a number, page by page, redacted."""
    while page := calls.flows.node_runs(run.bytes, after):
        redaction = hidden({"redact": page[0].redact})
        for visit in page:
            yield visit._replace(input=redaction.redacted(visit.input), output=redaction.redacted(visit.output))
        after = page[-1].number


def _print_run(calls: Calls, view: FlowRunView, visited: Collection[str]) -> None:
    now = present()
    fields: dict[str, Any] = {
        "Run": str(view.id),
        "Flow": f"{view.flow}, version {view.version}",
        "State": state(view.status, "being cancelled" if view.cancelling and view.ended_at is None else ""),
        "Started": ago(view.created_at, now),
    }
    if view.ended_at is not None and view.started_at is not None:
        fields["Took"] = between(view.started_at, view.ended_at)
    if view.reason:
        fields["Reason"] = view.reason
    if view.cursor and view.ended_at is None:
        fields["At"] = view.cursor
    if waits := waiting_for(view):
        fields["Waits for"] = waits
    fields["Steps"] = str(view.steps)
    if view.last_action:
        fields["Last action"] = view.last_action
    fields["Shared"] = str(view.shared)[:1_000]
    print_fields(fields)
    echo()
    cursor = view.cursor if view.ended_at is None or view.status == RunState.FAILED else ""
    console().print(draw(calls.flows.read(view.flow, view.version).flow, cursor, visited))


@command.command()
@run_argument
def watch(run: UUID) -> None:
    """Follow a run: print each visited node until the run ends; exit with 1 unless it succeeds.

    \b
    Example:
      orchestrator flows watch 0199b2f4
    """
    sys.exit(_follow(run))


def _follow(run: UUID) -> int:
    after, printed = 0, ""
    with open_app() as app, closing(app._client.backend.runs.listen(run.bytes)) as changes:
        calls = app._client.backend
        while True:
            view = calls.flows.show(run.bytes)
            for visit in _visits(calls, run, after):
                after = visit.number
                branch = "" if visit.branch is None else f" [{visit.branch}]"
                error = f": {visit.error}" if visit.error else ""
                action = f" → {visit.action}" if visit.action else ""
                echo(indented(f"{visit.ended_at:%H:%M:%S}  {visit.node}{branch}  {visit.status}{action}{error}"))
            if RunState(view.status) in ENDED_RUN_STATES:
                reason = f": {view.reason}" if view.reason else ""
                echo(indented(f"{view.status}{reason}"), err=True)
                return 0 if view.status == RunState.SUCCESS else 1
            waits = waiting_for(view) if view.waits == "signal" else ""
            if waits and waits != printed:
                echo(one_line(f"{view.cursor} waits for {waits}"), err=True)
            printed = waits
            time.sleep(_MIN_POLL_INTERVAL)
            changes.wait(_POLL_INTERVAL)


@command.command()
@run_argument
@click.argument("key")
@click.argument("value", default="true")
@why_option
def signal(run: UUID, key: str, value: str, why: str) -> None:
    """Send a value to a run under a key. The value is JSON, or else text. It is kept until a node waits for it.

    \b
    Example:
      orchestrator flows signal 0199b2f4 paid '{"cents": 450}'
    """
    with open_app() as app:
        app.flows.run(run).signal(key, parse_value(value), why=why)
    echo(f"Sent {key!r} to run {run}.")


def _decide(run: UUID, decision: str, why: str, node: str | None) -> None:
    with open_app() as app:
        key = app._client.backend.flows.decide(run.bytes, decision, why, node)
    echo(f"{run}: {key!r} is {decision}.")


node_option = click.option("--node", help="The approval node, if the run has not reached it yet.")


@command.command()
@run_argument
@why_option
@node_option
def approve(run: UUID, why: str, node: str | None) -> None:
    """Approve what a run waits for. The audit log and the node record who approved it, when and why.

    \b
    Example:
      orchestrator flows approve 0199b2f4 --why "within the budget"
    """
    _decide(run, APPROVED, why, node)


@command.command()
@run_argument
@why_option
@node_option
def reject(run: UUID, why: str, node: str | None) -> None:
    """Reject what a run waits for. The audit log and the node record who rejected it, when and why.

    \b
    Example:
      orchestrator flows reject 0199b2f4 --why "too expensive"
    """
    _decide(run, REJECTED, why, node)


@command.command()
@click.argument("flow", required=False)
@click.option("--status", type=click.Choice([str(state_) for state_ in RunState]), help="Only in this state.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many to show.")
@json_option
def runs(flow: str | None, status: str | None, limit: int, as_json: bool) -> None:
    """List runs of flows, newest first, with their state and current node.

    \b
    Example:
      orchestrator flows runs order --status running
    """
    with open_calls() as calls:
        views = [_redacted(view) for view in calls.flows.runs(flow, status, limit)]
    if as_json:
        print_json({"runs": [view._asdict() for view in views]})
        return
    now = present()
    rows = [
        (
            str(view.id),
            f"{view.flow}@{view.version}",
            state(view.status),
            view.cursor if view.ended_at is None else "",
            waiting_for(view),
            ago(view.created_at, now),
        )
        for view in views
    ]
    print_table(("ID", "FLOW", "STATE", "AT", "WAITS FOR", "STARTED"), rows, empty="No flow has been started.")
