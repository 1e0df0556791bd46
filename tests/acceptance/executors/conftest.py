"""One remote side and one scheduler for each executor; tests that disturb nothing share a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.testing import executor_stage
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.executors.bureaus import BureauHarness
from tests.acceptance.executors.clusters import KubernetesHarness, RqHarness
from tests.acceptance.executors.engines import CloudRunHarness, DaskHarness, RayHarness
from tests.acceptance.executors.harness import Harness, Stage
from tests.acceptance.executors.http_services import HttpHarness
from tests.acceptance.executors.processes import ProcessHarness
from tests.acceptance.executors.pullers import PullHarness

HARNESSES: list[type[Harness]] = [
    BureauHarness,
    CloudRunHarness,
    DaskHarness,
    HttpHarness,
    KubernetesHarness,
    ProcessHarness,
    PullHarness,
    RayHarness,
    RqHarness,
]
"""The executors that the suite is run over: add yours."""


@pytest.fixture(scope="module", params=HARNESSES, ids=lambda kind: kind.name)
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """An executor and its remote side."""
    harness: Harness = request.param(tmp_path_factory.mktemp(request.param.name))
    try:
        yield harness
    finally:
        harness.close()


@pytest.fixture(scope="module")
def house(
    harness: Harness, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """A scheduler, and whoever works."""
    folder = tmp_path_factory.mktemp("stack")
    with fresh_stack(database_url, redis_url, folder, **executor_stage.SETTINGS, **harness.settings()) as stack:
        harness.prepare(stack)
        stage = Stage(stack, harness)
        yield stage
        stage.close()


@pytest.fixture
def stage(request: pytest.FixtureRequest, house: Stage) -> Iterator[Stage]:
    """The same for one test, whose own workers are stopped after it."""
    if request.function.__name__ in house.harness.without:
        pytest.skip(f"makes no sense for {house.harness.name}, or is shown by tests of its own")
    yield house
    house.leave()
