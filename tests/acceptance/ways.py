"""The two ways in which a program reaches the orchestrator: over its stores, and over HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from orchestrator import Orchestrator
from tests.acceptance.stack import Stack

Way = Literal["database", "http"]


@pytest.fixture(scope="module", params=["database", "http"], name="way")
def both_ways(request: pytest.FixtureRequest) -> Way:
    """Import this into a module whose tests are to be run over both."""
    way: Way = request.param
    return way


in_database = pytest.mark.parametrize("way", ["database"], indirect=True, scope="module")
"""For a test of what needs a transaction of the database."""


def take(way: Way, stack: Stack, *apps: Orchestrator) -> None:
    """Let applications that use a stack reach it in one way only; over HTTP, they do not know where its stores are."""
    if way == "http":
        settings = replace(stack.settings, database_url="", redis_url="", api_url=stack.api())
        for app in apps:
            app.close()
            app._client._settings = settings
