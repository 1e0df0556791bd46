"""How events travel to the code, and who has to wait."""

from __future__ import annotations

from itertools import takewhile

from orchestrator.domain.code.history_budget import (
    LARGEST_HISTORY,
    MOST_IN_MESSAGES,
    MOST_IN_PAGES,
    PAGE,
    Allotment,
    Way,
)


def test_by_size() -> None:
    allotment = Allotment(0)
    sizes = (0, 500, PAGE, PAGE + 1, LARGEST_HISTORY, LARGEST_HISTORY + 1)
    ways = (Way.MESSAGE, Way.MESSAGE, Way.MESSAGE, Way.PAGES, Way.PAGES, Way.NEVER)
    assert tuple(map(allotment.way, sizes)) == ways


def test_a_thousand_at_once() -> None:
    """So many go that one more would be too many; the others come back one after another, within a minute."""
    allotment = Allotment(0)
    size = 30_000_000
    ways = [allotment.way(size) for _ in range(1_000)]
    gone = len(list(takewhile(lambda way: way is Way.PAGES, ways)))
    assert MOST_IN_PAGES <= gone * size < MOST_IN_PAGES + size
    assert set(ways[gone:]) == {Way.LATER}
    allotment = Allotment(MOST_IN_PAGES)
    waits = [(allotment.way(size), allotment.wait)[1] for _ in range(1_000)]
    assert waits == sorted(waits)
    assert 1.0 < waits[0] < 2.0 < waits[5] < waits[-1] == 60.0


def test_small_ones_do_not_wait_for_pages_nor_pages_for_small_ones() -> None:
    full = Allotment(MOST_IN_PAGES)
    assert (full.way(PAGE + 1), full.way(PAGE)) == (Way.LATER, Way.MESSAGE)
    full = Allotment(0)
    ways = [full.way(PAGE) for _ in range(1 + MOST_IN_MESSAGES // PAGE)]
    assert ways[-2:] == [Way.MESSAGE, Way.LATER]
    assert full.way(PAGE + 1) is Way.PAGES


def test_the_largest_goes_whenever_anything_does() -> None:
    """Else small ones could keep it waiting for ever."""
    assert Allotment(MOST_IN_PAGES - 1).way(LARGEST_HISTORY) is Way.PAGES
