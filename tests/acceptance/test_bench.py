"""The benchmark runs, and prints its measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def bench(folder: Path, *options: str) -> tuple[Any, str]:
    """Return the benchmark's results and its output."""
    found = folder / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench", "--quick", *options, "--json", str(found)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(found.read_text()), done.stdout


def test_the_benchmark_runs(tmp_path: Path) -> None:
    found, said = bench(tmp_path, "--tasks", "200", "--singles", "20", "--probes", "5", "--seconds", "1")
    assert found["results"]["orchestrator"]["backlog_rate"] > 0
    assert "throughput, backlog" in said


@pytest.mark.parametrize("axis", ["pending", "finished", "unserved", "queues", "schedules", "histories"])
def test_io_per_task_does_not_grow_with_the_amount_of_data(tmp_path: Path, axis: str) -> None:
    found, _ = bench(tmp_path, "--growth", axis)
    small, large = found["growth"][axis].values()
    for counted in ("pages", "wal"):
        assert large[counted] < 2 * small[counted], (counted, small, large)
