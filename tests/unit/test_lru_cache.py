"""What a leader keeps of what it used last."""

from __future__ import annotations

from orchestrator.scheduler.runs.kinds import LruCache


def test_what_was_used_longest_ago_goes_first() -> None:
    cache: LruCache[str, int] = LruCache(10)
    cache.put("a", 1, 4)
    cache.put("b", 2, 4)
    assert cache.get("a") == 1
    cache.put("c", 3, 4)
    assert [name for name in "abc" if name in cache] == ["a", "c"]


def test_what_came_last_is_kept_however_heavy_it_is() -> None:
    cache: LruCache[str, int] = LruCache(10)
    cache.put("a", 1, 4)
    cache.put("b", 2, 40)
    assert (cache.get("a"), cache.get("b"), len(cache)) == (None, 2, 1)
    cache.put("c", 3, 1)
    assert (cache.get("b"), cache.get("c")) == (None, 3)


def test_what_is_put_again_or_dropped_weighs_nothing_more() -> None:
    cache: LruCache[str, int] = LruCache(10)
    for _ in range(100):
        cache.put("a", 1, 4)
    cache.put("b", 2, 4)
    cache.drop("b")
    cache.drop("unknown")
    cache.put("c", 3, 6)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    cache.clear()
    assert len(cache) == 0
