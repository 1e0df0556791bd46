"""How histories are delivered to workflow code, and which deliveries wait."""

from __future__ import annotations

from itertools import takewhile

from orchestrator.domain.code.activation import (
    MAX_HISTORY,
    MAX_IN_MESSAGES,
    MAX_IN_PAGES,
    PAGE,
    Delivery,
    HistoryBudget,
)


def test_the_size_of_a_history_decides_its_delivery() -> None:
    budget = HistoryBudget(0)
    sizes = (0, 500, PAGE, PAGE + 1, MAX_HISTORY, MAX_HISTORY + 1)
    ways = (Delivery.MESSAGE, Delivery.MESSAGE, Delivery.MESSAGE, Delivery.PAGES, Delivery.PAGES, Delivery.NEVER)
    assert tuple(map(budget.delivery, sizes)) == ways


def test_deliveries_beyond_the_budget_wait_in_turn() -> None:
    """Deliveries begin until the budget is spent; the rest is retried one after another, within a minute."""
    budget = HistoryBudget(0)
    size = 30_000_000
    ways = [budget.delivery(size) for _ in range(1_000)]
    gone = len(list(takewhile(lambda delivery: delivery is Delivery.PAGES, ways)))
    assert MAX_IN_PAGES <= gone * size < MAX_IN_PAGES + size
    assert set(ways[gone:]) == {Delivery.LATER}
    budget = HistoryBudget(MAX_IN_PAGES)
    waits = [(budget.delivery(size), budget.wait)[1] for _ in range(1_000)]
    assert waits == sorted(waits)
    assert 1.0 < waits[0] < 2.0 < waits[5] < waits[-1] == 60.0


def test_small_and_paged_histories_have_separate_budgets() -> None:
    full = HistoryBudget(MAX_IN_PAGES)
    assert (full.delivery(PAGE + 1), full.delivery(PAGE)) == (Delivery.LATER, Delivery.MESSAGE)
    full = HistoryBudget(0)
    ways = [full.delivery(PAGE) for _ in range(1 + MAX_IN_MESSAGES // PAGE)]
    assert ways[-2:] == [Delivery.MESSAGE, Delivery.LATER]
    assert full.delivery(PAGE + 1) is Delivery.PAGES


def test_the_largest_history_is_delivered_whenever_the_budget_has_room() -> None:
    """Otherwise small histories could delay the largest forever."""
    assert HistoryBudget(MAX_IN_PAGES - 1).delivery(MAX_HISTORY) is Delivery.PAGES
