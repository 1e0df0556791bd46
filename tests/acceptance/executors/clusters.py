"""The remote services of the executors `kubernetes` and `rq`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from redis import Redis
from rq.job import Job

from orchestrator.executors import ExecutorOptions, Kubernetes, Rq
from tests.acceptance.executors.doing import FOLDER, Marks
from tests.acceptance.executors.harness import BehindDoor, Services
from tests.doors import Door
from tests.integration.fake_kubernetes import FakeKubernetes

HERE = Path(__file__).parent


class Marking(BehindDoor):
    """A remote service whose processes write marker files into a folder."""

    soon = 15.0  # a process must start first

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.marks = Marks(folder)

    def started(self, id: str) -> int:
        return len(self.marks.pids(id))

    def is_running(self, id: str) -> bool:
        return self.marks.is_running(id)

    def let_go(self, id: str, value: Any = None) -> None:
        self.marks.let_go(id, value)


TESTED_ALONE = frozenset(
    {
        "test_a_worker_that_stops_leaves_the_work_alone_and_another_goes_on",
        "test_time_runs_from_the_start_and_not_from_the_last_watcher",
    }
)
"""Tests of behavior that the driver shares, or that tests/integration/test_executor_….py covers in less time."""


class KubernetesHarness(Marking):
    """A fake Kubernetes API server that runs containers as processes."""

    name = "kubernetes"
    without = TESTED_ALONE | {"test_garbage_is_a_failure_and_stops_nobody"}  # an invalid last line counts as text

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = FakeKubernetes()
        self.door = Door(self.server.server_port)

    def prepare(self, services: Services) -> None:
        document = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "namespace": "jobs"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.door.port}"}}],
        }
        (self.folder / "kubeconfig").write_text(yaml.safe_dump(document), encoding="utf-8")
        services.environment["KUBECONFIG"] = str(self.folder / "kubeconfig")

    def options(self) -> ExecutorOptions:
        command = [sys.executable, str(HERE / "doing.py")]
        return Kubernetes(image="python:3", command=command, env={FOLDER: str(self.folder)}, grace=0)

    def lose(self, id: str) -> None:
        for kind, space, name in list(self.server.things):
            job = self.server.things.get((kind, space, name))
            if kind == "jobs" and job is not None and id in str(job["spec"]):
                self.server.delete("jobs", space, name, {})

    def go_down(self) -> None:
        """Refuse all requests, and end all watches."""
        self.server.is_away = True
        self.server.cut_watches()
        self.door.open()

    def come_back(self) -> None:
        self.server.is_away = False
        super().come_back()

    def close(self) -> None:
        self.door.shut()
        self.server.stop()


class RqHarness(Marking):
    """Two RQ workers. Our workers reach their Redis through a proxy that can be shut."""

    name = "rq"
    without = TESTED_ALONE | {"test_many_at_once_need_no_slots"}  # each RQ worker runs one job at a time

    def prepare(self, services: Services) -> None:
        path = services.settings.redis_url.removeprefix("unix://")
        self._url = f"unix://{path}?db=7"
        self.door = Door(path)
        services.environment["RQ_REDIS_URL"] = f"redis://127.0.0.1:{self.door.port}/7"
        environ = {**os.environ, FOLDER: str(self.folder)}
        command = [sys.executable, "-m", "rq.cli", "worker", "--url", self._url, "--path", str(HERE), "--quiet", "work"]
        with (self.folder / "rq.log").open("wb") as log:
            self._workers = [
                subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True) for _ in range(2)
            ]

    def options(self) -> ExecutorOptions:
        return Rq(function="doing:work", queue="work", prints=True)

    def lose(self, id: str) -> None:
        redis = Redis.from_url(self._url)
        for key in redis.scan_iter("rq:job:task-*"):
            job = Job.fetch(key.decode().removeprefix("rq:job:"), connection=redis)
            if job.args[2]["id"] == id:  # the id is an argument of the function that captures output
                job.delete()
        redis.close()
        os.kill(self.marks.pids(id)[-1], signal.SIGKILL)

    def close(self) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        for marker in self.folder.glob("begun-*"):
            for pid in self.marks.pids(marker.name.removeprefix("begun-")):
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    if process.create_time() <= marker.stat().st_mtime:  # otherwise the process id was reused
                        process.kill()
        self.door.shut()
