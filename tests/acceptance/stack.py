"""Real scheduler, worker and API processes on a real Postgres and Redis, controlled by a test."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from signal import Signals
from typing import Any

from click.testing import CliRunner, Result
from redis import Redis
from sqlalchemy import Engine, text

from orchestrator import Orchestrator, Settings
from orchestrator.cli import main
from orchestrator.settings import load_settings
from orchestrator.store.database import engine_for
from orchestrator.transport.connection import connect
from tests import forking
from tests.waiting import eventually

HERE = Path(__file__).parent


class Process:
    """A running `orchestrator` command."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path, folder: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = forking.begin(
                *arguments, environment=environment, folder=folder, stdout=output, stderr=output
            )
        self.pid = self._process.pid

    def logged(self, words: str, times: int = 1) -> bool:
        return self.log.read_text().count(words) >= times

    def signal(self, number: Signals) -> None:
        os.kill(self.pid, number)

    def signal_group(self, number: Signals) -> None:
        os.killpg(self.pid, number)

    def kill(self) -> None:
        self.signal_group(signal.SIGKILL)
        self._process.wait(60)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout: float = 40.0) -> int:
        return self._process.wait(timeout)

    def stop(self) -> int:
        if self.is_running():
            self.signal(signal.SIGTERM)
        return self.wait()


def stop(*processes: Process) -> None:
    """Stop processes gracefully and in parallel."""
    for process in processes:
        if process.is_running():
            process.signal(signal.SIGTERM)
    for process in processes:
        process.wait()


class Stack:
    """The schedulers, workers and API processes of one test, with access to the database."""

    def __init__(self, database_url: str, redis_url: str, folder: Path, **settings: float | str) -> None:
        self.folder = folder
        self.settings: Settings = load_settings(
            folder=folder, environ={}, database_url=database_url, redis_url=redis_url, **settings
        )
        extra = {f"ORCHESTRATOR_{name.upper()}": str(value) for name, value in settings.items()}
        self.environment = {
            **os.environ,
            **extra,
            "ORCHESTRATOR_DATABASE_URL": database_url,
            "ORCHESTRATOR_REDIS_URL": redis_url,
            "PYTHONUNBUFFERED": "1",
        }
        self.engine: Engine = engine_for(database_url, autocommit=True)
        single = "+" not in redis_url.partition(":")[0]
        self.redis: Redis = Redis.from_url(redis_url) if single else connect(self.settings.require_redis())
        self.processes: list[Process] = []
        self._count = 0

    def scheduler(self, *options: str, wait: bool = True) -> Process:
        process = self._start("scheduler", ["scheduler", *options])
        if wait:
            eventually(lambda: process.logged("scheduler.ready"), f"scheduler ready, see {process.log}")
        return process

    def worker(self, *options: str, processes: int = 1, wait: bool = True, folder: Path = HERE) -> Process:
        count = [] if "--autoscale" in options else ["--processes", str(processes)]
        process = self._start("worker", ["worker", "--app", "project:app", *count, *options], folder)
        if wait:
            eventually(lambda: process.logged("process.ready", processes), f"worker ready, see {process.log}")
        return process

    def begin_api(self, port: int = 0) -> Process:
        """Start the API without waiting until it is ready."""
        return self._start("api", ["api", "--port", str(port)])

    def api(self, port: int = 0) -> str:
        """Start the API and wait until it is ready; return its URL."""
        process = self.begin_api(port)
        eventually(lambda: process.logged("api.ready"), f"the API is served, see {process.log}")
        return re.findall(r"api.ready docs=(\S+)/docs", process.log.read_text())[-1]

    def command(self, *words: str, input: str = "") -> Result:
        """Run an `orchestrator` command in this process, which has already imported the product."""
        with chdir(self.folder):
            return CliRunner(env=self.environment).invoke(main, words, input=input)

    def output_of(self, *words: str) -> str:
        """Run an `orchestrator` command, assert that it succeeds, and return its output."""
        result = self.command(*words)
        assert result.exit_code == 0, result.output
        return result.stdout

    def leader(self) -> Process:
        """Return the process of the leading scheduler."""

        def find() -> Process | None:
            rows = self.sql("SELECT address FROM orchestrator.leases WHERE expires_at > now()")
            pid = int(str(rows[0][0]).rpartition(":")[2]) if rows else 0
            return next((process for process in self.processes if process.pid == pid and process.is_running()), None)

        return eventually(find, "somebody leads")

    def _start(self, name: str, arguments: list[str], folder: Path = HERE) -> Process:
        self._count += 1
        process = Process(arguments, self.environment, self.folder / f"{self._count}-{name}.log", folder)
        self.processes.append(process)
        return process

    def sql(self, statement: str, **parameters: object) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement), parameters)]

    def execute_sql(self, statement: str) -> None:
        """Run SQL without a result."""
        with self.engine.connect() as connection:
            connection.execute(text(statement))

    def scalar(self, statement: str, **parameters: object) -> Any:
        return self.sql(statement, **parameters)[0][0]

    def close(self) -> None:
        """Kill all processes. The next stack begins with empty tables and Redis, so no graceful end is needed."""
        for process in self.processes:
            if process.is_running():
                process.kill()
        self.engine.dispose()
        self.redis.close()


@contextmanager
def using(app: Orchestrator, stack: Stack) -> Iterator[None]:
    """Point an application at a stack within the block."""
    app.close()
    app._client._settings = stack.settings
    try:
        yield
    finally:
        app.close()
        app._client._settings = None
