"""Schedulers and workers as real processes, restarted under the same name when they end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import Signals

import psutil

from tests.chaos.breaking import send, send_group

_TIMEOUT = 60.0
"""Timeout in seconds for the start or the graceful end of a process."""


class Machine:
    """A scheduler, or a worker with its children; the loss of a machine kills all of its processes."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self._arguments = list(arguments)
        self._log = log
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until the process logs that it is ready, or has ended."""
        deadline = time.monotonic() + _TIMEOUT
        while b"ready" not in self._log.read_bytes()[self._log_start :] and self.exit_code is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} was not ready after {_TIMEOUT:g} s; see {self._log}")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None, "it was started"
        return self._process.poll()

    def signal(self, number: Signals) -> None:
        """Send a signal to the parent only, as a person or systemd does."""
        send(self.pid, number)

    def signal_all(self, number: Signals) -> None:
        """Send a signal to all processes of the machine."""
        send_group(self.pid, number)

    def children(self) -> list[int]:
        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.pid).children()]
        return []

    def processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def wait(self, timeout: float = _TIMEOUT) -> int:
        assert self._process is not None, "it was started"
        return self._process.wait(timeout)


class Machines:
    """All machines. `schedulers[0]` and `workers[0]` are the veterans."""

    def __init__(self, folder: Path, schedulers: int, workers: int, app: str) -> None:
        worker = ["worker", "--app", app, "--processes", "2"]
        self.schedulers = [
            Machine(f"scheduler {number}", ["scheduler"], folder / f"scheduler-{number}.log")
            for number in range(1, schedulers + 1)
        ]
        self.workers = [
            Machine(f"worker {number}", worker, folder / f"worker-{number}.log") for number in range(1, workers + 1)
        ]
        self.fell: list[str] = []
        """Descriptions of processes that ended without a fault."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start all machines; stop them gracefully, workers first, while a leader still applies their reports."""
        for machine in (*self.schedulers, *self.workers):
            machine.start()
        try:
            yield
        finally:
            for group in (self.workers, self.schedulers):
                for machine in group:
                    machine.signal_all(signal.SIGCONT)
                    machine.signal(signal.SIGTERM)
                for machine in group:
                    self._end(machine)

    def _end(self, machine: Machine) -> None:
        try:
            code = machine.wait()
        except subprocess.TimeoutExpired:
            machine.signal_all(signal.SIGKILL)
            machine.wait()
            self.fell.append(f"{machine.name} did not stop within {_TIMEOUT:g} s")
        else:
            if code != 0:
                self.fell.append(f"{machine.name} stopped with exit code {code}")

    def replace(self, machine: Machine) -> None:
        """Restart a machine that a fault has ended, and wait until it is ready."""
        machine.wait()
        machine.start()
        machine.wait_until_ready()

    def mend(self) -> None:
        """Restart machines that ended without a fault, and record them."""
        for machine in (*self.schedulers, *self.workers):
            code = machine.exit_code
            if code is not None:
                self.fell.append(f"{machine.name} ended by itself with exit code {code} at {time.strftime('%H:%M:%S')}")
                machine.start()
