"""A scheduler, worker or API process of the experiment, restarted whenever it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from signal import Signals

import psutil

from tests.chaos.breaking import send_group
from tests.chaos.real.clocks import Clock
from tests.chaos.real.hosts import Host
from tests.chaos.real.project.releases import BOTH, RELEASE
from tests.chaos.real.proxy import Proxy

REPOSITORY = Path(__file__).parents[3]
_RESTART_AFTER = 1.0
"""Seconds between two starts, as in a service manager."""


class Member:
    """A role in the fleet, and its current process."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        redis: Proxy,
        postgres: Proxy | None = None,
        host: Host | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.redis = redis
        self.postgres = postgres
        self.host = host
        self.clock = clock
        self.pids: list[int] = []
        """Process ids of all processes of the member, in order."""
        self.exit_codes: list[int] = []
        self.release = BOTH
        self._command = [*(host.prefix if host else ()), sys.executable, "-m", "orchestrator", *arguments]
        self._environment = {**environment, "ORCHESTRATOR_REDIS_URL": f"redis://{redis.address}:{redis.port}/0"}
        if postgres is not None:
            url = f"postgresql://postgres@{postgres.address}:{postgres.port}/orchestrator"
            self._environment["ORCHESTRATOR_DATABASE_URL"] = url
        if clock is not None:
            self._environment |= clock.environment
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        self._held_down = 0
        self._start_at = 0.0

    def __str__(self) -> str:
        return self.name

    @property
    def pid(self) -> int:
        """The id of the current process, or of the last one."""
        return self.pids[-1]

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def keep(self) -> None:
        """Start the process if it should run and does not."""
        with self._lock:
            if self._held_down or self.is_running() or time.monotonic() < self._start_at:
                return
            self._collect()
            with self.log.open("ab") as output:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=REPOSITORY,
                    env=dict(self._environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self.pids.append(self._process.pid)
            self._start_at = time.monotonic() + _RESTART_AFTER

    def deploy(self, release: str) -> None:
        """Drain the process; its successor has another release of the application."""
        with self._lock:
            self._environment[RELEASE] = self.release = release
        self.signal(signal.SIGTERM)

    @contextmanager
    def held_down(self) -> Iterator[None]:
        """Do not restart the process within the block."""
        with self._lock:
            self._held_down += 1
        try:
            yield
        finally:
            with self._lock:
                self._held_down -= 1

    def descendants(self) -> list[psutil.Process]:
        """Return the worker processes and their descendants, parents first."""
        try:
            found: list[psutil.Process] = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return found

    def signal(self, number: Signals) -> None:
        """Send a signal to the process itself."""
        if self.is_running():
            os.kill(self.pid, number)

    def signal_group(self, number: Signals) -> None:
        send_group(self.pid, number)

    def ask_to_end(self) -> None:
        """Ask the process to end gracefully, and do not restart it."""
        with self._lock:
            self._held_down += 1
        if self.is_running():
            self.signal_group(signal.SIGCONT)
            self.signal(signal.SIGTERM)

    def wait_for_end(self, timeout: float) -> int | None:
        """Return the exit code, or None if the process had to be killed."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.signal_group(signal.SIGKILL)
            self._process.wait()
            return None

    def _collect(self) -> None:
        if self._process is not None:
            self.exit_codes.append(self._process.wait())
