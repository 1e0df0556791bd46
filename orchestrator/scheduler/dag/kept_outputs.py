"""Keep outputs of steps in memory that are read again, up to a number of bytes, and no longer than their runs last."""

from __future__ import annotations

from typing import Any

from orchestrator.scheduler.dag.lru_cache import LruCache
from orchestrator.store.dag.plans import Key


class KeptOutputs(LruCache[Key, Any]):
    """Outputs of which some are kept until all that waits for them has started, and others as long as their run."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._passing: dict[bytes, dict[str, bool]] = {}
        """By run, the steps whose outputs are kept, and which of them only until no step of the run waits."""

    def keep(self, key: Key, value: Any, weight: int, *, is_passing: bool) -> None:
        """Keep an output that weighs so much."""
        self.put(key, value, weight)
        self._passing.setdefault(key[0], {})[key[1]] = is_passing

    def keep_longer(self, key: Key) -> None:
        """Keep an output that is kept already as long as its run."""
        self._passing[key[0]][key[1]] = False

    def drop_passing(self, run: bytes) -> None:
        """No step of a run waits any more: forget what was kept for that."""
        for step in [step for step, is_passing in self._passing.get(run, {}).items() if is_passing]:
            self.drop((run, step))

    def drop_run(self, run: bytes) -> None:
        """Forget all outputs of a run."""
        for step in list(self._passing.get(run, ())):
            self.drop((run, step))

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._passing.clear()

    def _dropped(self, key: Key) -> None:
        steps = self._passing.get(key[0])
        if steps is not None:
            steps.pop(key[1], None)
            if not steps:
                del self._passing[key[0]]
