"""Limits on the work of one tick, so that it ends well within the lease.

A tick leaves planning beyond its share of the lease to the next tick. If a single run takes all the time, Postgres ends
the session, and the leader remembers which run it was planning. It then plans runs one by one, and marks it as stuck.

Many runs together may also take too long on a busy machine. After a tick that ran out of time, the next does as little
as possible. Ticks that end in time do more again: quickly up to half of the failed amount, then slowly.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

from orchestrator.domain.ids import tree_of

_FULL_SHARE = 1_024
_SHRINK_DIVISOR = 32
"""Divisor of a part's share after a timeout."""
_FIRST_PAUSE, _MAX_PAUSE = 1.0, 30.0
"""Seconds for which a part is skipped after it times out with a single row."""


class Share:
    """The amount of work done at once. It grows fast to half of what failed, then slowly."""

    def __init__(self, full: int) -> None:
        self.full = self.now = self._ceiling = full

    def shrink(self, to: int) -> None:
        """Reduce the amount after a timeout."""
        self._ceiling, self.now = max(1, self.now // 2), max(1, to)

    def grow(self) -> None:
        """Increase the amount after work that ended in time."""
        self.now = min(self.full, self.now + (self.now if self.now < self._ceiling else max(1, self.now // 16)))


@dataclass
class _SlowPart:
    share: Share = field(default_factory=lambda: Share(_FULL_SHARE))
    pause: float = _FIRST_PAUSE
    paused_until: float = 0.0
    statement: str = ""


class Parts:
    """Remembers the parts of ticks that took too long, across ticks and terms."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._slow: dict[str, _SlowPart] = {}
        self.on_timeout: Callable[[str], object] = lambda _: None
        """Called with the name of a statement that took too long."""

    def __bool__(self) -> bool:
        return bool(self._slow)

    def row_limit(self, part: str, rows: int) -> int:
        """Return how many rows a part may process that normally processes `rows`."""
        slow = self._slow.get(part)
        return rows if slow is None else max(1, rows * slow.share.now // _FULL_SHARE)

    def is_paused(self, part: str) -> bool:
        """Return whether a part is skipped for now."""
        slow = self._slow.get(part)
        return slow is not None and self._monotonic() < slow.paused_until

    def timed_out(self, part: str, statement: str) -> None:
        """Note that a statement of a part took too long."""
        slow = self._slow.setdefault(part, _SlowPart())
        slow.statement = statement
        if slow.share.now == 1:
            slow.paused_until = self._monotonic() + slow.pause
            slow.pause = min(2 * slow.pause, _MAX_PAUSE)
        slow.share.shrink(slow.share.now // _SHRINK_DIVISOR)
        self.on_timeout(statement)

    def worked(self, part: str) -> None:
        """Note that a part ended in time."""
        slow = self._slow.get(part)
        if slow is None:
            return
        slow.pause = _FIRST_PAUSE
        slow.share.grow()
        if slow.share.now == _FULL_SHARE:
            del self._slow[part]

    def describe(self) -> str | None:
        """Describe the slowed parts in a sentence; None without any."""
        if not self._slow:
            return None
        parts = ", ".join(f"{part!r} (statement {slow.statement})" for part, slow in self._slow.items())
        return (
            f"Statements of the scheduler take too long, so these parts do less, or wait: {parts}. All other parts "
            f"continue. Postgres was asked for new statistics; if this persists, look at the statement in "
            f"pg_stat_activity."
        )


T = TypeVar("T")
SHARE = 0.1
"""The share of the lease in which a tick plans runs. Dispatch waits for it."""
SLICE = 2_000
"""Steps planned between two checks of the clock."""
COST = 6
"""The cost of notifying a run, as a number of planned steps."""
_MAX_DATA = 4_000_000
"""Bytes of input created in one tick, roughly at most: Postgres has to store them."""
_HOOK_OVERHEAD = 1_000
"""Bytes that a hook counts in addition to its input, for the time that its row takes Postgres."""
_MAX_CHILDREN = 1_000
"""Child runs created in one tick, at most, and as many again for trees without any. Their rows are costly."""
_MAX_NODES = 10_000
"""Nodes of flow definitions read in one tick, beyond which no further flow is read: some 20 milliseconds."""
_CHILDREN_OF_FURTHER_TREE = 100
"""Child runs that a tree gets even if other trees have used up the tick's room."""
_TOO_LONG = 0.4
"""The share of the lease that a single run may take of the processor."""
_LATE = 0.5
"""The share of the lease, by the clock, beyond which the next tick does less."""
_IN_TIME = 0.3
"""The share of the lease, by the clock, up to which the next tick does more."""
_MAX_FAILURES = 6
"""Failures after which a run is set aside. They are forgotten when the run was planned in time."""
_MAX_SUSPECTS = 10_000
"""Runs with remembered failures, and refused runs, at most."""


class Evidence(IntEnum):
    """How a tick that planned a single run took too long. The value is the number of failures it counts as."""

    COMPUTED = 6
    """The run took too much processor time."""
    KEPT_POSTGRES = 3
    """Postgres was busy for too long, perhaps because of other work."""
    WAITED = 2
    """The tick took too long by the clock, perhaps while other programs had the processor."""


class TooSlow(Exception):
    """Planning a run takes longer than other work can wait."""


@dataclass
class TickBudget:
    """The time that a tick has left, and the amount of work it does at once."""

    monotonic: Callable[[], float] = time.monotonic
    until: float = math.inf
    slice: int = SLICE
    """Steps planned at once; fewer after a tick that took too long."""
    is_slowed: bool = False
    """`slice` is reduced."""
    refused: frozenset[bytes] = frozenset()
    """Runs and requests that are no longer tried because they take too long."""
    at_fault: Mapping[bytes, str] = field(default_factory=dict)
    """The step that was being evaluated when a refused run took too long, where known."""
    resolved: set[bytes] = field(default_factory=set)
    """Refused runs and requests that were set aside or freed in this tick."""
    given_up: set[bytes] = field(default_factory=set)
    """Runs that are refused from the next tick on."""
    _data: int = 0
    """Bytes of input of the tasks and child runs created so far."""
    _served: set[bytes] = field(default_factory=set)
    """Trees of runs that were given tasks or child runs in this tick."""
    _children: dict[bytes, int] = field(default_factory=dict)
    """Child runs created so far, by tree."""
    _hooks: int = 0
    """Bytes of input of the hooks of ended runs."""
    has_postponed: bool = False
    """Some runs were postponed: they end, or are read, in a later tick."""
    read_nodes: int = 0
    """Nodes of the flow definitions read so far."""
    evaluated: set[str] = field(default_factory=set)
    """Kinds of runs of which an expensive expression was evaluated in the current part."""
    triggers_evaluated: int = 0
    """Triggers evaluated so far."""
    trigger_cost: int = 0
    """The cost of these triggers' filters, parameters and keys, in units of `Work`."""
    busy_with: list[bytes] = field(default_factory=list)
    """The runs being planned, or the requests being applied."""
    step: str | None = None
    """The step being evaluated, and which of its expressions."""
    parts: Parts = field(default_factory=Parts)
    """The parts of ticks that took too long before."""
    part: str | None = None
    """The current part of the tick."""
    parts_done: set[str] = field(default_factory=set)
    has_timed_out: bool = False
    """A statement of a part took too long in this tick."""
    suspects: frozenset[bytes] = frozenset()
    """Runs and requests during which an earlier tick ran out of time."""
    done: set[bytes] = field(default_factory=set)
    """Suspects that this tick completed."""
    _began: float = 0.0

    @property
    def is_spent(self) -> bool:
        """Return whether work that has not begun must wait for the next tick."""
        return self.monotonic() >= self.until

    def slices(self, runs: Sequence[T], steps: Callable[[T], int] = lambda _: 0) -> Iterator[list[T]]:
        """Divide runs into slices between two checks of the clock, by the number of steps to examine."""
        slice_: list[T] = []
        size = 0
        for run in runs:
            if slice_ and size + COST + steps(run) > self.slice:
                yield slice_
                slice_, size = [], 0
            size += COST + steps(run)  # which is known by now if the last slice had a run of the same version
            slice_.append(run)
        if slice_:
            yield slice_

    def has_room_for_data(self, run: bytes) -> bool:
        """Return whether the tick has room for the inputs of more tasks of a run.

        A tree of runs without any tasks in this tick does not wait because of other trees.
        """
        return self._data < _MAX_DATA or (tree_of(run) not in self._served and self._data < 2 * _MAX_DATA)

    def created(self, run: bytes, size: int) -> None:
        """Count the input of a task or child run created for a run."""
        self._data += size
        self._served.add(tree_of(run))

    def room_for_children(self, run: bytes) -> int:
        """Return how many more child runs a run may create in this tick.

        A tree with few child runs always gets at least one, so that no tree blocks another.
        """
        created = sum(self._children.values())
        if created < _MAX_CHILDREN and not self.is_spent:
            return _MAX_CHILDREN - created
        own = self._children.get(tree_of(run), 0)
        return max(0, (_CHILDREN_OF_FURTHER_TREE if created < 2 * _MAX_CHILDREN else 1) - own)

    def created_child(self, run: bytes, size: int) -> None:
        """Count a child run and its input."""
        self.created(run, size)
        tree = tree_of(run)
        self._children[tree] = self._children.get(tree, 0) + 1

    def has_room_for_hooks(self, number: int, size: int) -> bool:
        """Return whether a run with `number` hooks of `size` bytes may end in this tick; count the hooks if so.

        The first run with hooks may always end, and so may any run without.
        """
        more = number * (_HOOK_OVERHEAD + size)
        if number and self._hooks and self._hooks + more > _MAX_DATA:
            self.has_postponed = True
            return False
        self._hooks += more
        return True

    def may_read_nodes(self) -> bool:
        """Return whether another flow definition may be read in this tick: always the first, more if small."""
        if self.read_nodes and (self.read_nodes >= _MAX_NODES or self.is_spent):
            self.has_postponed = True
            return False
        return True

    def spent_on_rows(self) -> tuple[int, set[bytes], dict[bytes, int], int]:
        """Return the counts of created rows, for `undo`."""
        return self._data, set(self._served), dict(self._children), self._hooks

    def undo(self, before: tuple[int, set[bytes], dict[bytes, int], int]) -> None:
        """Restore the counts from before a rollback."""
        self._data, self._served, self._children, self._hooks = before

    @contextmanager
    def charging(self, items: Iterable[bytes]) -> Iterator[None]:
        """Record the runs or requests being handled. After a failure they remain recorded."""
        before = self.busy_with, self._began
        self.busy_with, self.step = list(items), None
        self._began = time.thread_time()
        yield
        if self.suspects:
            self.done.update(self.suspects.intersection(self.busy_with))
        self.busy_with, self._began = before

    def forgive(self, items: Iterable[bytes]) -> None:
        """Allow refused runs or requests again, because a person asked for it."""
        self.resolved.update(self.refused.intersection(items))
        self.refused -= self.resolved

    def finish(self, part: str, before: str | None) -> None:
        """Note that a part ended, and restore the part around it. After a failure `part` remains set."""
        self.part = before
        self.parts_done.add(part)

    @property
    def blamed_part(self) -> str | None:
        """The part to blame for a timeout; None if the runs or requests being handled may be at fault."""
        return None if self.busy_with else self.part

    @property
    def used(self) -> float:
        """Seconds of processor time since the current work began."""
        return time.thread_time() - self._began


class Suspects:
    """Runs and requests during which ticks took too long: suspected, refused, then set aside."""

    def __init__(self) -> None:
        self.failures: Counter[bytes] = Counter()
        self.refused: set[bytes] = set()
        self.steps: dict[bytes, str] = {}
        """The step that was being evaluated when a refused run took too long."""

    def accuse(self, item: bytes, evidence: Evidence, step: str | None) -> None:
        """Count a tick that took too long. After several, refuse the run or request."""
        if len(self.failures) >= _MAX_SUSPECTS:
            self.failures.clear()
        self.failures[item] += evidence
        if self.failures[item] >= _MAX_FAILURES:
            del self.failures[item]
            self.refuse([item])
            if step is not None:
                self.steps[item] = step

    def refuse(self, items: Iterable[bytes]) -> None:
        """Stop trying these runs or requests."""
        if len(self.refused) >= _MAX_SUSPECTS:
            self.refused.clear()
        self.refused.update(items)

    def acquit(self, items: Iterable[bytes]) -> None:
        """Forget the failures of runs or requests that ended in time."""
        for item in items:
            del self.failures[item]

    def set_aside(self, items: Iterable[bytes]) -> None:
        """Forget refused runs or requests, which are now stuck until a person frees them."""
        for item in items:
            self.refused.discard(item)
            self.steps.pop(item, None)


class Pace:
    """Adapts the amount of work to ticks that took too long, across ticks and terms."""

    def __init__(self, lease: float, monotonic: Callable[[], float]) -> None:
        self._lease = lease
        self._monotonic = monotonic
        self._slice = Share(SLICE)
        self._suspects = Suspects()
        self.parts = Parts(monotonic)

    def budget(self) -> TickBudget:
        """Return the budget of a tick that begins now. A reduced slice also gets less time."""
        size, full = self._slice.now, self._slice.full
        return TickBudget(
            self._monotonic,
            self._monotonic() + SHARE * self._lease * size / full,
            slice=size,
            is_slowed=size < full,
            refused=frozenset(self._suspects.refused),
            at_fault=dict(self._suspects.steps),
            suspects=frozenset(self._suspects.failures),
            parts=self.parts,
        )

    def worked(self, budget: TickBudget, took: float = 0.0) -> None:
        """Note a tick that ended after so many seconds."""
        if took > _LATE * self._lease:
            self._slice.shrink(self._slice.now // 2)
        elif took <= _IN_TIME * self._lease:
            self._slice.grow()
        for part in budget.parts_done if self.parts else ():
            self.parts.worked(part)
        if budget.done or budget.resolved or budget.given_up:
            self._suspects.acquit(budget.done)
            self._suspects.set_aside(budget.resolved)
            self._suspects.refuse(budget.given_up)

    def interrupted(self, budget: TickBudget, *, by_postgres: bool, took: float = 0.0) -> None:
        """Note a tick that failed after so many seconds; `by_postgres` means that a statement took too long."""
        if budget.busy_with and budget.used > _TOO_LONG * self._lease:
            evidence = Evidence.COMPUTED
        elif by_postgres:
            evidence = Evidence.KEPT_POSTGRES
        elif took > _LATE * self._lease:
            evidence = Evidence.WAITED
        else:
            return
        self._slice.shrink(1)
        if len(budget.busy_with) == 1:
            self._suspects.accuse(budget.busy_with[0], evidence, budget.step)
