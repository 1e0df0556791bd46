"""`orchestrator workflows` and `orchestrator events`."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable
from contextlib import closing
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any

import click

from orchestrator.cli.code.replay_check import export, replay_check
from orchestrator.cli.terminal.options import app_option, json_option, yes_option
from orchestrator.cli.terminal.output import confirm, counted, echo, print_json, print_table
from orchestrator.cli.terminal.reading import open_app, open_calls
from orchestrator.domain.dag.definition import Definition
from orchestrator.errors import InvalidWorkflow, NotFound, OrchestratorError
from orchestrator.monitoring.times import ago, present
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.calls.interface import Calls
from orchestrator.sdk.dag import definitions, document
from orchestrator.sdk.dag.registered import copy_task_options
from orchestrator.sdk.schedules import pages
from orchestrator.settings import load_settings
from orchestrator.store.dag.workflows import Stored
from orchestrator.store.insights import CodeWorkflowView
from orchestrator.workers.functions import load_app

files_argument = click.argument(
    "files", metavar="FILE…", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False)
)
elsewhere_option = click.option(
    "--elsewhere", multiple=True, metavar="TASK", help="A task that another application has. May be repeated."
)
_MAX_SCHEDULES = 3
"""Schedules of one workflow that the list prints, at most."""


@click.group("workflows")
def command() -> None:
    """Check, apply and show workflow definitions.

    \b
    Example:
      orchestrator workflows apply nightly.yaml
      orchestrator runs start nightly --watch
    """


command.add_command(export)
command.add_command(replay_check)


@command.command()
@files_argument
@click.option("--app", metavar="MODULE:APP", help="Also check the steps against the tasks of this application.")
@elsewhere_option
@json_option
def validate(files: tuple[str, ...], app: str | None, elsewhere: tuple[str, ...], as_json: bool) -> None:
    """Check workflow files and print every problem; exit with 1 if a file is invalid. Needs no services.

    With --app, also check that the application has the tasks, and that the tasks have parameters for their inputs.

    \b
    Example:
      orchestrator workflows validate workflows/*.yaml --app shop.tasks:app
    """
    application = load_app(app) if app else None
    results = {file: _checked(file, application, elsewhere) for file in files}
    if as_json:
        print_json({"files": [_verdict(file, result) for file, result in results.items()]})
    else:
        for file, result in results.items():
            if isinstance(result, Definition):
                echo(f"{file}: {result.name}, {counted(len(result.steps), 'task')}, valid")
            else:
                echo(str(result), colour="red", err=True)
    sys.exit(0 if all(isinstance(result, Definition) for result in results.values()) else 1)


@command.command()
@files_argument
@app_option
@elsewhere_option
@json_option
def apply(files: tuple[str, ...], app: str | None, elsewhere: tuple[str, ...], as_json: bool) -> None:
    """Store definitions so that they can be started. If one file is invalid, none is stored.

    A changed body becomes a new version; open runs keep their version. Applying the same body again changes nothing.
    With an application, steps inherit the options of its tasks (limits, retries, timeouts, queues), so a change of
    these options also changes the body. A task that the application lacks is refused, and so is input for a parameter
    that the task lacks.

    \b
    Example:
      orchestrator workflows apply workflows/*.yaml --app shop.tasks:app
    """
    applied = []
    with closing(_application(app)) as application:
        checked = [_checked(file, application, elsewhere) for file in files]
        refusals = [result for result in checked if isinstance(result, InvalidWorkflow)]
        if refusals:
            raise InvalidWorkflow("\n".join(map(str, refusals)))
        for definition in checked:
            assert isinstance(definition, Definition)
            version, is_new = application._client.backend.workflows.apply(definition)
            applied.append({"name": definition.name, "version": version, "new": is_new})
            if not as_json:
                echo(f"{definition.name}: version {version} ({'new' if is_new else 'unchanged'})")
        is_new = any(item["new"] for item in applied)
        if is_new and not application.tasks and any(_names_a_task(definition) for definition in checked):
            echo(_WITHOUT_APPLICATION, err=True)
    if as_json:
        print_json({"applied": applied})


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the newest version of each workflow, and the workflows as code that have live workers or open runs.

    \b
    Example:
      orchestrator workflows list
      orchestrator workflows list --json | jq -r '.workflows[].name'
    """
    with open_calls() as calls:
        stored_workflows = calls.workflows.list_latest()
        code = calls.insights.list_code_workflows()
        times: dict[str, list[str]] = {}
        for schedule in chain.from_iterable(pages(calls.schedules)):
            texts = times.setdefault(schedule.workflow, [])
            if len(texts) <= _MAX_SCHEDULES:
                texts.append(schedule.schedule.description() if len(texts) < _MAX_SCHEDULES else "…")
    if as_json:
        print_json({"workflows": [_summary(stored) for stored in stored_workflows], "code": code})
        return
    now = present()
    print_table(
        ("name…", "version…>", "tasks>?", "params…?", "starts…", "applied", "description…?"),
        [
            (
                stored.name,
                stored.version,
                len(stored.definition.steps),
                ", ".join(stored.definition.params),
                ", ".join([*times.get(stored.name, []), *_events(stored.definition)]),
                ago(stored.created_at, now),
                stored.definition.description.partition("\n")[0],
            )
            for stored in stored_workflows
        ]
        + [
            (
                view.name,
                ", ".join(map(str, view.versions)),
                "code",
                "",
                ", ".join(times.get(view.name, [])),
                "",
                _about_code(view, now),
            )
            for view in code
        ],
        empty="There is no workflow yet. Apply one (orchestrator workflows apply FILE), or start workers with an "
        "application that has workflows as code.",
    )


@command.command()
@click.argument("name")
@click.option("--version", type=click.IntRange(1, 2**31 - 1), help="The version to show.  [default: the newest]")
@json_option
def show(name: str, version: int | None, as_json: bool) -> None:
    """Print a workflow as YAML.

    \b
    Example:
      orchestrator workflows show nightly --version 3 > nightly.yaml
    """
    with open_calls() as calls:
        stored = _stored(calls, name, version)
    if as_json:
        print_json(_summary(stored) | {"hash": stored.hash, "definition": stored.definition})
    else:
        echo(document.to_yaml(stored.definition), nl=False)


@command.command()
@click.argument("file", type=click.Path(dir_okay=False))
@app_option
@elsewhere_option
@json_option
def diff(file: str, app: str | None, elsewhere: tuple[str, ...], as_json: bool) -> None:
    """Show what applying a file would change. Exit with 0 if nothing, 1 if something, 2 if the comparison fails.

    Both sides are printed in the same form: comments, order and spelling make no difference. Options that steps inherit
    from the application's tasks appear under `registered`.

    \b
    Example:
      orchestrator workflows diff nightly.yaml || orchestrator workflows apply nightly.yaml
    """
    try:
        with closing(_application(app)) as application:
            definition = _loaded(file, application, elsewhere)
        with open_calls() as calls:
            stored = _latest(calls, definition.name)
    except OrchestratorError as error:
        raise _ComparisonFailed(str(error)) from error
    lines = list(_diff(stored, definition, file))
    if as_json:
        print_json({"name": definition.name, "different": bool(lines), "diff": "".join(lines)})
    else:
        for line in lines:
            echo(line, colour=_DIFF_COLOURS.get(line[0]), nl=False)
    sys.exit(1 if lines else 0)


@command.command()
@click.argument("name")
@yes_option
def delete(name: str, yes: bool) -> None:
    """Delete a workflow and its schedules: it no longer starts. Its runs and their history stay; open runs continue,
    and `runs rerun` runs one again.

    \b
    Example:
      orchestrator workflows delete nightly --yes
    """
    with open_calls() as calls:
        stored = _stored(calls, name)
        confirm(f"Delete workflow {name!r}, version {stored.version} and all before it?", yes=yes)
        calls.workflows.delete(name)
    echo(f"Deleted workflow {name!r} and its schedules. Its runs and their history are kept.")


@command.command()
def schema() -> None:
    """Print the JSON Schema of workflow files, for editors.

    \b
    Example:
      orchestrator workflows schema > workflow.schema.json
      # and in the first line of a file: # yaml-language-server: $schema=workflow.schema.json
    """
    print_json(definitions.schema())


_WITHOUT_APPLICATION = (
    "Note: no application is given, so steps have only the options in the file. To apply the options of "
    "@app.task, pass --app module:app or set the setting app."
)


def _names_a_task(definition: Definition | InvalidWorkflow) -> bool:
    """Return whether a step names a task that an application may register, rather than a function by its path."""
    steps = definition.steps if isinstance(definition, Definition) else ()
    return any(step.task is not None and ":" not in step.task for step in steps)


def _application(app: str | None) -> Orchestrator:
    """Return the application, or an empty one if the settings name none."""
    settings = load_settings(app=app) if app else load_settings()
    return load_app(settings.app) if settings.app else Orchestrator(settings)


def _loaded(file: str, application: Orchestrator | None, elsewhere: Iterable[str]) -> Definition:
    tasks = {} if application is None else application.tasks
    return definitions.load(file, partial(copy_task_options, tasks=tasks, elsewhere=elsewhere))


def _checked(file: str, application: Orchestrator | None, elsewhere: Iterable[str]) -> Definition | InvalidWorkflow:
    try:
        return _loaded(file, application, elsewhere)
    except InvalidWorkflow as error:
        return error


def _verdict(file: str, result: Definition | InvalidWorkflow) -> dict[str, Any]:
    if isinstance(result, Definition):
        return {"file": file, "valid": True, "name": result.name, "tasks": len(result.steps), "problems": []}
    return {"file": file, "valid": False, "name": None, "tasks": None, "problems": str(result).splitlines()}


def _stored(calls: Calls, name: str, version: int | None = None) -> Stored:
    return calls.workflows.read(name, version) if version else calls.workflows.latest(name)


def _latest(calls: Calls, name: str) -> Stored | None:
    try:
        return calls.workflows.latest(name)
    except NotFound:
        return None


def _summary(stored: Stored) -> dict[str, Any]:
    definition = stored.definition
    return {
        "name": stored.name,
        "version": stored.version,
        "description": definition.description,
        "tasks": len(definition.steps),
        "params": list(definition.params),
        "schedule": definition.schedule,
        "tags": definition.tags,
        "applied_at": stored.created_at,
    }


def _about_code(view: CodeWorkflowView, now: datetime) -> str:
    workers = counted(view.workers, "live worker") if view.workers else "no live worker"
    draining = [
        f"version {one.version} draining: {counted(one.open_runs, 'run')}, the oldest {one.oldest} from "
        f"{ago(one.since, now)}{'' if one.served else ', no live worker has it'}"
        for one in view.draining
    ]
    return "; ".join([f"{workers}, {counted(view.open_runs, 'open run')}", *draining])


def _events(definition: Definition) -> list[str]:
    """Return the events and other workflows that start a workflow, in addition to its schedules."""
    return [f"event {on.event}" if on.event else f"{on.workflow} {on.state}" for on in definition.on]


class _ComparisonFailed(click.ClickException):
    """The two sides could not be compared."""

    exit_code = 2


_DIFF_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def _diff(stored: Stored | None, definition: Definition, file: str) -> list[str]:
    before, after = document.compared(None if stored is None else stored.definition, definition)
    label = "/dev/null" if stored is None else f"{stored.name} version {stored.version}"
    return list(
        difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), label, str(file))
    )


@click.group("events")
def events() -> None:
    """Post events that workflows wait for.

    \b
    Example:
      orchestrator events post file.arrived '{"path": "in/a.csv"}'
    """


@events.command()
@click.argument("name")
@click.argument("payload", metavar="[JSON]", required=False)
def post(name: str, payload: str | None) -> None:
    """Post an event. Every workflow with `on: {event: NAME}` whose filter it passes is started.

    \b
    Example:
      orchestrator events post file.arrived '{"path": "in/a.csv", "size": 12}'
      orchestrator events post deployed
    """
    document = None if payload is None else _parse(payload)
    with open_app() as app:
        app.post_event(name, document)
        listeners = app._client.backend.workflows.listeners(name)
    if listeners:
        echo(
            f"Posted {name}. It starts a run of each of these workflows whose filter it matches: {', '.join(listeners)}"
        )
    else:
        echo(f"Posted {name}. No workflow waits for it, so it starts nothing: orchestrator workflows list")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"""The payload is not JSON: {error}. Quote it: '{{"path": "in/a.csv"}}'.""") from None
