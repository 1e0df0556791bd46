"""Fixtures shared by the integration tests."""

from collections.abc import Iterator

import pytest

from orchestrator.api import app
from orchestrator.api.context import Api
from orchestrator.settings import Settings
from tests.connections import KEPT
from tests.integration.api_house import House, furnished
from tests.integration.code_stage import engine_
from tests.integration.stage import addresses, engine, in_empty_folder, system, way

__all__ = ["addresses", "engine", "engine_", "in_empty_folder", "system", "way"]


@pytest.fixture(scope="module")
def furniture(database_url: str, redis_url: str) -> Iterator[House]:
    """The two sets of API data, shared by the tests of a module."""
    with furnished(database_url, redis_url) as found:
        yield found


@pytest.fixture(scope="module")
def house(furniture: House) -> House:
    """The two sets of API data; some modules override this fixture to reset the data before each test."""
    return furniture


@pytest.fixture(autouse=True)
def _connections_are_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reuse Postgres connections between tests, unless the test is marked `own_connections`."""
    if request.node.get_closest_marker("own_connections"):
        yield
        return
    with KEPT.used():
        yield


@pytest.fixture(autouse=True)
def _applications_that_are_not_served_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close API applications that no server closes: each keeps connections, and Postgres allows 100."""
    made: list[Api] = []

    def make(settings: Settings) -> Api:
        made.append(Api(settings))
        return made[-1]

    monkeypatch.setattr(app, "Api", make)
    yield
    for api in made:
        api.close()
