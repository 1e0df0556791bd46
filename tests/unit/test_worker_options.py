"""Options of a worker, and values that are rejected."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from click.testing import CliRunner

from orchestrator import InvalidTask, Orchestrator
from orchestrator.cli import main
from orchestrator.cli.fleet import worker as command
from orchestrator.sdk.tasks.options import CallOptions
from orchestrator.workers.parent.processes import parse_memory, resident_memory
from orchestrator.workers.spec import WorkerSpec


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MB", 512 * 2**20), ("512 MiB", 512 * 2**20), ("1.5g", 3 * 2**29), ("700", 700), ("4K", 4096)],
)
def test_memory_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1MB", "1TB", "1 M B", "MB", "1e9"])
def test_invalid_memory_sizes_are_not_parsed(text: str) -> None:
    assert parse_memory(text) is None


def test_the_resident_memory_of_a_process_is_measured() -> None:
    assert 2**20 < resident_memory(os.getpid()) < 2**36
    assert resident_memory(2**22 + 1) == 0, "there is no such process"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--autoscale", "4"], "'4' is not a minimum and maximum number of processes, such as 1,8."),
        (["--autoscale", "0,4"], "'0,4' is not a minimum and maximum number of processes, such as 1,8."),
        (["--autoscale", "5,4"], "'5,4' is not a minimum and maximum number of processes, such as 1,8."),
        (["--autoscale", "a,b"], "'a,b' is not a minimum and maximum number of processes, such as 1,8."),
        (["--autoscale", "1,4", "--processes", "2"], "--autoscale sets the number of processes"),
        (["--max-memory", "lots"], "'lots' is not an amount of memory of 32MB or more, such as 512MB or 2GB."),
        (["--max-memory", "512"], "'512' is not an amount of memory of 32MB or more"),
        (["--max-tasks-per-process", "0"], "0 is not in the range x>=1"),
        (["-Q", "mail"], "use --app, --queues, --processes and --concurrency, or `orchestrator celery -A proj worker"),
    ],
)
def test_invalid_flags_are_rejected(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["worker", "--app", "nowhere:app", *words])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_flags_reach_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[WorkerSpec] = []

    def run_worker(spec: WorkerSpec, settings: object) -> int:
        specs.append(spec)
        return 0

    monkeypatch.setattr(command, "run_worker", run_worker)
    words = ["--autoscale", "2,6", "--max-memory", "1GB", "--max-tasks-per-process", "500", "--reload"]
    assert CliRunner().invoke(main, ["worker", "--app", "nowhere:app", *words]).exit_code == 0
    assert specs[0].autoscale == (2, 6)
    assert (specs[0].max_memory, specs[0].max_tasks_per_process, specs[0].reload) == (2**30, 500, True)


# -- timeouts of tasks


@pytest.mark.parametrize("value", [0, -1, "5", float("nan"), True])
def test_a_soft_timeout_must_be_positive(value: object) -> None:
    with pytest.raises(InvalidTask, match="Option soft_timeout: expected"):
        CallOptions(soft_timeout=value)  # type: ignore[arg-type]


def test_a_soft_timeout_must_be_less_than_the_timeout() -> None:
    with pytest.raises(InvalidTask, match=r"Option soft_timeout: expected less than the timeout \(5\)"):
        CallOptions(soft_timeout=5, timeout=5)
    app = Orchestrator()

    @app.task(timeout=10, soft_timeout=timedelta(seconds=8))
    def job() -> None: ...

    with pytest.raises(InvalidTask, match="expected less than the timeout"):
        job.options(timeout=3)
    options = job.options(timeout=30)._call_options.to_task_options(1.0)
    assert (options.timeout, options.soft_timeout) == (30.0, 8.0)


@pytest.mark.slow
def test_a_worker_serves_the_requested_queues() -> None:
    named = ["default", "images", "mail"]
    for given, served, unserved in (
        ((), ["default"], ["images", "mail"]),
        (("*",), named, []),
        (("*", "mail", "reports"), [*named, "reports"], []),
        (("mail",), ["mail"], []),
    ):
        spec = WorkerSpec(app="shop:app", queues=given)
        assert (spec.served(named), spec.unserved(named)) == (served, unserved)
