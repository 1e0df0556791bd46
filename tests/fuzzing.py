"""The number of examples of property tests: few in every build, many in `scripts/test --long`.

ORCHESTRATOR_FUZZ=50 ./scripts/test tests/unit/test_codec.py tests/integration/test_cli_fuzz.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("ORCHESTRATOR_FUZZ", "1"))


def examples(number: int, **more: Any) -> settings:
    """Return Hypothesis settings: the same examples in every run, unless ORCHESTRATOR_FUZZ asks for more."""
    return settings(
        max_examples=number * FACTOR,
        derandomize=FACTOR == 1,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        **more,
    )


def in_batches(variable: str, many: int, *, few: int = 25, batch: int = 200) -> pytest.MarkDecorator:
    """Parametrize a test with ranges of random programs: the first `few` in every build, all with `--long`.

    The environment variable `variable` overrides `many`, the number of all programs.
    """
    many = int(os.environ.get(variable, many))
    rest = (pytest.param(first, min(batch, many - first), marks=pytest.mark.long) for first in range(0, many, batch))
    return pytest.mark.parametrize(("first", "number"), [(0, few), *rest])
