"""Clients of the pull protocol pass its conformance suite, and clients that break a rule fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.testing.pull_conformance import CHECKS

CLIENT = [sys.executable, str(Path(__file__).parent / "pull_client.py")]


def conformance(command: list[str], only: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the conformance suite over a client."""
    suite = [sys.executable, "-m", "orchestrator.testing.pull_conformance", "--only", only, "--", *command]
    servers = ("ORCHESTRATOR_DATABASE_URL", "ORCHESTRATOR_REDIS_URL")  # the suite starts its own servers
    own = {name: value for name, value in os.environ.items() if name not in servers}
    return subprocess.run(suite, env={**own, **environment}, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.long
@pytest.mark.timeout(1_000)
def test_a_client_in_python_passes_the_conformance_suite() -> None:
    done = conformance(CLIENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok   ") == len(CHECKS)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("broken", "check"),
    [
        ("logs", "log lines arrive"),
        ("heartbeat", "heartbeats keep work"),
        ("cancel", "cancelled work"),
        ("complete", "completion without an answer"),
        ("pause", "busy api"),
        ("sigterm", "sigterm lets work end"),
    ],
)
def test_the_conformance_suite_detects_a_broken_client(broken: str, check: str) -> None:
    done = conformance(CLIENT, check, BROKEN=broken)
    assert (done.returncode, done.stdout[:5]) == (1, "FAIL "), done.stdout + done.stderr
