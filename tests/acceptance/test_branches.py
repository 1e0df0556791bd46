"""The example flow whose nodes are services takes both branches, over HTTP, with real services."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from tests.acceptance.conftest import fresh_stack
from tests.forking import FORKING
from tests.integration.test_serve import served
from tests.waiting import eventually

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_both_branches_are_taken(database_url: str, redis_url: str, tmp_path: Path) -> None:
    with fresh_stack(database_url, redis_url, tmp_path) as stack:
        stack.scheduler()
        stack.worker()
        address = stack.api()
        with served("services:app", EXAMPLES, "--registry", address):
            eventually(lambda: httpx.get(f"{address}/workers/list?service=sum").json(), "the services are registered")
            environment = {**os.environ, "SCHEDULER_BASE": address}
            done = FORKING.run("branches.py", environment=environment, folder=EXAMPLES)
    assert done.returncode == 0, done.stderr
    assert "goB: completed, result = 40" in done.stdout
    assert "goC: completed, result = 6" in done.stdout
    assert "route, attempt 1: ok" in done.stdout
