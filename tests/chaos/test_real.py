"""A short chaos run on real processes; scripts/chaos does long runs.

Each part has its share of every group of faults; together the parts have all faults.
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
    """Return the first experiment whose plan contains all faults of the part."""
    kinds = chosen((), without=left_out())[part::PARTS]
    template = Experiment(seed=0, seconds=8.0, every=0.5, workers=2, rate=12.0, faults=tuple(kinds))
    found = (replace(template, seed=seed) for seed in count(part + 1))
    return next(candidate for candidate in found if {strike.kind for strike in candidate.plan()} == set(kinds))


@pytest.mark.timeout(300)  # some 25 s, and far more on a busy machine
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.long_for("1")
def test_guarantees_hold_under_faults_on_real_processes(part: int, tmp_path: Path) -> None:
    planned = experiment(part)
    outcome = run(planned, tmp_path)
    report = ["", *outcome.violations[:20], "", *outcome.history, "", f"the same again: {planned.command()}"]
    assert not outcome.violations, "\n".join(report)
    assert outcome.tasks["success"] > 100
    assert sum(outcome.faults.values()) > len(planned.faults) / 2
