"""The verdict of a soak test: which measurements count as growth, and which do not."""

from __future__ import annotations

import random

import pytest

from tests.chaos.soak.lines import LINES, Line
from tests.chaos.soak.verdict import Verdict, judge, slope

TIMES = [float(second) for second in range(1_800)]
HALF = TIMES[-1] / 2
LINE = Line(key="memory", panel="Memory", label="veteran", unit="MB", may_grow=4.0, may_grow_share=0.05)


def judged(values: list[float | None], line: Line = LINE) -> Verdict:
    verdict = judge(line, TIMES, values)
    assert verdict is not None
    return verdict


def test_a_leak_is_found_despite_noise_and_spikes() -> None:
    roll = random.Random(1)
    values = [50 + 0.01 * at + roll.gauss(0, 3) + (200 if roll.random() < 0.1 else 0) for at in TIMES]
    verdict = judged(list(values))
    assert verdict.growth == pytest.approx(0.01 * HALF, rel=0.2)
    assert not verdict.flat


def test_noise_spikes_and_warm_up_do_not_count_as_growth() -> None:
    roll = random.Random(2)
    warm_up = [50 + min(40, at / 10) for at in TIMES]
    values = [value + roll.gauss(0, 3) + (200 if roll.random() < 0.2 else 0) for value in warm_up]
    verdict = judged(list(values))
    assert abs(verdict.growth) < 2
    assert verdict.flat
    assert verdict.median == pytest.approx(90, abs=2)


def test_falling_values_pass() -> None:
    assert judged([1_000 - at / 2 for at in TIMES]).flat


def test_growth_within_a_share_of_the_median_passes() -> None:
    grows_by_twenty = [1_000 + 20 * at / HALF for at in TIMES]
    verdict = judged(list(grows_by_twenty))
    assert verdict.allowed == pytest.approx(51, abs=1)
    assert verdict.flat


def test_missing_values_do_not_count() -> None:
    values = [None if int(at) % 3 else 7.0 for at in TIMES]
    assert judged(values).growth == 0
    assert judge(LINE, TIMES, [None] * len(TIMES)) is None
    assert judge(LINE, [], []) is None


def test_a_line_without_a_limit_passes_however_it_grows() -> None:
    shown = Line(key="history", panel="History", label="all", unit="MB")
    assert judged([at * at for at in TIMES], shown).flat


def test_the_slope_of_a_straight_line_is_exact() -> None:
    assert slope([(at, 3 * at + 1) for at in TIMES[:50]]) == pytest.approx(3)
    assert slope([(1.0, 2.0)]) == 0


def test_lines_of_a_panel_share_a_unit_and_keys_are_unique() -> None:
    assert len({line.key for line in LINES}) == len(LINES)
    assert len({(line.panel, line.unit) for line in LINES}) == len({line.panel for line in LINES})
