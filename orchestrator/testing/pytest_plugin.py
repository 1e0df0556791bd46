"""Fixtures for pytest, registered as a plugin. Nothing else is imported until a test uses one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from orchestrator.sdk.app import Orchestrator
    from orchestrator.testing.services import TestServices


@pytest.fixture(scope="session")
def _orchestrator_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServices]:
    from orchestrator.testing.services import started_services  # imports the embedded servers, which few tests need

    with started_services(tmp_path_factory.mktemp("orchestrator")) as services:
        yield services


@pytest.fixture
def orchestrator_services(_orchestrator_session: TestServices) -> TestServices:
    """Return Postgres, Redis, a scheduler and a worker, without data of earlier tests."""
    _orchestrator_session.empty()
    return _orchestrator_session


@pytest.fixture
def orchestrator_app(orchestrator_services: TestServices) -> Orchestrator:
    """Return the application named by the setting `app`, connected to these services."""
    return orchestrator_services.app
