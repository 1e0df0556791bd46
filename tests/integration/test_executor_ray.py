"""Tasks that run as jobs on a real Ray cluster of one node."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.domain.executors.options import Broken, Execution, Finished, Outcome
from orchestrator.errors import GiveUp
from orchestrator.plugins.executors.ray import Ray
from orchestrator.plugins.executors.ray.driver import MAX_INPUT, RayExecutor, split_log
from orchestrator.workers.executors.protocol import Gone, Setup, Unequipped, Unreachable
from tests.integration import executing
from tests.integration.executing import Driver, Heard, ran, until
from tests.integration.guide import example
from tests.integration.ray_cluster import RayCluster, why_not

_DRIVER = Driver(lambda: RayExecutor(Setup()), 150)  # starting a job takes seconds, and more on a busy machine
drive, run = _DRIVER.drive, _DRIVER.run


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    if why := why_not():
        pytest.skip(why)
    running = RayCluster()
    yield running
    running.close()


@pytest.fixture
def cluster(ray: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray.address)
    return ray


def execution(function: str, *arguments: Any, **options: Any) -> Execution:
    return executing.execution(Ray(**{"function": f"ray_jobs:{function}", **options}), *arguments)


def test_a_function_runs_once_and_its_job_is_deleted(cluster: RayCluster) -> None:
    asked, heard = execution("double", 4), Heard()

    async def steps(executor: RayExecutor) -> Outcome:
        names = await asyncio.gather(*(executor.submit(asked) for _ in range(3)))
        assert set(names) == {asked.name}
        outcome = await executor.watch(asked, asked.name, heard)
        with pytest.raises(Gone):
            while True:  # Ray may store the end once more
                await executor.release(asked, asked.name)
                await executor.watch(asked, asked.name, Heard())
        return outcome

    assert drive(steps) == Finished({"doubled": 8})
    assert [line.partition(": ")[2] for line in heard.lines].count("doubling 4") == 1
    assert not [line for line in heard.lines if asked.name in line and "orchestrator-end" in line]


def test_a_function_may_use_the_cluster(cluster: RayCluster) -> None:
    assert run(execution("squares", [1, 2, 3])) == Finished(14)


def test_the_example_of_the_guide_runs(cluster: RayCluster) -> None:
    options, input = example("ray")
    assert run(replace(execution("double"), options=options, input=input)) == Finished(3)


def test_many_jobs_are_watched_together(cluster: RayCluster) -> None:
    asked = [execution("double_later", number) for number in range(10)]

    async def steps(executor: RayExecutor) -> list[Outcome]:
        names = await asyncio.gather(*(executor.submit(one) for one in asked))
        watches = (executor.watch(one, name, Heard()) for one, name in zip(asked, names, strict=True))
        return await asyncio.gather(*watches)

    assert drive(steps) == [Finished(2 * number) for number in range(10)]


def test_failures_contain_the_remote_type_message_and_traceback(cluster: RayCluster) -> None:
    failed, unreadable = run(execution("fail", "no")), run(execution("odd"))

    assert isinstance(failed, Broken)
    assert (failed.kind, failed.message) == ("ValueError", "no")
    assert "ray_jobs.py" in failed.detail
    assert isinstance(unreadable, Broken)
    assert (unreadable.kind, unreadable.retryable) == ("UnreadableOutput", False)


def test_a_function_that_exits_without_a_result_has_failed(cluster: RayCluster) -> None:
    vanished = run(execution("vanish"))

    assert isinstance(vanished, Broken)
    assert (vanished.kind, vanished.retryable) == ("JobEntrypointCommandError", True)
    assert "exit code 7" in vanished.message


def test_a_second_watcher_finds_the_job_of_the_first(cluster: RayCluster, tmp_path: Path) -> None:
    asked = execution("hold", str(tmp_path))

    async def first(executor: RayExecutor) -> None:
        await executor.submit(asked)
        await until(lambda: ran(tmp_path))

    async def second(executor: RayExecutor) -> Outcome:
        name = await executor.submit(asked)
        (tmp_path / "go").touch()
        return await executor.watch(asked, name, Heard())

    drive(first)
    assert drive(second) == Finished("held")
    assert len(ran(tmp_path)) == 1


def test_a_cancel_stops_a_running_job(cluster: RayCluster, tmp_path: Path) -> None:
    asked = execution("hold", str(tmp_path))

    async def steps(executor: RayExecutor) -> None:
        name = await executor.submit(asked)
        await until(lambda: ran(tmp_path))
        await executor.cancel(asked, "")
        with pytest.raises(ProcessLookupError):
            os.kill(ran(tmp_path)[0], 0)
        await executor.cancel(asked, name)
        with pytest.raises(Gone):
            await executor.watch(asked, name, Heard())

    drive(steps)
    assert len(ran(tmp_path)) == 1


def test_a_killed_process_is_a_retryable_failure(cluster: RayCluster, tmp_path: Path) -> None:
    asked = execution("hold", str(tmp_path))

    async def steps(executor: RayExecutor) -> Outcome:
        name = await executor.submit(asked)
        await until(lambda: ran(tmp_path))
        os.kill(ran(tmp_path)[0], signal.SIGKILL)
        return await executor.watch(asked, name, Heard())

    killed = drive(steps)
    assert isinstance(killed, Broken)
    assert killed.retryable


def test_an_unreachable_cluster_keeps_running_its_jobs(cluster: RayCluster, tmp_path: Path) -> None:
    asked = execution("hold", str(tmp_path))

    async def steps(executor: RayExecutor) -> Outcome:
        name = await executor.submit(asked)
        await until(lambda: ran(tmp_path))
        cluster.door.shut()
        try:
            with pytest.raises(Unreachable):
                await executor.watch(asked, name, Heard())
            with pytest.raises(Unreachable):
                await executor.submit(asked)
        finally:
            cluster.door.open()
        (tmp_path / "go").touch()
        return await executor.watch(asked, name, Heard())

    assert drive(steps) == Finished("held")
    assert len(ran(tmp_path)) == 1


def test_a_restarted_head_has_forgotten_its_jobs(cluster: RayCluster, tmp_path: Path) -> None:
    asked = execution("hold", str(tmp_path))

    async def begin(executor: RayExecutor) -> None:
        await executor.submit(asked)
        await until(lambda: ran(tmp_path))

    async def ask(executor: RayExecutor) -> None:
        await executor.cancel(asked, asked.name)
        with pytest.raises(Gone):
            await executor.watch(asked, asked.name, Heard())

    drive(begin)
    cluster.restart()
    drive(ask)


def test_a_missing_cluster_address_names_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(Unequipped, match="RAY_API_SERVER_ADDRESS"):
        run(execution("double", 1))


def test_too_large_input_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    with pytest.raises(GiveUp, match="100,000"):
        run(execution("double", "x" * MAX_INPUT))


def test_the_result_is_read_from_the_log_by_execution_name() -> None:
    text = 'one\norchestrator-end other {"output": 1}\norchestrator-end mine {"output": 2}\nafter\n'
    assert split_log(text, "mine") == (["one", 'orchestrator-end other {"output": 1}'], {"output": 2})
    assert split_log("one\norchestrator-end mine {broken\n", "mine")[1] is None
    assert split_log("", "mine") == ([], None)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"function": "double"}, "function"),
        ({"address_variable": "a b"}, "address_variable"),
        ({"resources": {"GPU": 0.0}}, "resources"),
        ({"cpus": -1.0}, "cpus"),
        ({"runtime_env": {"env_vars": {"TASK_SPEC": "mine"}}}, "runtime_env"),
        ({"runtime_env": {"env_vars": {"LEVEL": 3}}}, "runtime_env"),
    ],
)
def test_invalid_options_are_reported(options: dict[str, Any], option: str) -> None:
    [(name, _)] = Ray(**{"function": "jobs:double", **options}).problems()
    assert name == option
