"""The remote services of the executors `cloud_run`, `dask` and `ray`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from orchestrator.executors import CloudRun, Dask, ExecutorOptions, Ray
from tests.acceptance.executors.clusters import HERE, TESTED_ALONE, Marking
from tests.acceptance.executors.doing import FOLDER
from tests.acceptance.executors.harness import Services
from tests.doors import Door
from tests.integration.dask_cluster import Cluster
from tests.integration.fake_cloud_run import FakeCloudRun
from tests.integration.fake_ray import FakeRay

_REPOSITORY = HERE.parents[2]


class CloudRunHarness(Marking):
    """A fake Cloud Run API server; the job's container runs `orchestrator run-task`."""

    name = "cloud_run"
    without = TESTED_ALONE | {
        "test_what_the_work_says_is_in_the_log_of_its_task",  # the log stays in Google Cloud
        "test_a_large_result_arrives_and_one_that_is_too_large_fails_with_a_reason",  # the store has no size limit
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = FakeCloudRun({"work": [sys.executable, "-m", "orchestrator", "run-task", "doing:work"]})
        self.door = Door(self.server.server_port)

    def settings(self) -> dict[str, str]:
        return {"payload_store": str(self.folder / "store")}

    def prepare(self, services: Services) -> None:
        services.environment |= {
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_RUN": f"http://127.0.0.1:{self.door.port}/",
            "GCE_METADATA_HOST": self.server.host,
        }
        services.environment.pop("GOOGLE_APPLICATION_CREDENTIALS", None)

    def options(self) -> ExecutorOptions:
        env = {FOLDER: str(self.folder), "PYTHONPATH": f"{HERE}:{_REPOSITORY}"}
        return CloudRun(project="acme-prod", location="europe-west1", job="work", output="store", env=env)

    def lose(self, id: str) -> None:
        for name, execution in list(self.server.executions.items()):
            if id in str(execution["template"]) and "completionTime" not in execution:
                self.server.lose(name)

    def close(self) -> None:
        self.door.shut()
        self.server.stop()


class RayHarness(Marking):
    """A fake Ray Jobs API server that runs jobs as processes."""

    name = "ray"
    without = TESTED_ALONE

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = FakeRay()
        self.door = Door(self.server.server_port)

    def prepare(self, services: Services) -> None:
        services.environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{self.door.port}"

    def options(self) -> ExecutorOptions:
        variables = {FOLDER: str(self.folder), "PYTHONPATH": str(HERE)}
        return Ray(function="doing:work", python=sys.executable, runtime_env={"env_vars": variables})

    def lose(self, id: str) -> None:
        for name, job in list(self.server.jobs.items()):
            if id in job.submission["runtime_env"]["env_vars"]["TASK_SPEC"] and job.process.poll() is None:
                self.server.lose(name)

    def close(self) -> None:
        self.door.shut()
        self.server.stop()


_WAIT_FOR_WORKERS = "client.wait_for_workers(2, timeout=120)"
_CANCEL_RUNNING = """
from orchestrator.plugins.executors.dask.on_cluster import STOP
for name in client.list_datasets():
    future = client.get_dataset(name)
    if future.status == "pending":
        client.cancel([future], force=True)
        client.run(STOP, name)
        client.unpublish_dataset(name)
"""


class DaskHarness(Marking):
    """A Dask cluster of two workers, with enough threads for all jobs that the suite holds at once."""

    name = "dask"
    without = TESTED_ALONE

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if find_spec("distributed") is None:
            pytest.skip("the extra dask is not installed")
        self.cluster = Cluster(folder, HERE, **{FOLDER: str(folder)})
        for _ in range(2):
            self.cluster.add_worker(threads=8)
        self._run_client(_WAIT_FOR_WORKERS)
        self.door = Door(urlsplit(self.cluster.address).port or 0)

    def prepare(self, services: Services) -> None:
        services.environment["DASK_SCHEDULER_ADDRESS"] = f"tcp://127.0.0.1:{self.door.port}"

    def options(self) -> ExecutorOptions:
        return Dask(function="doing:work")

    def is_running(self, id: str) -> bool:
        """Return whether a job runs in a thread: Dask's worker processes outlive their jobs."""
        return len(self.marks.pids(id)) > len(self.marks.pids(id, "over"))

    def lose(self, id: str) -> None:  # noqa: ARG002
        """Cancel all running jobs: the suite runs one at a time here."""
        self._run_client(_CANCEL_RUNNING)

    def close(self) -> None:
        self.door.shut()
        self.cluster.stop()

    def _run_client(self, code: str) -> None:
        """Run code with a Dask client in a process of its own."""
        program = f"from distributed import Client\nclient = Client({self.cluster.address!r})\n{code}"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=180, cwd=_REPOSITORY)
