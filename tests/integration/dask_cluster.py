"""A Dask cluster of local processes for tests, on the loopback address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import eventually

HERE = Path(__file__).parent


class Cluster:
    """A Dask scheduler, and workers that tests can kill."""

    def __init__(self, folder: Path, path: Path = HERE, **variables: str) -> None:
        self._file = folder / "scheduler.json"
        self._variables = {"PYTHONPATH": str(path), **variables}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        eventually(self._file.exists, "a scheduler of Dask")
        self.address = eventually(self._address, "its address")

    def _address(self) -> str:
        try:
            return str(json.loads(self._file.read_text())["address"])
        except ValueError:  # the file is incomplete
            return ""

    def add_worker(self, threads: int = 2) -> subprocess.Popen[bytes]:
        return self._start("worker", "--host", "127.0.0.1", "--nthreads", str(threads), "--no-nanny", "--no-dashboard")

    def _start(self, role: str, *arguments: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, **self._variables}
        environ |= {"DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "False", "DASK_LOGGING__DISTRIBUTED": "error"}
        program = [sys.executable, "-m", "dask", role, "--scheduler-file", str(self._file), *arguments]
        process = subprocess.Popen(program, env=environ, cwd=self._file.parent, start_new_session=True)
        self._processes.append(process)
        return process

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
