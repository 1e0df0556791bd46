"""How many examples a property is tried with: some in every build, many times that in `scripts/test --long`.

ORCHESTRATOR_FUZZ=50 ./scripts/test tests/unit/test_codec.py tests/integration/test_cli_fuzz.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("ORCHESTRATOR_FUZZ", "1"))


def examples(number: int, **more: Any) -> settings:
    """Return settings for a property: the same examples in every run unless more are asked for."""
    return settings(
        max_examples=number * FACTOR,
        derandomize=FACTOR == 1,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        **more,
    )


def in_batches(variable: str, many: int, *, few: int = 25, batch: int = 200) -> pytest.MarkDecorator:
    """Give a test the numbers of random programs: the first few in every build, all of them with `--long`.

    A variable of the environment changes how many all are.
    """
    many = int(os.environ.get(variable, many))
    rest = (pytest.param(first, min(batch, many - first), marks=pytest.mark.long) for first in range(0, many, batch))
    return pytest.mark.parametrize(("first", "number"), [(0, few), *rest])
