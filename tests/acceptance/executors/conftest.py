"""One remote service and one scheduler for each executor; tests that do not disturb each other share a worker."""

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
"""The executors that the suite runs over: add yours here."""


@pytest.fixture(scope="module", params=HARNESSES, ids=lambda kind: kind.name)
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """An executor and its remote service."""
    harness: Harness = request.param(tmp_path_factory.mktemp(request.param.name))
    try:
        yield harness
    finally:
        harness.close()


@pytest.fixture(scope="module")
def module_stage(
    harness: Harness, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """A scheduler with the executor's remote service, shared by the tests of a module."""
    folder = tmp_path_factory.mktemp("stack")
    with fresh_stack(database_url, redis_url, folder, **executor_stage.SETTINGS, **harness.settings()) as stack:
        harness.prepare(stack)
        stage = Stage(stack, harness)
        yield stage
        stage.close()


@pytest.fixture
def stage(request: pytest.FixtureRequest, module_stage: Stage) -> Iterator[Stage]:
    """The shared stage for one test; the test's own workers are stopped afterwards."""
    if request.function.__name__ in module_stage.harness.without:
        pytest.skip(f"makes no sense for {module_stage.harness.name}, or is shown by tests of its own")
    yield module_stage
    module_stage.leave()
