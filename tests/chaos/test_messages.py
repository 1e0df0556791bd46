"""A short round of `python -m tests.chaos.messages`."""

from __future__ import annotations

import pytest

from tests.chaos import breakable
from tests.chaos.messages.__main__ import run


@pytest.mark.long  # tests/chaos/test_real.py tells journeys in each build
def test_kills_lose_double_and_reorder_no_message() -> None:
    with breakable.folder() as folder:
        verdict = run(5, 1, folder, runs=2, pace=(0.5, 1.5))
    assert not verdict.wrong
    assert sum(verdict.kills.values()) == 5
    assert min(verdict.signals, verdict.updates) > 0
