"""What a leader keeps of what it used last."""

from __future__ import annotations

from orchestrator.scheduler.dag.recent import Recent


def test_what_was_used_longest_ago_goes_first() -> None:
    recent: Recent[str, int] = Recent(10)
    recent.put("a", 1, 4)
    recent.put("b", 2, 4)
    assert recent.get("a") == 1
    recent.put("c", 3, 4)
    assert [name for name in "abc" if name in recent] == ["a", "c"]


def test_what_came_last_is_kept_however_heavy_it_is() -> None:
    recent: Recent[str, int] = Recent(10)
    recent.put("a", 1, 4)
    recent.put("b", 2, 40)
    assert (recent.get("a"), recent.get("b"), len(recent)) == (None, 2, 1)
    recent.put("c", 3, 1)
    assert (recent.get("b"), recent.get("c")) == (None, 3)


def test_what_is_put_again_or_dropped_weighs_nothing_more() -> None:
    recent: Recent[str, int] = Recent(10)
    for _ in range(100):
        recent.put("a", 1, 4)
    recent.put("b", 2, 4)
    recent.drop("b")
    recent.drop("unknown")
    recent.put("c", 3, 6)
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (1, None, 3)
    recent.clear()
    assert len(recent) == 0
