"""How hard to look for bad input: a fixed few hundred examples in CI, or as many times that as one has patience for.

ORCHESTRATOR_FUZZ=50 ./scripts/test tests/unit/test_codec.py tests/integration/test_cli_fuzz.py
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("ORCHESTRATOR_FUZZ", "1"))


def examples(number: int) -> settings:
    """Return settings for a fuzz test: the same examples in every run unless more are asked for."""
    return settings(
        max_examples=number * FACTOR,
        derandomize=FACTOR == 1,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
