"""`orchestrator runs`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import click
from rich.console import Group

from orchestrator.cli.code import commands as code_runs
from orchestrator.cli.code.view import print_error
from orchestrator.cli.runs.fields import (
    MAX_CHILDREN,
    children_of,
    find_run,
    follow_run,
    print_run,
    print_runs,
    run_document,
)
from orchestrator.cli.runs.view import MAX_LINES, draw_lines, to_lines
from orchestrator.cli.terminal.ids import RUN, IdFormat, run_argument, runs_argument
from orchestrator.cli.terminal.logs import color_option, print_logs
from orchestrator.cli.terminal.options import (
    app_option,
    certain_option,
    json_option,
    moment,
    page_options,
    status_option,
)
from orchestrator.cli.terminal.output import (
    confirm_if_asked,
    console,
    counted,
    echo,
    on_terminal,
    parse_value,
    print_json,
)
from orchestrator.cli.terminal.reading import ask_each, open_app, open_calls, wait_with_notices
from orchestrator.domain.ids import successor_id
from orchestrator.domain.runs import RESET
from orchestrator.domain.states import ENDED_RUN_STATES, RunState, ShownRunState
from orchestrator.errors import NotFound, did_you_mean
from orchestrator.monitoring.times import present
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.calls.insights import list_runs
from orchestrator.sdk.dag.workflows import StoredWorkflow
from orchestrator.sdk.tasks.handle import RunHandle
from orchestrator.settings import load_settings
from orchestrator.store.insights import RunFilter, StepView
from orchestrator.workers.functions import load_app

_NO_APPLICATION = "If it is a workflow as code, say where: --app module:app, or the setting `app`."
_PARAM = re.compile(r"([^=]+)=(.*)", re.DOTALL)


@click.group("runs")
def command() -> None:
    """Start, list, show, watch, cancel, retry and delete runs.

    \b
    Example:
      orchestrator runs start nightly day=2024-01-31 --watch
      orchestrator runs list --status running
    """


@command.command()
@click.argument("workflow")
@click.argument("params", metavar="[KEY=VALUE]…", nargs=-1)
@click.option(
    "--id", "--key", "key", help="An id of your own for the run: a second start with it returns the first run."
)
@click.option("--tag", "tags", multiple=True, help="Add a tag; may be repeated.")
@app_option
@click.option("--wait", is_flag=True, help="Wait for the end; exit with 1 unless it succeeds.")
@click.option("--watch", is_flag=True, help="Draw the run until its end; exit with 1 unless it succeeds.")
@json_option
def start(
    workflow: str,
    params: tuple[str, ...],
    key: str | None,
    tags: tuple[str, ...],
    app: str | None,
    wait: bool,
    watch: bool,
    as_json: bool,
) -> None:
    """Start a run of the newest version of a workflow, and print its id; its final state goes to stderr.

    A workflow as code must be in the application: that of --app, of the setting `app`, or of an `orchestrator dev` that
    runs in this folder. Its arguments are checked, and --id is `starting(id=…)` in Python. For a DAG, --id is the
    idempotency key: `options(key=…)`.

    Each value is JSON if it parses as JSON, else a string; write 'name="5"' for the string of one digit.

    \b
    Example:
      orchestrator runs start nightly day=2024-01-31 --watch
      orchestrator runs start import 'files=["a.csv", "b.csv"]' --id import-7 --tag customer:42
    """
    if wait + watch + as_json > 1 and watch:
        raise click.UsageError("--watch cannot be combined with --wait or --json.")
    arguments = _params(params)
    app_path = load_settings(app=app).app
    code = load_app(app_path).code_workflows.get(workflow) if app_path else None
    existing_ids = _runs_under(key) if key else set()
    with open_app() as application:
        if code is None:
            handle = _stored_workflow(application, workflow, app_path).options(key=key, tags=tags).start(**arguments)
        else:
            started = code.starting(id=key, on_conflict="return", tags=tags).start(**arguments)
            code._client.close()
            handle = application.run(started.id)
        if not as_json and not (watch and on_terminal()):  # the drawing prints the id in its headline
            echo(handle.id)
        if handle.id in existing_ids:
            echo(f"A run with this id was started before; it is in state {handle.progress().status!r}.", err=True)
        if watch:
            sys.exit(follow_run(application, UUID(handle.id), as_json=False))
        status = None
        if wait:
            status = _wait(application, handle)
        if as_json:
            print_json({"id": handle.id, "new": handle.id not in existing_ids, "status": status})
        sys.exit(0 if status in (None, RunState.SUCCESS) else 1)


@command.command("list")
@click.option("--workflow", metavar="NAME", help="Only runs of this workflow.")
@click.option("--version", type=click.IntRange(1), metavar="NUMBER", help="Only runs of this workflow version.")
@status_option(ShownRunState)
@click.option("--tag", "tags", multiple=True, help="Only with this tag; if repeated, with all tags.")
@click.option(
    "--attribute",
    "attributes",
    multiple=True,
    metavar="NAME=VALUE",
    help="Only with this attribute, another value ('stage!=paid') or a range ('total>=100'); may be repeated.",
)
@click.option("--name", help="Only runs of this name.")
@click.option("--stuck", is_flag=True, help="Only stuck runs.")
@click.option(
    "--unreplayed",
    is_flag=True,
    help="Only open runs of workflows as code that no worker has replayed since a deploy.",
)
@click.option("--parent", type=RUN, metavar="ID", help="Only child runs of this run.")
@click.option("--since", type=moment, metavar="TIME", help="Only created since: 2h (ago), or 2024-01-31T09:30.")
@click.option("--until", type=moment, metavar="TIME", help="Only created before this time.")
@page_options(RUN)
@json_option
def list_(statuses: tuple[str, ...], limit: int, before: UUID | None, as_json: bool, **filters: Any) -> None:
    """List runs, newest first.

    \b
    Example:
      orchestrator runs list --workflow nightly --status failed --since 2d
      orchestrator runs list --tag customer:42 --json
    """
    run_filter = RunFilter(statuses=tuple(ShownRunState(status) for status in statuses), **filters)
    with open_calls() as calls:
        runs, more = list_runs(calls.insights, run_filter, limit=limit, before=before)
        format_id = IdFormat(calls, "run", [run.id for run in runs])
    if as_json:
        print_json({"runs": runs, "next": more})
        return
    is_filtered = before or run_filter != RunFilter()
    empty = "No run matches." if is_filtered else "There is no run yet. Start one: orchestrator runs start WORKFLOW"
    print_runs(runs, format_id, present(), empty)
    if more:
        echo(f"Older ones: add --before {format_id(more)}", err=True)


@command.command()
@run_argument
@json_option
def show(run: UUID, as_json: bool) -> None:
    """Show one run: its state, its steps and child runs, and the number of its tasks by state.

    For a workflow as code: its arguments, its result or error, what it waits for, its position in the code, and the
    state that it has published.

    \b
    Example:
      orchestrator runs show 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
      orchestrator runs show 0199b2f4-… --json | jq '.steps[] | select(.state == "failed")'
    """
    with open_calls() as calls:
        if as_json:
            print_json(run_document(calls, find_run(calls, run)))
            return
        run_view = find_run(calls, run)
        steps = calls.insights.list_steps(run)
        children = children_of(calls, run)
        code = calls.insights.show_code(run) if run_view.code else None
        successor = UUID(bytes=successor_id(run.bytes))
        successor_view = calls.insights.show_code(successor) if run_view.reason == RESET else None
        format_id = IdFormat(calls, "run", [child.id for child in children])
    now = present()
    print_run(run_view, code, successor_view, now)
    if steps:
        echo()
        _print_steps(steps, now)
    if children:
        echo("\nChild runs:")
        print_runs(children, format_id, now)
        if len(children) == MAX_CHILDREN:
            echo(f"All of them: orchestrator runs list --parent {run}", err=True)
    if run_view.stuck and run_view.stuck.get("release"):
        echo(f"\nIt is retried by workers of the next release, or by: orchestrator runs retry {run}", err=True)
    elif run_view.stuck:
        echo(f"\n{run_view.stuck['difference']}" if run_view.stuck["difference"] else "", err=True)
        echo(f"It resumes when a worker with matching code starts, or after: orchestrator runs retry {run}", err=True)
    if code is not None:
        print_error(run_view, code)
    if run_view.failed:
        echo(f"\nIts failures: {' and '.join(_failure_commands(run, steps))}", err=True)


def _failure_commands(run: UUID, steps: Sequence[StepView]) -> list[str]:
    """Return the commands that show why a run failed. A step that cannot be evaluated has no task or child run."""
    failed = [step for step in steps if step.failed or step.state == "failed"]
    commands: list[str] = []
    if not steps or any(step.error for step in failed):
        commands.append(f"orchestrator tasks list --run {run} --status failed")
    if any(step.kind == "workflow" and not step.reason for step in failed):
        commands.append(f"orchestrator runs list --parent {run} --status failed")
    if any(step.reason for step in failed) or not commands:
        commands.append(f"orchestrator runs show {run} --json | jq '.steps[] | select(.state == \"failed\")'")
    return commands


@command.command()
@run_argument
@json_option
def watch(run: UUID, as_json: bool) -> None:
    """Show a run's progress until it ends; exit with 1 unless it succeeds. A workflow's steps are drawn.

    Without a terminal, every change is a line. With --json, the run is printed once, when it has ended.

    \b
    Example:
      orchestrator runs watch 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    with open_app() as app:
        sys.exit(follow_run(app, run, as_json=as_json))


