"""A leader's cache of recently used values."""

from __future__ import annotations

from orchestrator.scheduler.runs.kinds import LruCache


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    cache: LruCache[str, int] = LruCache(10)
    cache.put("a", 1, 4)
    cache.put("b", 2, 4)
    assert cache.get("a") == 1
    cache.put("c", 3, 4)
    assert [name for name in "abc" if name in cache] == ["a", "c"]


def test_the_newest_entry_is_kept_whatever_its_weight() -> None:
    cache: LruCache[str, int] = LruCache(10)
    cache.put("a", 1, 4)
    cache.put("b", 2, 40)
    assert (cache.get("a"), cache.get("b"), len(cache)) == (None, 2, 1)
    cache.put("c", 3, 1)
    assert (cache.get("b"), cache.get("c")) == (None, 3)


def test_replaced_and_dropped_entries_have_no_weight() -> None:
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
