"""`orchestrator celery`: Celery's command line for programs that use orchestrator.compat.celery."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from orchestrator.cli.fleet import scheduler, worker
from orchestrator.cli.schedules import commands as schedules
from orchestrator.cli.terminal.output import echo
from orchestrator.compat.celery import Celery, signals
from orchestrator.compat.celery.app.calls import aware_datetime
from orchestrator.compat.celery.conf import stores
from orchestrator.compat.celery.exceptions import NotCovered
from orchestrator.domain.durations import parse_duration
from orchestrator.errors import ConfigurationError
from orchestrator.settings import load_settings
from orchestrator.workers.functions import broken, load_app

F = TypeVar("F", bound=Callable[..., Any])
_POOLS = {"prefork": True, "processes": True, "threads": False, "solo": False}
"""Whether a pool runs each task in its own process."""
_INSPECTED = (
    *("active", "active_queues", "clock", "conf", "ping", "query_task", "registered", "report", "reserved", "revoked"),
    *("scheduled", "stats"),
)
_ALTERNATIVES = {
    "events": "Use `orchestrator top`, or the dashboard.",
    "flower": "Use `orchestrator dev --port 8080` or `orchestrator api`: the dashboard.",
    "graph": "`orchestrator runs show ID` draws the graph of a run.",
    "migrate": "See docs/from-celery.md.",
    "multi": "A worker has many processes: -c. Let a service manager start and stop it.",
    "shell": "Run python, and import the application.",
    "amqp": "There is no RabbitMQ.",
    "upgrade": "Settings are read under old and new names.",
    "logtool": "Logs are lines of `event name=value`; --log-format json makes JSON of them.",
}


def _ignored(*names: str, **options: Any) -> Callable[[F], F]:
    """Accept an option of Celery and ignore it."""
    return click.option(*names, hidden=True, expose_value=False, help="It has no effect here.", **options)


class _Commands(click.Group):
    """Celery's commands; an unsupported command's error names an alternative."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; for an unsupported one, a command that raises NotCovered."""
        if instead := _ALTERNATIVES.get(cmd_name):
            return _refusing_command(cmd_name, instead)
        return super().get_command(ctx, cmd_name)


@click.group("celery", cls=_Commands)
@click.option("-A", "--app", "where", metavar="MODULE", help="The program: `proj`, `proj.celery` or `proj.celery:app`.")
@_ignored("-b", "--broker")
@click.option("--workdir", metavar="FOLDER", help="Change to this folder first.")
@click.pass_context
def command(context: click.Context, where: str | None, workdir: str | None) -> None:
    """Run Celery's commands for a program that uses orchestrator.compat.celery.

    \b
    Example:
      orchestrator celery -A proj worker -Q default,mail -c 8 -l info
      orchestrator celery -A proj beat
      orchestrator celery -A proj inspect active
    """
    if workdir is not None:
        os.chdir(workdir)
    context.obj = where


def _load_program(context: click.Context) -> tuple[str, Celery]:
    """Return the application and its path. Export its Redis and Postgres URLs as settings, if these are not set."""
    if context.obj is None:
        raise click.UsageError("Name the program: orchestrator celery -A proj …")
    path = _resolve(context.obj)
    load_app(path)
    module, _, name = path.partition(":")
    app: Celery = getattr(sys.modules[module], name)
    settings = load_settings()
    for setting, url in stores(app.conf).items():
        if not getattr(settings, setting):
            os.environ[f"ORCHESTRATOR_{setting.upper()}"] = url
    return path, app


