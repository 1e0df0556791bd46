"""`orchestrator enqueue`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any
from uuid import UUID

import click

from orchestrator.cli.terminal.options import app_option, json_option
from orchestrator.cli.terminal.output import as_json as in_json
from orchestrator.cli.terminal.output import data_text, echo, echo_json, hidden, parse_value, print_json
from orchestrator.cli.terminal.reading import wait_with_notices
from orchestrator.domain.tasks.obstacles import unregistered, workflow_as_task
from orchestrator.errors import Forbidden, InvalidTask, NotFound, UnknownTask, did_you_mean
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.sdk.tasks.task import Task
from orchestrator.settings import load_settings
from orchestrator.workers.functions import load_app

_KEYWORD = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)
Call = tuple[list[Any], dict[str, Any]]


@click.command("enqueue")
@click.argument("name")
@click.argument("arguments", metavar="[ARGS]…", nargs=-1)
@app_option
@click.option("--queue", help="The queue.  [default: the task's own, or `default`]")
@click.option("--priority", type=int, help="From -100 to 100; higher goes first.")
@click.option("--delay", type=float, metavar="SECONDS", help="Delay the start by this many seconds.")
@click.option("--expires", type=float, metavar="SECONDS", help="Fail if it has not started within this many seconds.")
@click.option("--unique-key", metavar="KEY", help="Enqueue only if no task of this name with this key is open.")
@click.option("--idempotency-key", metavar="KEY", help="Enqueue only once with this key.")
@click.option("--retries", type=int, help="How often to retry after a failed attempt.")
@click.option("--timeout", type=float, metavar="SECONDS", help="How long one attempt may run.")
@click.option("--wait", is_flag=True, help="Wait for the result and print it.")
@json_option
def command(name: str, arguments: tuple[str, ...], app: str | None, wait: bool, as_json: bool, **options: Any) -> None:
    """Enqueue a task and print its id.

    Each argument is JSON if it parses as JSON, else a string; KEY=VALUE is a keyword argument. Write '"5"' for the
    string of one digit, '"a=b"' for a string with an equals sign, and put -- before a negative number.

    With an application, the last part of the task's name is enough if it is unique, and the call is checked. Without
    one, the full name is needed, and nothing is checked.

    \b
    Example:
      orchestrator enqueue resize a.png width=200 --wait
      orchestrator enqueue shop.tasks.charge '{"amount": 12.5}' --queue payments --delay 60
    """
    values = {option: value for option, value in options.items() if value is not None}
    settings = load_settings(app=app)
    application = load_app(settings.app) if settings.app else Orchestrator(settings)
    call = _parse(arguments)
    with closing(application):
        warning = None
        if settings.app:
            handle = _enqueue_registered(_find(application, name), call, values)
        else:
            handle, warning = _enqueue_by_name(application, name, call, values)
        if not as_json:
            echo(handle.id, err=wait)
        if warning and not wait:  # waiting prints the obstacles itself
            echo(f"Warning: {warning}", err=True)
        document = {"id": handle.id}
        if wait:
            obstacles = partial(application._client.backend.tasks.obstacles, UUID(handle.id).bytes)
            result = hidden().redacted(wait_with_notices(handle.result, obstacles))
            if not as_json:
                echo_json(data_text(result))
            document["result"] = in_json(result)
        if as_json:
            print_json(document)


def _parse(words: Sequence[str]) -> Call:
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    for word in words:
        if named := _KEYWORD.fullmatch(word):
            if named[1] in keywords:
                raise click.UsageError(f"Argument {named[1]!r} is given twice.")
            keywords[named[1]] = parse_value(named[2])
        elif keywords:
            raise click.UsageError(f"Argument {word!r} has no name and follows one that has; put it before.")
        else:
            arguments.append(parse_value(word))
    return arguments, keywords


def _find(app: Orchestrator, name: str) -> Task[..., Any]:
    """Return the task with this name, or the only one whose name ends with it."""
    if name in app.tasks:
        return app.tasks[name]
    matching = sorted(full for full in app.tasks if full.endswith(f".{name}"))
    if len(matching) == 1:
        return app.tasks[matching[0]]
    if matching:
        raise UnknownTask(f"Several tasks are called {name!r}: {', '.join(matching)}. Give the full name.")
    names = [*app.tasks, *(full.rpartition(".")[2] for full in app.tasks)]
    raise UnknownTask(
        f"No task is called {name!r}.{did_you_mean(name, names)} Known: {', '.join(sorted(app.tasks)) or 'none'}."
    )


def _enqueue_registered(task: Task[..., Any], call: Call, options: dict[str, Any]) -> Handle[Any]:
    arguments, keywords = call
    return task.options(**options).enqueue(*arguments, **keywords)


def _enqueue_by_name(
    app: Orchestrator, name: str, call: Call, options: dict[str, Any]
) -> tuple[Handle[Any], str | None]:
    """Enqueue a task that only the workers know. Return also a warning if no live worker has registered its name."""
    task = call_by_name(app.settings, name, *call, options=options, queue=app._client.route(name))
    warning = _checked_name(app._client.backend, name)
    return app.handle(UUID(bytes=app._client.backend.tasks.enqueue(task))), warning


def _checked_name(calls: Any, name: str) -> str | None:
    """Refuse the name of a workflow. Return a warning for a name that no live worker has registered."""
    try:
        kind = _kind_of(calls, name)
    except (Forbidden, NotFound):  # the key is limited to some queues: the API decides
        return None
    if problem := workflow_as_task(name, kind):
        raise InvalidTask(problem)
    return None if kind == "task" or ":" in name else unregistered(name)


def _kind_of(calls: Any, name: str) -> str | None:
    if any(view.name == name for view in calls.insights.list_code_workflows()):
        return "code"
    if any(name in worker.names for worker in calls.insights.list_workers()):
        return "task"
    with suppress(NotFound):
        steps = calls.workflows.latest(name).definition.steps
        return None if any(step.task == name for step in steps) else "workflow"
    with suppress(NotFound):
        calls.flows.latest(name)
        return "flow"
    return None
