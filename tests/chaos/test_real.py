"""A short piece of chaos on real processes; scripts/chaos runs long ones.

Each part has its share of every group of faults, and together they have all.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.chaos.real.faults import left_out
from tests.chaos.real.plan import chosen
from tests.chaos.real.run import Experiment, run

PARTS = 2


def experiment(part: int) -> Experiment:
    """Return the first experiment whose plan leaves none of its kinds of faults out."""
    kinds = chosen((), without=left_out())[part::PARTS]
    given = Experiment(seed=0, seconds=8.0, every=0.5, workers=2, rate=12.0, faults=tuple(kinds))
    found = (replace(given, seed=seed) for seed in count(part + 1))
    return next(one for one in found if {strike.kind for strike in one.plan()} == set(kinds))


@pytest.mark.timeout(300)  # some 25 s, and far more where others use the machine
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.long_for("1")
def test_the_promises_hold_on_real_processes(part: int, tmp_path: Path) -> None:
    wanted = experiment(part)
    outcome = run(wanted, tmp_path)
    told = ["", *outcome.violations[:20], "", *outcome.history, "", f"the same again: {wanted.command()}"]
    assert not outcome.violations, "\n".join(told)
    assert outcome.tasks["success"] > 100
    assert sum(outcome.faults.values()) > len(wanted.faults) / 2
