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

from orchestrator.cli.dev.app_check import WarningWatch, is_ready, what_is_wrong
from orchestrator.cli.dev.children import LATELY, Child, Console, Restarts, Servers, say
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
"""Seconds between two looks at the children."""
_MOST_UNREADY = 4
"""How often in a row one may be killed before it is ready."""
_MARGIN = 15.0
"""Seconds that a child gets to end beyond the drain timeout."""


@click.command("dev", context_settings={"show_default": True})
@app_option
@click.option(
    "--reload/--no-reload", default=True, help="Restart the worker when a *.py file under this folder changes."
)
@click.option("--processes", type=click.IntRange(1), default=1, help="How many worker processes to run.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=PORT, help="Where the HTTP API is served; another if it is taken."
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
    """Run everything in this terminal: Postgres and Redis of its own, a scheduler, a worker of all queues that the
    application and its workflows name, and the HTTP API. The schedules that the application declares are applied, on
    every change.

    Data is kept in .orchestrator/ in this folder. A database_url or redis_url that is set in the environment or in
    pyproject.toml is used instead of an embedded server. Other orchestrator commands that are run in this folder
    find the same services. Ctrl-C stops everything in good order; a second one hurries.

    \b
    Example:
      orchestrator dev --app shop.tasks:app
    """
    logs: dict[str, Any] = {"log_level": log_level, "log_format": log_format}
    chosen = load_settings(**logs)
    console = Console(chosen.log_format)
    configure_logging(chosen.log_level, chosen.log_format, into=console)
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
    """Ctrl-C, SIGTERM and a closed terminal: the first asks for the end, the second for a quick one."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.urgent = threading.Event()
        self._is_first = True

    def note(self, *_: object) -> None:
        """Take note of one, as the handler of a signal."""
        asked, self._is_first = self.requested if self._is_first else self.urgent, False
        # A handler interrupts the main thread anywhere, also while it holds the lock of the event that it waits for.
        threading.Thread(target=asked.set, name="stop", daemon=True).start()


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
    """Start what is not set elsewhere, bring the schema up to date, and tell other commands; undone by the stack.

    Nothing is started for an application that is not there.

    Return also the servers, of which those run that were started.
    """
    services = EmbeddedServices(DEFAULT_FOLDER)
    services.postgres.claim()  # refuses if another `orchestrator dev` runs in this folder
    stack.callback(services.stop)
    services.redis.claim()
    remove_services_file(services.folder)  # left from a crash: it names services that are gone
    (services.folder / ".gitignore").write_text("*\n", encoding="utf-8")
    settings = _without_services_file(load_settings(app=app, **logs), app)
    if settings.app and (wrong := what_is_wrong(settings.app, mendable=reload)) is not None:
        say("dev", wrong, logging.ERROR)
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
    """Return the settings without what an `orchestrator dev` of a folder above has left for its own."""
    path = next((path for parent in Path.cwd().parents if (path := parent / SERVICES_FILE).is_file()), None)
    if path is None:
        return settings
    left = read_services_file(path)
    return replace(
        settings,
        database_url="" if settings.database_url == left.get("database_url") else settings.database_url,
        redis_url="" if settings.redis_url == left.get("redis_url") else settings.redis_url,
        app="" if app is None and settings.app == left.get("app") else settings.app,
    )


class _Team:
    """The scheduler, the worker and the API. A killed one is started again; if one fails, all end.

    A server that was started for them is started again however it ended: its clients wait for it.
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
        self._prunes = services.postgres.running
        """Schedules that go from the code are deleted; from a database that others use, too, they are not."""
        self._interrupts = interrupts
        self._children: dict[str, Child] = {}
        self._options: dict[str, tuple[str, ...]] = {}
        """What each was started with."""
        self._restarts = Restarts()
        self._unready: dict[str, int] = {}
        """How often in a row each was killed before it was ready."""
        self._warnings = WarningWatch(settings)
        self._changes = Changes(Path.cwd()) if reload and settings.app else None
        self._schedules_due = bool(settings.app)
        self._is_ready = False
        self._queues = {DEFAULT_QUEUE}
        """The queues that workers serve beside those that the application names."""

    def start(self) -> None:
        """Start the scheduler and, if there is an application, a worker; store the schedules that it declares."""
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
        """Say once that a scheduler leads, that the API serves and, with an application, that its worker is live."""
        if self._is_ready or ("api" in self._children and not self._children["api"].is_ready.is_set()):
            return
        if is_ready(self._settings, workers=self._processes if self._settings.app else 0):
            self._is_ready = True
            say("dev", "✓ ready. Ctrl-C stops everything; see `orchestrator status`")

    def _serve_api(self) -> None:
        """Serve the HTTP API with the dashboard, where what they need is installed; it says the addresses itself."""
        if any(find_spec(name) is None for name in ("jinja2", "starlette", "uvicorn")):
            say("dev", "the HTTP API is not served: it needs the extra `api`")
        else:
            self._start("api", "--port", str(self._port), "--or-any")

    def watch(self) -> int:
        """Wait until the user wants the end, or a child has ended by itself; return the exit code."""
        while not self._interrupts.requested.wait(_INTERVAL):
            if not self._servers.look_after():
                self._interrupts.urgent.set()  # nobody can hand anything in any more
                return 1
            for role, child in list(self._children.items()):
                if child.exit_code is not None and role == "schedules":
                    del self._children[role]  # what went wrong, it has said itself
                elif child.exit_code is not None and not self._start_again(role, child, child.exit_code):
                    return 1
            for role in self._restarts.take_due():
                self._start(role, *self._options[role])
            self._apply_schedules()
            self._say_when_ready()
            for message in self._warnings.new_warnings():
                say("dev", message, logging.WARNING)
            self._serve_more()
        return 0

    def _start_again(self, role: str, child: Child, exit_code: int) -> bool:
        """Plan to start one again that was killed, or drained; False if it has ended by itself, or never gets ready."""
        was_drained = exit_code == 0 and role.startswith("worker")
        if exit_code >= 0 and not was_drained:
            say("dev", f"the {role} has ended unexpectedly, with exit code {exit_code}", logging.ERROR)
            return False
        how = f"the {role} was drained" if was_drained else f"the {role} was killed by signal {-exit_code}"
        was_ready = child.is_ready.is_set() or time.monotonic() - child.started_at > LATELY
        self._unready[role] = 0 if was_ready else self._unready.get(role, 0) + 1
        if self._unready[role] == _MOST_UNREADY:
            say("dev", f"{how} before it was ready, {_MOST_UNREADY} times in a row: giving up", logging.ERROR)
            return False
        self._restarts.plan(role, how)
        del self._children[role]
        return True

    def _apply_schedules(self) -> None:
        """Store the schedules that the code declares, at first and whenever a file has changed."""
        if self._changes is not None and self._changes.poll():
            self._schedules_due = True
        if self._schedules_due and "schedules" not in self._children:
            self._schedules_due = False
            prune = ["--prune"] if self._prunes else []
            self._start("schedules", "apply", "--quiet", "--app", self._settings.app, *prune)

    def _serve_more(self) -> None:
        """Start a worker of queues that a workflow has named since the first was started."""
        more = sorted(self._warnings.unserved - self._queues) if self._settings.app else []
        if more:
            self._queues.update(more)
            say("dev", f"a workflow names {', '.join(more)}: starting a worker for that")
            self._start_worker(f"worker of {', '.join(more)}", *more)

    def stop(self) -> None:
        """End the worker, then the scheduler, which first records what the worker reports."""
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
            "ORCHESTRATOR_API_URL": "",  # whatever others use, these use what is started here
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
            child.stop(self._settings.drain_timeout + _MARGIN, self._interrupts.urgent)
