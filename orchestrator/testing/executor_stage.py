"""The environment of the executor conformance suite: a scheduler and workers as processes, and the remote side."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar
from uuid import UUID, uuid4

from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.embedded import EmbeddedServices
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.settings import Settings, load_settings
from orchestrator.store.database import engine_for, upgrade
from orchestrator.store.insights.tasks import TaskDetail, show_task
from orchestrator.testing.executor_tasks import APP, declare

SETTINGS = {"worker_ttl": 2.0, "heartbeat": 0.5, "lease": 2.0, "executor_timeout": 3.0, "executor_pause": 1.0}
"""Short timeouts for the suite."""
AWAY = frozenset(
    {
        "test_a_remote_side_that_is_away_is_waited_for",
        "test_a_remote_side_that_is_away_for_minutes_is_asked_again_until_it_is_back",
        "test_time_runs_while_the_remote_side_is_away",
    }
)
"""Tests for remote sides that can be down while workers are up."""


class Program(Protocol):
    """A running scheduler or worker."""

    def logged(self, words: str) -> bool:
        """Return whether its log contains this text."""

    def stop(self) -> int:
        """Stop the program; return its exit code."""

    def kill(self) -> None:
        """Kill the program and all its processes."""


class Services(Protocol):
    """Starts schedulers and workers."""

    settings: Settings
    environment: dict[str, str]
    """The environment of programs started from now on."""

    def scheduler(self) -> Program:
        """Start a scheduler, and return when it is ready."""

    def worker(self, *options: str) -> Program:
        """Start a worker of one process, and return when it is ready."""


class ExecutorHarness(ABC):
    """An executor and its remote side, which must count how often it starts each task."""

    name: ClassVar[str]
    without: ClassVar[frozenset[str]] = frozenset()
    """Names of tests that do not apply to the executor; its documentation says why."""
    soon: ClassVar[float] = 1.0
    """Seconds within which work has certainly started, even on a busy machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def settings(self) -> dict[str, str]:
        """Return the settings that schedulers, workers and clients need for the executor."""
        return {}

    def prepare(self, services: Services) -> None:  # noqa: B027
        """Change the environment of processes started from now on."""

    def worker_options(self) -> list[str]:
        return []

    @abstractmethod
    def options(self) -> ExecutorOptions:
        """Return the executor options of a task.

        The task's input says what to do: {"do": "return", "value": …}, {"do": "fail", "message": …}, {"do": "hold"}
        until `let_go`, {"do": "say", "lines": n}, {"do": "large", "bytes": n}, {"do": "garbage"}; and "id", a word by
        which the remote side counts.
        """

    @abstractmethod
    def started(self, id: str) -> int:
        """Return how often the remote side started the work with this id."""

    @abstractmethod
    def is_running(self, id: str) -> bool:
        """Return whether the remote side is running this work."""

    @abstractmethod
    def let_go(self, id: str, value: Any = None) -> None:
        """Let held work return this value, also work that starts or restarts later.

        A task in state `running` is watched; the service may be polled, or may poll, shortly after that.
        """

    def go_down(self) -> None:
        """Make the remote side unreachable. Its work continues."""
        raise NotImplementedError

    def hang(self) -> None:
        """Make the remote side accept requests without answering. Its work continues."""
        raise NotImplementedError

    def come_back(self) -> None:
        """Make the remote side reachable again."""
        raise NotImplementedError

    def lose(self, id: str) -> None:
        """Make the remote side end and forget this work, which has started."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Stop the remote side."""


