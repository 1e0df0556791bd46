"""The two routes by which a program reaches the orchestrator: directly over Postgres and Redis, and over HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from orchestrator import Orchestrator
from tests.acceptance.stack import Stack

Way = Literal["database", "http"]


@pytest.fixture(scope="module", params=["database", "http"], name="way")
def both_ways(request: pytest.FixtureRequest) -> Way:
    """Run the tests of a module over both routes. Import it into the module to use it."""
    way: Way = request.param
    return way


in_database = pytest.mark.parametrize("way", ["database"], indirect=True, scope="module")
"""Marks a test that needs a database transaction."""


def use_route(way: Way, stack: Stack, *apps: Orchestrator) -> None:
    """Connect applications to a stack over one route only; over HTTP they do not get the addresses of the stores."""
    if way == "http":
        settings = replace(stack.settings, database_url="", redis_url="", api_url=stack.api())
        for app in apps:
            app.close()
            app._client._settings = settings
