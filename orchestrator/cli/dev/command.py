"""`orchestrator dev`: Postgres, Redis, a scheduler, a worker and the HTTP API, in one terminal."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.dev.app_check import WarningWatch, is_ready, load_problem
from orchestrator.cli.dev.children import RESTART_WINDOW, Child, Console, Restarts, Servers, say
from orchestrator.cli.system.api import PORT
from orchestrator.cli.terminal.options import app_option, log_options
from orchestrator.cli.terminal.reading import reading
from orchestrator.embedded import DATABASE, DEFAULT_FOLDER, EmbeddedServices, remove_services_file, write_services_file
from orchestrator.environment import SERVICES_FILE, hide_environment, read_services_file
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE
from orchestrator.settings import Settings, load_settings
from orchestrator.store import shards
from orchestrator.store.limits import queues
from orchestrator.telemetry import configure_logging
from orchestrator.workers.parent.changes import Changes
from orchestrator.workers.spec import EVERY_QUEUE

_INTERVAL = 0.3
"""Seconds between two checks of the children."""
_MAX_UNREADY = 4
"""Times in a row that a child may be killed before it is ready."""
_STOP_MARGIN = 15.0
"""Seconds that a child gets to end after the drain timeout."""


@click.command("dev", context_settings={"show_default": True})
@app_option
@click.option(
    "--reload/--no-reload", default=True, help="Restart the worker when a *.py file under this folder changes."
)
@click.option("--processes", type=click.IntRange(1), default=1, help="How many worker processes to run.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=PORT, help="The port of the HTTP API; another one if it is taken."
)
@click.option(
    "--allow-command",
    "commands",
    multiple=True,
    metavar="PROGRAM",
    help="Let the executor process run this program, as `orchestrator worker` does. May be repeated.",
)
@log_options
def command(
    app: str | None,
    reload: bool,
    processes: int,
    port: int,
    commands: tuple[str, ...],
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Run everything in this terminal: embedded Postgres and Redis, a scheduler, a worker for all queues of the
    application and its workflows, and the HTTP API. The schedules that the application declares are applied on every
    change.

    Data is kept in .orchestrator/ in this folder. A database_url or redis_url that is set in the environment or in
    pyproject.toml replaces the embedded server. Other orchestrator commands in this folder use the same services.
    Ctrl-C stops everything in order; a second one stops faster.

    \b
    Example:
      orchestrator dev --app shop.tasks:app
    """
    logs: dict[str, Any] = {"log_level": log_level, "log_format": log_format}
    settings_for_logs = load_settings(**logs)
    console = Console(settings_for_logs.log_format)
    configure_logging(settings_for_logs.log_level, settings_for_logs.log_format, into=console)
    hide_environment()
    with _interrupts() as interrupts, ExitStack() as stack:
        settings, services = _start_services(stack, app, logs, reload)
        if interrupts.requested.is_set():
            sys.exit(0)
        team = _Team(settings, processes, port, commands, reload, services, interrupts, console)
        stack.callback(team.stop)
        team.start()
        sys.exit(team.watch())