def _resolve(path: str) -> str:
    """Resolve Celery's --app (a module, a package with a module `celery`, or an attribute) to `module:app`."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if ":" in path:
        return path
    package, _, attribute = path.rpartition(".")
    candidates = [(path, None), (f"{path}.celery", None), (f"{path}.app", None), (package, attribute)]
    for module, attribute_ in candidates:
        try:
            if not module or not _exists(module):
                continue
            names = vars(importlib.import_module(module))
        except (Exception, SystemExit) as error:
            raise broken(module, error) from error
        apps = {name: value for name, value in names.items() if type(value) is Celery}
        for name in (attribute_, "app", "celery", *apps):
            if name in apps:
                return f"{module}:{name}"
    raise ConfigurationError(f"No application of orchestrator.compat.celery was found in {path!r} or in its `celery`.")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # an import inside the package failed
        return False


@command.command("worker")
@click.option("-Q", "--queues", metavar="A,B", help="The queues to serve.")
@click.option("-c", "--concurrency", type=click.IntRange(1), help="How many tasks run at once.")
@click.option("-P", "--pool", help="prefork (processes), threads or solo.")
@click.option("-l", "--loglevel", default="info", help="Log this and above.")
@_ignored("-n", "--hostname", "-O", "-f", "--logfile", "--pidfile", "--prefetch-multiplier", "-s", "--schedule")
@click.option("-B", "--beat", is_flag=True, help="Store the schedules first; a scheduler fires them.")
@click.option("--autoscale", metavar="MAX,MIN", help="The maximum and minimum number of processes.")
@click.option("--max-tasks-per-child", type=click.IntRange(1), help="Replace a process after this many tasks.")
@click.option(
    "--max-memory-per-child", type=click.IntRange(1), metavar="KIB", help="Replace a process above this size."
)
@click.option("--purge", "--discard", "purges", is_flag=True, help="Cancel the waiting tasks first.")
@_ignored("-E", "--task-events", "--without-gossip", "--without-mingle", "--without-heartbeat", is_flag=True)
@click.pass_context
def run_worker(
    context: click.Context,
    queues: str | None,
    concurrency: int | None,
    pool: str | None,
    loglevel: str,
    beat: bool,
    autoscale: str | None,
    max_tasks_per_child: int | None,
    max_memory_per_child: int | None,
    purges: bool,
) -> None:
    """Run tasks, as `orchestrator worker` does.

    \b
    Example:
      orchestrator celery -A proj worker -Q default,mail -c 8 -l info
    """
    path, app = _load_program(context)
    conf = app.conf
    pool = pool or conf.worker_pool
    if pool not in _POOLS:
        raise NotCovered(f"the pool {pool!r}", "Use -P threads.")
    count = 1 if pool == "solo" else concurrency or conf.worker_concurrency or os.cpu_count() or 1
    processes, slots = (count, 1) if _POOLS[pool] else (1, count)
    words = ["--app", path, "--concurrency", str(slots), "--log-level", loglevel.lower().replace("critical", "error")]
    if autoscale is not None:
        maximum, _, minimum = autoscale.partition(",")
        words += ["--autoscale", f"{minimum or 1},{maximum}"]
    else:
        words += ["--processes", str(processes)]
    queue_names = queues.split(",") if queues else [getattr(queue, "name", queue) for queue in conf.task_queues or ()]
    queue_names = queue_names or ([conf.task_default_queue] if conf.is_given("task_default_queue") else [])
    if queue_names:
        words += ["--queues", ",".join(dict.fromkeys(app._queue(name) for name in queue_names))]
    if per_child := max_tasks_per_child or conf.worker_max_tasks_per_child:
        words += ["--max-tasks-per-process", str(per_child)]
    if memory := max_memory_per_child or conf.worker_max_memory_per_child:
        words += ["--max-memory", f"{max(32, memory // 1024)}MB"]
    if purges:
        app.control.purge()
    if beat:
        _store_schedules(path)
    echo(f"orchestrator worker {' '.join(words)}", err=True)
    worker.command.main(words, prog_name="orchestrator worker")


@command.command("beat")
@click.option("-l", "--loglevel", default="info", help="Log this and above.")
@click.option("-S", "--scheduler", "kind", hidden=True, help="Celery's scheduler class, which is not needed here.")
@_ignored("-s", "--schedule", "--pidfile", "-f", "--logfile", "--max-interval")
@click.pass_context
def beat(context: click.Context, loglevel: str, kind: str | None) -> None:
    """Store the schedules, and run a scheduler, which fires them. Several schedulers may run.

    \b
    Example:
      orchestrator celery -A proj beat
    """
    path, app = _load_program(context)
    if kind is not None and "database" in kind.lower():
        raise NotCovered(f"beat with the scheduler {kind!r}", "app.orchestrator.schedules.set(…) changes schedules.")
    signals.beat_init.send(app)
    _store_schedules(path)
    scheduler.command.main(["--log-level", loglevel.lower()], prog_name="orchestrator scheduler")


def _store_schedules(path: str) -> None:
    schedules.command.main(["apply", "--app", path, "--prune"], standalone_mode=False)


@command.command("inspect")
@click.argument("method", type=click.Choice(_INSPECTED))
@click.argument("arguments", nargs=-1)
@click.option("-d", "--destination", metavar="A,B", help="Only these workers.")
@_ignored("-t", "--timeout")
@_ignored("-j", "--json", is_flag=True)
@click.pass_context
def inspect(context: click.Context, method: str, arguments: tuple[str, ...], destination: str | None) -> None:
    """Show the state of workers, as JSON.

    \b
    Example:
      orchestrator celery -A proj inspect active
    """
    _, app = _load_program(context)
    _print(getattr(app.control.inspect(destination.split(",") if destination else None), method)(*arguments))


@command.command("status")
@click.pass_context
def status(context: click.Context) -> None:
    """List the workers.

    \b
    Example:
      orchestrator celery -A proj status
    """
    _, app = _load_program(context)
    names = app.control.inspect().names()
    for name in names:
        echo(f"->  {name}: OK")
    echo(f"\n{len(names)} node{'s' * (len(names) != 1)} online.")


def _parser(read: Callable[[str], Any], kind: type) -> Callable[..., Any]:
    """Return a click callback that parses an option, and raises BadParameter if it is malformed or not a `kind`."""

    def callback(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Any:
        try:
            value = None if text is None else read(text)
        except ValueError as error:
            raise click.BadParameter(f"{text!r}: {error}.") from error
        if text is not None and not isinstance(value, kind):
            raise click.BadParameter(f"expected a JSON {'object' if kind is dict else 'array'}, found {text!r}.")
        return value

    return callback


def _expiry(text: str) -> Any:
    return parse_duration(f"{text}s" if text.isdecimal() else text) or aware_datetime(text)


_ARRAY, _OBJECT = _parser(json.loads, list), _parser(json.loads, dict)
_TIME, _EXPIRY = _parser(aware_datetime, object), _parser(_expiry, object)


@command.command("call")
@click.argument("name")
@click.option(
    "-a",
    "--args",
    "given",
    default="[]",
    metavar="JSON",
    callback=_parser(json.loads, list),
    help="Positional arguments.",
)
@click.option("-k", "--kwargs", "named", default="{}", metavar="JSON", callback=_OBJECT, help="Arguments by name.")
@click.option("--eta", callback=_TIME, help="Not before this time.")
@click.option("--countdown", type=float, help="Not before this many seconds.")
@click.option(
    "--expires",
    callback=_parser(_expiry, object),
    help="Fail if it has not started by this time, or within this many seconds.",
)
@click.option("--queue", help="The queue.")
@click.pass_context
def call(context: click.Context, /, name: str, given: list[Any], named: dict[str, Any], **options: Any) -> None:
    """Call a task by its name, and print the id of the call.

    \b
    Example:
      orchestrator celery -A proj call shop.tasks.charge -a '[17]' --countdown 10
    """
    _, app = _load_program(context)
    given_options = {option: value for option, value in options.items() if value is not None}
    echo(app.send_task(name, given, named, **given_options).id)


@command.command("result")
@click.argument("task_id")
@click.option("--traceback", is_flag=True, help="Print the traceback.")
@click.pass_context
def result(context: click.Context, task_id: str, traceback: bool) -> None:
    """Print the result of a call.

    \b
    Example:
      orchestrator celery -A proj result 0199cf5e-8f10-7c3e-9d3a-2f1b6f0f6a11
    """
    _, app = _load_program(context)
    task_result = app.AsyncResult(task_id)
    echo(str(task_result.traceback if traceback else task_result.get()))


@command.command("purge")
@click.option("-f", "--force", is_flag=True, help="Do not ask.")
@click.pass_context
def purge(context: click.Context, force: bool) -> None:
    """Cancel the waiting tasks in the program's queues.

    \b
    Example:
      orchestrator celery -A proj purge -f
    """
    _, app = _load_program(context)
    if not force:
        click.confirm("This cancels all waiting tasks. Continue?", abort=True)
    echo(f"Purged {app.control.purge()} messages from known task queues.")


@command.command("control")
@click.argument("method", type=click.Choice(["revoke", "terminate", "shutdown"]))
@click.argument("arguments", nargs=-1)
@click.pass_context
def control(context: click.Context, method: str, arguments: tuple[str, ...]) -> None:
    """Revoke tasks, or drain the workers.

    \b
    Example:
      orchestrator celery -A proj control revoke 0199cf5e-8f10-7c3e-9d3a-2f1b6f0f6a11
    """
    _, app = _load_program(context)
    if method == "shutdown":
        app.control.shutdown()
    else:
        app.control.revoke(arguments[-1:] if method == "terminate" else arguments, terminate=method == "terminate")


def _print(value: Any) -> None:
    if value is None:
        raise click.ClickException("No nodes replied: no worker has been seen.")
    echo(json.dumps(value, indent=2, default=str))


def _refusing_command(name: str, instead: str) -> click.Command:
    def refuse() -> None:
        raise NotCovered(f"celery {name}", instead)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=refuse, hidden=True, context_settings=anything)
