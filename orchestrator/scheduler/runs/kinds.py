"""Kinds of runs: what the leader asks of each of them, and how it keeps the runs that it plans."""

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


R = TypeVar("R")


class Saved(NamedTuple):
    """The stored fields of a run."""

    delta: Delta
    state: bytes
    expanding: bool = False
    is_open: bool = False
    """Steps of its plan are open, so that it cannot end."""


class Advanced(NamedTuple):
    """The result of advancing runs."""

    saved: dict[bytes, Saved]
    ends: Sequence[tuple[bytes, RunState, str | None]] = ()
    late: Set[bytes] = frozenset()
    """Runs that advance in a later tick, which has time to read their definitions."""


class RunKind(CommitHooks):
    """The interface of the runs of one kind of workflow; this class serves runs without a workflow."""

    name: str | None = None
    """The value of `RunRow.kind` of its runs."""
    ends_itself = False
    """Its planner or its code says how a run ends. Other runs end when nothing of them is open."""
    has_hooks = False
    """The definition may name tasks that follow the end of a run."""
    is_listened_to = True
    """Other workflows may start when a run ends."""

    def hooks(self, run: bytes, state: str) -> tuple[int, int]:  # noqa: ARG002
        """Return how many hooks follow this end of a run that was planned just now, and how much each is given."""
        return 0, 0

    def drop(self, ids: Sequence[bytes]) -> None:
        """Forget runs that have ended, or are being cancelled. If they go on, Postgres has them."""

    def ended(self, tx: Transaction, rows: Sequence[RunRow]) -> None:
        """Clean up after runs that have ended."""


class PlannedRuns(RunKind, Generic[R]):
    """Runs of DAGs or flows. Each is kept as it stands in Postgres, and is read again after a tick that failed."""

    def __init__(self, weight: int) -> None:
        self._runs: LruCache[bytes, R] = LruCache(weight)

    def plans(self, changes: Sequence[RunChanges]) -> bool:
        """Say whether a plan of this kind has to hear of changes of a run, if the run has one."""
        raise NotImplementedError

    def advance(self, tx: Transaction, changes: Mapping[bytes, Sequence[RunChanges]]) -> Advanced:
        """Notify plans of what happened to their runs, and start what follows."""
        raise NotImplementedError

    def rolled_back(self) -> None:
        """Undo plans after a rollback."""
        self._runs.clear()

    def drop(self, ids: Sequence[bytes]) -> None:
        for run in ids:
            self._runs.drop(run)
