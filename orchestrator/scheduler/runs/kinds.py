"""The interface of kinds of runs to the leader, and the cache of planned runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import Generic, NamedTuple, TypeVar

from orchestrator.domain.dag.state import Delta
from orchestrator.domain.runs import RunChanges
from orchestrator.domain.states import RunState
from orchestrator.scheduler.tick_result import CommitHooks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.runs.transitions import RunRow

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A weighted least-recently-used cache. The latest entry is always kept."""

    def __init__(self, max_weight: int) -> None:
        self._max_weight = max_weight
        self._weight = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of a key, and mark it as used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, weight: int) -> V:
        """Store a value with its weight. Return the value."""
        self.drop(key)
        self._entries[key] = value, weight
        self._weight += weight
        while self._weight > self._max_weight and len(self._entries) > 1:
            oldest, (_, old_weight) = self._entries.popitem(last=False)
            self._weight -= old_weight
            self._dropped(oldest)
        return value

    def drop(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._weight -= entry[1]
            self._dropped(key)

    def _dropped(self, key: K) -> None:
        """Called when a key was removed."""

    def clear(self) -> None:
        """Remove everything."""
        self._entries.clear()
        self._weight = 0


R = TypeVar("R")


class Saved(NamedTuple):
    """The fields of a run to store."""

    delta: Delta
    state: bytes
    expanding: bool = False
    is_open: bool = False
    """Steps of the plan are open, so the run cannot end."""


class Advanced(NamedTuple):
    """The result of advancing runs."""

    saved: dict[bytes, Saved]
    ends: Sequence[tuple[bytes, RunState, str | None]] = ()
    postponed: Set[bytes] = frozenset()
    """Runs to advance in a later tick that has time to read their definitions."""


class RunKind(CommitHooks):
    """The interface of the runs of one kind of workflow. This class serves runs without a workflow."""

    name: str | None = None
    """The value of `RunRow.kind` of these runs."""
    ends_itself = False
    """The planner or the code ends the run. Other runs end when nothing in them is open."""
    has_hooks = False
    """The definition may name tasks that follow the end of a run."""
    is_listened_to = True
    """Other workflows may start when a run ends."""

    def hooks(self, run: bytes, state: str) -> tuple[int, int]:  # noqa: ARG002
        """Return how many hooks follow the end of a run planned in this tick, and the bytes of each one's input."""
        return 0, 0

    def drop(self, ids: Sequence[bytes]) -> None:
        """Drop cached runs that have ended or are being cancelled. Postgres has them if they continue."""

    def ended(self, tx: Transaction, rows: Sequence[RunRow]) -> None:
        """Clean up after ended runs."""


class PlannedRuns(RunKind, Generic[R]):
    """Runs of DAGs or flows, cached as stored in Postgres. The cache is cleared after a rollback."""

    def __init__(self, weight: int) -> None:
        self._runs: LruCache[bytes, R] = LruCache(weight)

    def plans(self, changes: Sequence[RunChanges]) -> bool:
        """Return whether plans of this kind must see these changes."""
        raise NotImplementedError

    def advance(self, tx: Transaction, changes: Mapping[bytes, Sequence[RunChanges]]) -> Advanced:
        """Apply changes to plans, and start what follows."""
        raise NotImplementedError

    def rolled_back(self) -> None:
        """Clear the cached plans."""
        self._runs.clear()

    def drop(self, ids: Sequence[bytes]) -> None:
        for run in ids:
            self._runs.drop(run)
