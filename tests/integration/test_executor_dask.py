"""Tasks that run on a real Dask cluster, of a scheduler and two worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("distributed", reason="the extra dask is not installed")

from distributed import Client

from orchestrator.domain.executors.options import Broken, Execution, Finished, Outcome
from orchestrator.plugins.executors.dask import Dask
from orchestrator.plugins.executors.dask.driver import DaskExecutor
from orchestrator.workers.executors.protocol import Gone, Setup, Unequipped, Unreachable
from tests.integration import executing
from tests.integration.dask_cluster import Cluster
from tests.integration.executing import Driver, Heard, ran, until
from tests.integration.guide import example

pytestmark = pytest.mark.filterwarnings("default")


_DRIVER = Driver(lambda: DaskExecutor(Setup()))
drive, run = _DRIVER.drive, _DRIVER.run


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("dask"))
    running.add_worker()
    running.add_worker()
    with Client(running.address, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
    yield running
    running.stop()


def execution(cluster: Cluster | None, function: str, *arguments: Any, **options: Any) -> Execution:
    address = cluster.address if cluster is not None else ""
    return executing.execution(Dask(**{"function": f"dask_jobs:{function}", "address": address, **options}), *arguments)


def test_the_example_of_the_guide_runs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.address)
    options, input = example("dask")
    assert run(replace(execution(None, "double"), options=options, input=input)) == Finished(3)


def test_failures_contain_the_remote_type_message_and_traceback(cluster: Cluster) -> None:
    failed, unreadable = run(execution(cluster, "fail", "no")), run(execution(cluster, "odd"))

    assert isinstance(failed, Broken)
    assert (failed.kind, failed.message) == ("ValueError", "no")
    assert "dask_jobs.py" in failed.detail
    assert isinstance(unreadable, Broken)
    assert (unreadable.kind, unreadable.retryable) == ("UnreadableOutput", False)
    missing = run(execution(cluster, "nothing"))
    assert isinstance(missing, Broken)
    assert missing.kind == "AttributeError"


def test_a_job_waiting_for_a_worker_can_be_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    asked = execution(cluster, "hold", str(tmp_path), resources={"GPU": 1.0})

    async def steps(executor: DaskExecutor) -> None:
        name = await executor.submit(asked)
        watching = asyncio.create_task(executor.watch(asked, name, Heard()))
        await executor.cancel(asked, name)
        with pytest.raises(Gone):
            await watching

    drive(steps)
    assert ran(tmp_path) == []


def test_another_worker_takes_over_the_job_of_a_killed_worker(cluster: Cluster, tmp_path: Path) -> None:
    asked = execution(cluster, "hold", str(tmp_path))

    async def steps(executor: DaskExecutor) -> Outcome:
        name = await executor.submit(asked)
        await until(lambda: ran(tmp_path))
        os.kill(ran(tmp_path)[0], signal.SIGKILL)
        await until(lambda: len(ran(tmp_path)) == 2)
        (tmp_path / "go").touch()
        return await executor.watch(asked, name, Heard())

    assert drive(steps) == Finished("held")
    first, second = ran(tmp_path)
    assert first != second
    cluster.add_worker()


def test_a_dead_scheduler_is_unreachable(tmp_path: Path) -> None:
    alone = Cluster(tmp_path)
    asked = execution(alone, "double", 1)

    async def steps(executor: DaskExecutor) -> None:
        name = await executor.submit(asked)
        watching = asyncio.create_task(executor.watch(asked, name, Heard()))
        await asyncio.sleep(0)
        alone.stop()
        executor._timeout = 1.0
        with pytest.raises(Unreachable):
            await watching
        with pytest.raises(Unreachable):
            await executor.submit(asked)

    drive(steps)


def test_a_missing_cluster_address_names_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    with pytest.raises(Unequipped, match="DASK_SCHEDULER_ADDRESS"):
        run(execution(None, "double", 1))


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"function": "double"}, "function"),
        ({"address": "scheduler"}, "address"),
        ({"address_variable": "a b"}, "address_variable"),
        ({"resources": {"GPU": 0.0}}, "resources"),
    ],
)
def test_invalid_options_are_reported(options: dict[str, Any], option: str) -> None:
    [(name, _)] = Dask(**{"function": "jobs:double", **options}).problems()
    assert name == option