@command.command()
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the run ends; with --json, one document per line.")
@click.option("--last", type=click.IntRange(0), metavar="NUMBER", help="Only this many lines from the end.")
@color_option
@json_option
def logs(run: UUID, follow: bool, last: int | None, colour: str, as_json: bool) -> None:
    """Show what the tasks of a run printed, logged and wrote with `ctx.log`, with a color for each step.

    \b
    Example:
      orchestrator runs logs 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 --follow
    """
    with open_app() as app:
        runs = app._client.backend.runs
        runs.progress(run.bytes)  # raises NotFound if there is no such run
        try:
            print_logs(
                lambda after, wait: runs.log(run.bytes, after, wait),
                lambda: runs.progress(run.bytes)[0] in ENDED_RUN_STATES,
                follow=follow,
                as_json=as_json,
                last=last,
                colour=colour,
                with_steps=True,
            )
        except KeyboardInterrupt:
            sys.exit(130)


@command.command()
@runs_argument
@certain_option
def cancel(runs: tuple[UUID, ...], yes: bool) -> None:
    """Cancel runs with all their open tasks and child runs. With several, it asks first.

    \b
    Example:
      orchestrator runs cancel 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    confirm_if_asked(f"Cancel {counted(len(runs), 'run')}?", yes=yes or len(runs) == 1)
    ask_each(runs, lambda app, run: app.run(run).cancel(), "Asked to cancel run {}.")


@command.command()
@runs_argument
def retry(runs: tuple[UUID, ...]) -> None:
    """Retry failed runs: their failed or cancelled steps, then the steps that depend on them; successes are kept.

    \b
    Example:
      orchestrator runs retry 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    ask_each(runs, lambda app, run: app.run(run).retry(), "Asked to retry run {}.")


