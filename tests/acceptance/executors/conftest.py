"""One stack and one remote side for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.executors.bureaus import BureauHarness
from tests.acceptance.executors.harness import Harness
from tests.acceptance.executors.processes import ProcessHarness
from tests.acceptance.stack import Stack

HARNESSES: list[type[Harness]] = [BureauHarness, ProcessHarness]
"""The executors that the suite is run over: add yours."""


@pytest.fixture
def settings() -> dict[str, float]:
    """Impatient, so that the tests need not be patient."""
    return {"worker_ttl": 2.0, "heartbeat": 0.5, "lease": 2.0}


@pytest.fixture(params=HARNESSES, ids=lambda kind: kind.name)
def harness(request: pytest.FixtureRequest, stack: Stack, tmp_path: Path) -> Iterator[Harness]:
    """An executor and its remote side."""
    if request.function.__name__ in request.param.without:
        pytest.skip(f"makes no sense for {request.param.name}: see docs/executors.md")
    harness: Harness = request.param(tmp_path)
    harness.prepare(stack)
    try:
        yield harness
    finally:
        harness.close()
