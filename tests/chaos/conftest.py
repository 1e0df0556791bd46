"""Command line options of the fault simulator, and of the failover measurement."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulator", "fault simulator")
    group.addoption("--seeds", type=int, default=None, help="run this many seeds of the fault simulator")
    group.addoption("--seed", type=int, default=None, help="run one seed of the fault simulator, and print its trace")
    group = parser.getgroup("failover", "failover")
    group.addoption("--kills", type=int, default=None, help="kill, and end, this many leaders")
