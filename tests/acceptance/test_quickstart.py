"""The first command of the README, with servers of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_quickstart_reports_readiness_and_ends_gracefully() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
    with tempfile.TemporaryDirectory(prefix="orchestrator-quickstart-") as folder:
        Path(folder).chmod(0o755)  # Postgres may have to run as another user
        with subprocess.Popen(
            [sys.executable, str(REPOSITORY / "examples" / "quickstart.py")],
            cwd=folder,
            env={**clean, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as quickstart:
            assert quickstart.stdout is not None
            first = quickstart.stdout.readline()
            log = (Path(folder) / ".orchestrator" / "quickstart.log").read_text(encoding="utf-8")
            rest = quickstart.stdout.read()
    assert first.startswith("✓ Postgres, Redis, a scheduler and a worker run"), first + rest
    assert "scheduler.leading term=1" in log
    assert log.count("process.ready") == 2
    assert quickstart.returncode == 0, rest
    assert "25,997 primes below 300,000" in rest
    assert "No scheduler leads" not in rest
