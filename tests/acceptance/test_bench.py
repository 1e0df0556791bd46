"""The benchmark runs, and says what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    sizes = ["--quick", "--tasks", "200", "--singles", "20", "--probes", "5", "--seconds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench", *sizes, "--json", str(found)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(found.read_text())["results"]["orchestrator"]["backlog_rate"] > 0
    assert "throughput, backlog" in done.stdout
