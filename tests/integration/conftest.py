"""Fixtures that several modules here share."""

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
    """Two of everything behind the HTTP API."""
    with furnished(database_url, redis_url) as found:
        yield found


@pytest.fixture(scope="module")
def house(furniture: House) -> House:
    """The same; some modules put it in order before each test."""
    return furniture


@pytest.fixture(autouse=True)
def _connections_are_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """For the next test, unless it wants none of others."""
    if request.node.get_closest_marker("own_connections"):
        yield
        return
    with KEPT.used():
        yield


@pytest.fixture(autouse=True)
def _applications_that_are_not_served_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Or their connections wait for the garbage collector, and Postgres has a hundred."""
    made: list[Api] = []

    def make(settings: Settings) -> Api:
        made.append(Api(settings))
        return made[-1]

    monkeypatch.setattr(app, "Api", make)
    yield
    for one in made:
        one.close()