class LocalServices:
    """Programs on this machine, each with a log in a folder."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = load_settings(**settings)
        self.environment = {
            **os.environ,
            **{f"ORCHESTRATOR_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self._folder = folder
        self._programs: list[LocalProgram] = []

    def scheduler(self) -> LocalProgram:
        """Start a scheduler, and return when it is ready."""
        return self._start("scheduler.ready", "scheduler")

    def worker(self, *options: str) -> LocalProgram:
        """Start a worker of one process, and return when it is ready."""
        return self._start("process.ready", "worker", "--processes", "1", *options)

    def api(self, port: int = 0) -> tuple[LocalProgram, str]:
        """Serve the HTTP API; return the program and its address."""
        program = self._start("api.ready", "api", "--port", str(port))
        return program, program.found(r"api\.ready docs=(\S+)/docs")

    def run(self, *arguments: str) -> str:
        """Run a command; return its output."""
        command = [sys.executable, "-m", "orchestrator", *arguments]
        completed = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=True
        )
        return completed.stdout.strip()

    def close(self) -> None:
        """Stop all programs, workers first."""
        for program in reversed(self._programs):
            program.stop()

    def _start(self, ready: str, *arguments: str) -> LocalProgram:
        log = self._folder / f"{len(self._programs)}-{arguments[0]}.log"
        program = LocalProgram(arguments, self.environment, log)
        self._programs.append(program)
        eventually(lambda: program.logged(ready), f"{arguments[0]} is ready, see {log}")
        return program


class LocalProgram:
    """An orchestrator command in its own process group."""

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", *arguments],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def logged(self, words: str) -> bool:
        return words in self._log.read_text(encoding="utf-8", errors="replace")

    def found(self, pattern: str) -> str:
        """Return the last match of a pattern in its log."""
        return str(re.findall(pattern, self._log.read_text(encoding="utf-8", errors="replace"))[-1])

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        """Stop the program; return its exit code."""
        if self.is_alive:
            self._process.terminate()
        return self._process.wait(60)

    def kill(self) -> None:
        if self.is_alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)


@contextmanager
def local_services(folder: Path, **settings: Any) -> Iterator[LocalServices]:
    """Yield services on the servers in the settings, or else on servers started for them."""
    settings_from_environment = load_settings()
    if settings_from_environment.database_url and settings_from_environment.redis_url:
        namespace = f"conformance_{uuid4().hex[:8]}"
        upgrade(settings_from_environment.database_url, namespace=namespace)
        yield from _started(folder, namespace=namespace, **settings)
        return
    with EmbeddedServices(folder / "servers") as servers:
        upgrade(servers.database_url)
        yield from _started(folder, database_url=servers.database_url, redis_url=servers.redis_url, **settings)


def _started(folder: Path, **settings: Any) -> Iterator[LocalServices]:
    services = LocalServices(folder, **settings)
    try:
        yield services
    finally:
        services.close()


class Stage:
    """A scheduler, workers, and tasks for the harness's executor."""

    def __init__(self, services: Services, harness: ExecutorHarness) -> None:
        self.services = services
        self.harness = harness
        self._shared: Program | None = None
        self._own: list[Program] = []
        self.app = Orchestrator(services.settings)
        self._work, self.add = declare(self.app)
        settings = services.settings
        self._engine = engine_for(settings.require_database(), autocommit=True, namespace=settings.namespace)
        services.scheduler()

    def usual(self) -> Program:
        """Return the worker shared by all tests that do not disturb it."""
        if self._shared is None:
            self._shared = self._worker()
        return self._shared

    def worker(self, *options: str) -> Program:
        """Start a worker for this test only, and stop the shared one."""
        if self._shared is not None:
            self._shared.stop()
            self._shared = None
        self._own.append(self._worker(*options))
        return self._own[-1]

    def leave(self) -> None:
        """Stop the workers that a test has started."""
        for process in self._own:
            process.stop()
        self._own = []

    def _worker(self, *options: str) -> Program:
        return self.services.worker("--app", APP, *self.harness.worker_options(), *options)

    def enqueue(self, do: str, options: dict[str, Any] | None = None, **more: Any) -> tuple[Handle[Any], str]:
        """Enqueue work; return its handle and the id by which the remote side counts it."""
        id = uuid4().hex[:8]
        task = self._work.options(executor=self.harness.options(), **(options or {}))
        return task.enqueue(do=do, id=id, **more), id

    def hold(self, **options: Any) -> tuple[Handle[Any], str]:
        ((handle, id),) = self.hold_many(1, **options)
        return handle, id

    def hold_many(self, count: int, **options: Any) -> list[tuple[Handle[Any], str]]:
        """Enqueue several pieces of held work; return once all have started and are watched."""
        held = [self.enqueue("hold", options) for _ in range(count)]
        for handle, id in held:
            self.is_begun(id)
            self.is_watched(handle)
        return held

    def is_begun(self, id: str) -> None:
        eventually(lambda: self.harness.started(id) >= 1, f"{id} is begun")

    def is_watched(self, handle: Handle[Any]) -> None:
        eventually(lambda: handle.status() == "running", f"{handle.id} runs")

    def close(self) -> None:
        self.app.close()
        self._engine.dispose()

    def shown(self, handle: Handle[Any]) -> TaskDetail:
        with self._engine.connect() as connection:
            task = show_task(connection, UUID(handle.id))
        assert task is not None
        return task

    def attempt(self, handle: Handle[Any]) -> int:
        task = self.shown(handle)
        return task.attempt if task.status == "running" else 0

    def failures(self, handle: Handle[Any]) -> int:
        return self.shown(handle).failures


T = TypeVar("T")


def eventually(
    condition: Callable[[], T | None],
    what: str = "the awaited condition",
    timeout: float = 60.0,
    *,
    every: float = 0.01,
) -> T:
    """Return the condition's first true value. Fail, naming `what`, if there is none within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not met within {timeout:g} s; the last value was {value!r}")
        time.sleep(every)
    return value