@command.command()
@runs_argument
@certain_option
def delete(runs: tuple[UUID, ...], yes: bool) -> None:
    """Delete ended runs with their tasks, child runs, logs and results. It asks first; this cannot be undone.

    \b
    Example:
      orchestrator runs delete 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    confirm_if_asked(f"Delete {counted(len(runs), 'run')}? This cannot be undone.", yes=yes)
    ask_each(runs, lambda app, run: app.run(run).delete(), "Asked to delete run {}: it is gone within some seconds.")


@command.command()
@run_argument
@click.option(
    "--from",
    "from_step",
    metavar="STEP",
    help="Repeat this step and those that depend on it; keep all other successes.",
)
@click.option("--wait", is_flag=True, help="Wait for the end; exit with 1 unless it succeeds.")
def rerun(run: UUID, from_step: str | None, wait: bool) -> None:
    """Start a new run of the same workflow version with the same parameters, and print its id.

    For a workflow as code, everything is done again; to keep the events up to a point: runs reset.

    \b
    Example:
      orchestrator runs rerun 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 --from report --wait
    """
    with open_app() as app:
        handle = app.run(run).rerun(from_step=from_step)
        echo(handle.id)
        status = _wait(app, handle) if wait else None
    sys.exit(0 if status in (None, RunState.SUCCESS) else 1)


for _code_command in code_runs.COMMANDS:
    command.add_command(_code_command)


def _stored_workflow(application: Orchestrator, name: str, app_path: str) -> StoredWorkflow:
    """Return a stored workflow. If there is none, the error also says where workflows as code were looked up."""
    workflow = application.workflows[name]
    try:
        workflow.definition()
    except NotFound as error:
        known = load_app(app_path).code_workflows if app_path else {}
        remark = f"The application {app_path} has no workflow as code of this name either.{did_you_mean(name, known)}"
        raise NotFound(f"{error} {remark if app_path else _NO_APPLICATION}") from None
    return workflow


def _wait(application: Orchestrator, handle: RunHandle[Any]) -> str:
    """Wait for the end of a run and print its state; meanwhile print what delays it."""
    obstacles = partial(application._client.backend.tasks.obstacles, UUID(handle.id).bytes)
    status = wait_with_notices(handle.wait_ended, obstacles)
    echo(status, err=True)
    return status


def _runs_under(key: str) -> set[str]:
    with open_calls() as calls:
        return {str(match.run) for match in calls.insights.runs_under(key)}


def _params(arguments: Sequence[str]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for argument in arguments:
        match = _PARAM.fullmatch(argument)
        if match is None:
            raise click.UsageError(f"Parameter {argument!r} has no name. Write NAME={argument}")
        if match[1] in params:
            raise click.UsageError(f"Parameter {match[1]!r} is given twice.")
        params[match[1]] = parse_value(match[2])
    return params


def _print_steps(steps: Sequence[StepView], now: datetime) -> None:
    out = console()
    out.print(Group(*draw_lines(to_lines(steps), now, out.width)))  # as single renderables; a list would be wrapped
    if len(steps) > MAX_LINES:
        echo(f"\nEach of the {len(steps):,} steps: add --json", err=True)
