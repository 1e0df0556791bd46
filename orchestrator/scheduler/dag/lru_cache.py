"""Keep what was used last, up to a total weight, so that memory has a limit whatever a leader lives through."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A mapping that forgets what was used longest ago. What was put in last is always there."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._weight = 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K) -> V | None:
        """Return what is kept under a key, and keep it longer."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, weight: int) -> V:
        """Keep something that weighs so much; return it."""
        self.drop(key)
        self._kept[key] = value, weight
        self._weight += weight
        while self._weight > self._most and len(self._kept) > 1:
            oldest, (_, lighter) = self._kept.popitem(last=False)
            self._weight -= lighter
            self._dropped(oldest)
        return value

    def drop(self, key: K) -> None:
        """Forget what is kept under a key."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._weight -= found[1]
            self._dropped(key)

    def _dropped(self, key: K) -> None:
        """Something is no longer kept."""

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._weight = 0