class Interrupts:
    """Events for Ctrl-C, SIGTERM and SIGHUP: the first signal requests a stop, the second an urgent one."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.urgent = threading.Event()
        self._is_first = True

    def note(self, *_: object) -> None:
        """Set the next event. This is a signal handler."""
        event, self._is_first = self.requested if self._is_first else self.urgent, False
        # The signal may interrupt the main thread while it holds the event's lock: set the event in another thread.
        threading.Thread(target=event.set, name="stop", daemon=True).start()


@contextmanager
def _interrupts() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupts.note) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_services(
    stack: ExitStack, app: str | None, logs: Mapping[str, Any], reload: bool
) -> tuple[Settings, EmbeddedServices]:
    """Start the servers that the settings do not name, migrate the schema, and publish the URLs for other commands.

    Nothing is started if the application cannot be loaded. The stack undoes everything.

    Return the settings with the URLs, and the servers, of which only the started ones run.
    """
    services = EmbeddedServices(DEFAULT_FOLDER)
    services.postgres.claim()  # raises if another `orchestrator dev` runs in this folder
    stack.callback(services.stop)
    services.redis.claim()
    remove_services_file(services.folder)  # a leftover of a crash names services that are gone
    (services.folder / ".gitignore").write_text("*\n", encoding="utf-8")
    settings = _without_services_file(load_settings(app=app, **logs), app)
    if settings.app and (problem := load_problem(settings.app, retryable=reload)) is not None:
        say("dev", problem, logging.ERROR)
        sys.exit(1)
    if not settings.database_url:
        services.postgres.start()
        say("dev", f"{services.postgres.program} has started in {DEFAULT_FOLDER}/postgres")
        settings = replace(settings, database_url=services.postgres.create_database(DATABASE))
    if not settings.redis_url:
        services.redis.start()
        say("dev", f"{services.redis.program} has started in {DEFAULT_FOLDER}/redis")
        settings = replace(settings, redis_url=services.redis_url)
    shards.upgrade(settings)
    urls = {"database_url": settings.database_url, "redis_url": settings.redis_url}
    write_services_file(services.folder, **urls, app=settings.app, pid=os.getpid())
    stack.callback(remove_services_file, services.folder)
    stack.callback(say, "dev", "stopping the services")
    return settings, services


def _without_services_file(settings: Settings, app: str | None) -> Settings:
    """Return the settings without the URLs and the app that an `orchestrator dev` in a parent folder has published."""
    path = next((path for parent in Path.cwd().parents if (path := parent / SERVICES_FILE).is_file()), None)
    if path is None:
        return settings
    published = read_services_file(path)
    return replace(
        settings,
        database_url="" if settings.database_url == published.get("database_url") else settings.database_url,
        redis_url="" if settings.redis_url == published.get("redis_url") else settings.redis_url,
        app="" if app is None and settings.app == published.get("app") else settings.app,
    )


class _Team:
    """The scheduler, the worker and the API. A killed child is restarted; if one fails, all end.

    The embedded servers are restarted however they ended: clients wait for them.
    """

    def __init__(
        self,
        settings: Settings,
        processes: int,
        port: int,
        commands: tuple[str, ...],
        reload: bool,
        services: EmbeddedServices,
        interrupts: Interrupts,
        console: Console,
    ) -> None:
        self._console = console
        self._settings = settings
        self._processes = processes
        self._port = port
        self._commands = commands
        self._reload = reload
        self._servers = Servers((services.postgres, services.redis))
        self._may_prune = services.postgres.running
        """Whether schedules that left the code are deleted: only in an embedded database, which nobody shares."""
        self._interrupts = interrupts
        self._children: dict[str, Child] = {}
        self._options: dict[str, tuple[str, ...]] = {}
        """The command-line options of each child, by role."""
        self._restarts = Restarts()
        self._unready: dict[str, int] = {}
        """How often in a row each child was killed before it was ready, by role."""
        self._warnings = WarningWatch(settings)
        self._changes = Changes(Path.cwd()) if reload and settings.app else None
        self._schedules_due = bool(settings.app)
        self._is_ready = False
        self._queues = {DEFAULT_QUEUE}
        """Queues that a worker serves, besides those of the application."""

    def start(self) -> None:
        """Start the scheduler, the API and, if there is an application, a worker."""
        self._start("scheduler")
        self._serve_api()
        if self._settings.app:
            with reading(self._settings) as connection:
                self._queues |= queues.of_workflows(connection)
            self._start_worker("worker", EVERY_QUEUE, *sorted(self._queues))
        else:
            say(
                "dev",
                "no application is given, so no worker runs. Give it with --app module:app, or as "
                'app = "module:app" under [tool.orchestrator] in pyproject.toml',
                logging.WARNING,
            )

    def _say_when_ready(self) -> None:
        """Log once that a scheduler leads, the API serves and, with an application, the worker is live."""
        if self._is_ready or ("api" in self._children and not self._children["api"].is_ready.is_set()):
            return
        if is_ready(self._settings, workers=self._processes if self._settings.app else 0):
            self._is_ready = True
            say("dev", "✓ ready. Ctrl-C stops everything; see `orchestrator status`")

    def _serve_api(self) -> None:
        """Serve the HTTP API with the dashboard, if its packages are installed. The API logs its addresses itself."""
        if any(find_spec(name) is None for name in ("jinja2", "starlette", "uvicorn")):
            say("dev", "the HTTP API is not served: it needs the extra `api`")
        else:
            self._start("api", "--port", str(self._port), "--or-any")

    def watch(self) -> int:
        """Watch the children until the user stops them or one fails; return the exit code."""
        while not self._interrupts.requested.wait(_INTERVAL):
            if not self._servers.restart_ended():
                self._interrupts.urgent.set()  # without its server, no child can finish its work
                return 1
            for role, child in list(self._children.items()):
                if child.exit_code is not None and role == "schedules":
                    del self._children[role]  # the child has logged its errors itself
                elif child.exit_code is not None and not self._start_again(role, child, child.exit_code):
                    return 1
            for role in self._restarts.take_due():
                self._start(role, *self._options[role])
            self._apply_schedules()
            self._say_when_ready()
            for message in self._warnings.new_warnings():
                say("dev", message, logging.WARNING)
            self._serve_new_queues()
        return 0

    def _start_again(self, role: str, child: Child, exit_code: int) -> bool:
        """Plan the restart of a child that was killed or drained. Return False if it failed, or never gets ready."""
        was_drained = exit_code == 0 and role.startswith("worker")
        if exit_code >= 0 and not was_drained:
            say("dev", f"the {role} has ended unexpectedly, with exit code {exit_code}", logging.ERROR)
            return False
        how = f"the {role} was drained" if was_drained else f"the {role} was killed by signal {-exit_code}"
        was_ready = child.is_ready.is_set() or time.monotonic() - child.started_at > RESTART_WINDOW
        self._unready[role] = 0 if was_ready else self._unready.get(role, 0) + 1
        if self._unready[role] == _MAX_UNREADY:
            say("dev", f"{how} before it was ready, {_MAX_UNREADY} times in a row: giving up", logging.ERROR)
            return False
        self._restarts.plan(role, how)
        del self._children[role]
        return True

    def _apply_schedules(self) -> None:
        """Apply the schedules that the code declares, at the start and after every file change."""
        if self._changes is not None and self._changes.poll():
            self._schedules_due = True
        if self._schedules_due and "schedules" not in self._children:
            self._schedules_due = False
            prune = ["--prune"] if self._may_prune else []
            self._start("schedules", "apply", "--quiet", "--app", self._settings.app, *prune)

    def _serve_new_queues(self) -> None:
        """Start a worker for queues that workflows have named since the first worker was started."""
        new_queues = sorted(self._warnings.unserved - self._queues) if self._settings.app else []
        if new_queues:
            self._queues.update(new_queues)
            say("dev", f"a workflow names {', '.join(new_queues)}: starting a worker for that")
            self._start_worker(f"worker of {', '.join(new_queues)}", *new_queues)

    def stop(self) -> None:
        """Stop the workers, then the scheduler, so that it records their last reports."""
        for role in sorted(self._children, key=lambda role: role == "scheduler"):
            self._stop(role)

    def _start_worker(self, role: str, *names: str) -> None:
        options = ["--queues", ",".join(names), "--processes", str(self._processes), "--allow", ".", "--database"]
        options += [word for program in self._commands for word in ("--allow-command", program)]
        reload = ["--reload"] if self._reload else []
        self._start(role, "--app", self._settings.app, *options, *reload)

    def _start(self, role: str, *options: str) -> None:
        environment = {
            "ORCHESTRATOR_DATABASE_URL": self._settings.database_url,
            "ORCHESTRATOR_REDIS_URL": self._settings.redis_url,
            "ORCHESTRATOR_API_URL": "",  # an HTTP API in the parent's environment must not be used
            "ORCHESTRATOR_LOG_LEVEL": self._settings.log_level,
            "ORCHESTRATOR_LOG_FORMAT": self._settings.log_format,
        }
        command = role.partition(" ")[0]
        self._options[role] = options
        self._children[role] = Child(command, [command, *options], environment, self._console.pass_on)

    def _stop(self, role: str) -> None:
        child = self._children.pop(role, None)
        if child is not None and child.exit_code is None:
            say("dev", f"stopping the {role}")
            child.stop(self._settings.drain_timeout + _STOP_MARGIN, self._interrupts.urgent)
