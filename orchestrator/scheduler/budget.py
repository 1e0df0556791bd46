"""How much one tick may do, so that it ends well within the lease.

A tick that has planned for its share of the lease leaves the rest to the next one. That does not help if a single run
takes all the time. Then Postgres ends the session, and the leader remembers what the tick was doing: from then on it
plans runs one by one, and marks the run at fault as stuck.

Many runs together may also take too long on a busy machine. So after a tick that ran out of time the next one does as
little as possible; ticks that end in time do more again, quickly up to half of what was too much, and slowly beyond it.
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

_WHOLE = 1_024
_LESS = 32
"""By how much a part does less after a timeout."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds for which a part is left out that cannot do with one row."""


class Share:
    """How much is done at once: less after it was too much; then more again, fast up to half of that, slowly beyond."""

    def __init__(self, whole: int) -> None:
        self.whole = self.now = self._ceiling = whole

    def shrink(self, to: int) -> None:
        """Do less: it was too much."""
        self._ceiling, self.now = max(1, self.now // 2), max(1, to)

    def grow(self) -> None:
        """Do more: it was done in time."""
        self.now = min(self.whole, self.now + (self.now if self.now < self._ceiling else max(1, self.now // 16)))


@dataclass
class _SlowPart:
    share: Share = field(default_factory=lambda: Share(_WHOLE))
    pause: float = _FIRST_PAUSE
    out_until: float = 0.0
    statement: str = ""


class Parts:
    """Remembers the parts that took too long; it outlives ticks and the terms of the leader."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._slow: dict[str, _SlowPart] = {}
        self.on_timeout: Callable[[str], object] = lambda _: None
        """Called with the name of a statement that took too long."""

    def __bool__(self) -> bool:
        return bool(self._slow)

    def most(self, part: str, rows: int) -> int:
        """Return how many rows a part may work on, which usually works on so many."""
        slow = self._slow.get(part)
        return rows if slow is None else max(1, rows * slow.share.now // _WHOLE)

    def is_out(self, part: str) -> bool:
        """Say whether a part is left out for now."""
        slow = self._slow.get(part)
        return slow is not None and self._monotonic() < slow.out_until

    def timed_out(self, part: str, statement: str) -> None:
        """Take note that a statement of a part took too long."""
        slow = self._slow.setdefault(part, _SlowPart())
        slow.statement = statement
        if slow.share.now == 1:
            slow.out_until = self._monotonic() + slow.pause
            slow.pause = min(2 * slow.pause, _LONGEST_PAUSE)
        slow.share.shrink(slow.share.now // _LESS)
        self.on_timeout(statement)

    def worked(self, part: str) -> None:
        """Take note that a part has done its work in time."""
        slow = self._slow.get(part)
        if slow is None:
            return
        slow.pause = _FIRST_PAUSE
        slow.share.grow()
        if slow.share.now == _WHOLE:
            del self._slow[part]

    def describe(self) -> str | None:
        """Say in a sentence which parts do less than they should; None where none does."""
        if not self._slow:
            return None
        parts = ", ".join(f"{part!r} (statement {slow.statement})" for part, slow in self._slow.items())
        return (
            f"Statements of the scheduler take too long, and these parts do less, or wait: {parts}. All others go on. "
            f"It has asked Postgres for new statistics; if this lasts, look at the statement in pg_stat_activity."
        )


T = TypeVar("T")
SHARE = 0.1
"""Share of the lease in which a tick plans runs. Dispatch waits for it."""
SLICE = 2_000
"""Steps that are planned between two looks at the clock."""
COST = 6
"""The cost of notifying a run of anything, as a number of steps that are planned."""
_MOST_DATA = 4_000_000
"""Bytes of input that are created in one tick, and a little more: they are written to Postgres with it."""
_A_HOOK = 1_000
"""Bytes as which a hook counts beside what it is given: its row takes Postgres longer."""
_MOST_CHILDREN = 1_000
"""Child runs that are created in one tick, and some more of trees of which there were none yet: a row of a run takes
Postgres longer than all else that a tick does with it."""
_MOST_NODES = 10_000
"""Nodes of flows whose definitions are read in one tick, and those of one flow more: some 20 milliseconds."""
_CHILDREN_OF_NEXT = 100
"""How many of them such a tree gets, however little time or room others have left."""
_TOO_LONG = 0.4
"""Of the lease, how much time of the processor is too much for one run."""
_LATE = 0.5
"""Of the lease, how long a tick may take by the clock; after one that took longer, the next does less."""
_IN_TIME = 0.3
"""Of the lease: after a tick that took no longer, the next one does more."""
_MOST_FAILURES = 6
"""From so many on, a run is set aside. They are forgotten when the run has been planned in time."""
_MOST_SUSPECTS = 10_000
"""Runs whose failures are remembered, and runs that are refused."""


class Evidence(IntEnum):
    """How a tick took too long that planned a single run; each counts as so many failures of that run."""

    COMPUTED = 6
    """It took too much time of the processor."""
    KEPT_POSTGRES = 3
    """It has kept Postgres busy for too long: that may be the fault of others, too."""
    WAITED = 2
    """It took too long by the clock: others may have had the processor meanwhile."""


class TooSlow(Exception):
    """Planning a run takes longer than everybody else can wait."""


@dataclass
class TickBudget:
    """The remaining time of a tick, and how much it does at once."""

    monotonic: Callable[[], float] = time.monotonic
    until: float = math.inf
    slice: int = SLICE
    """Steps to be planned at once; fewer after a tick that took too long."""
    is_slowed: bool = False
    """They are fewer now."""
    refused: frozenset[bytes] = frozenset()
    """Runs, and requests, that are not tried any more, because they take too long."""
    at_fault: Mapping[bytes, str] = field(default_factory=dict)
    """Of which step something was evaluated when those took too long, as far as that is known."""
    met: set[bytes] = field(default_factory=set)
    """Those of them that have been set aside."""
    given_up: set[bytes] = field(default_factory=set)
    """Runs that are refused from the next tick on."""
    _data: int = 0
    """Bytes of the inputs of tasks and child runs that have been created."""
    _served: set[bytes] = field(default_factory=set)
    """Trees of runs for which some were."""
    _children: dict[bytes, int] = field(default_factory=dict)
    """Child runs that have been created, by tree."""
    _hooks: int = 0
    """Bytes that the hooks of runs which have ended are given."""
    has_put_off: bool = False
    """Some runs stand in the line again: they end in a later tick, because of their hooks, or are read in it."""
    read_nodes: int = 0
    """Nodes of the flows whose definitions have been read."""
    evaluated: set[str] = field(default_factory=set)
    """Kinds of expressions of which an expensive one has been evaluated for those whose turn it is."""
    asked: int = 0
    """How many have been asked whether an event starts them."""
    asking_cost: int = 0
    """The cost of their filters, parameters and keys, in the units of `Work`."""
    busy_with: list[bytes] = field(default_factory=list)
    """The runs that are being planned, or the requests that are applied, at this moment."""
    step: str | None = None
    """The step of which something is being evaluated, and what."""
    parts: Parts = field(default_factory=Parts)
    """How much the parts of a tick do that took too long before."""
    part: str | None = None
    """The part of the tick that is being done."""
    parts_done: set[str] = field(default_factory=set)
    has_timed_out: bool = False
    """A statement of a part took too long in this tick."""
    suspects: frozenset[bytes] = frozenset()
    """Those with which a tick was ended for its time before."""
    done: set[bytes] = field(default_factory=set)
    """Those of them with which this one has come to an end."""
    _began: float = 0.0

    @property
    def is_spent(self) -> bool:
        """Say whether what has not been begun has to wait for the next tick."""
        return self.monotonic() >= self.until

    def slices(self, some: Sequence[T], steps: Callable[[T], int] = lambda _: 0) -> Iterator[list[T]]:
        """Divide runs into slices between two looks at the clock, by the number of steps that have to be looked at."""
        slice_: list[T] = []
        size = 0
        for run in some:
            if slice_ and size + COST + steps(run) > self.slice:
                yield slice_
                slice_, size = [], 0
            size += COST + steps(run)  # which may be known by now, if the slice before had another of its kind
            slice_.append(run)
        if slice_:
            yield slice_

    def has_room_for_data(self, run: bytes) -> bool:
        """Say whether more tasks of a run may be created in this tick, as far as the size of their inputs goes.

        A tree of runs for which there were none yet does not wait for what others have created.
        """
        return self._data < _MOST_DATA or (tree_of(run) not in self._served and self._data < 2 * _MOST_DATA)

    def created(self, run: bytes, size: int) -> None:
        """Take note of the input of something that was created for a run."""
        self._data += size
        self._served.add(tree_of(run))

    def room_for_children(self, run: bytes) -> int:
        """Return how many more child runs of a run may be created in this tick.

        A tree of runs that has few yet does not wait for what others have created, nor for a tick with more time: if
        nothing else, it gets one. So no tree keeps another from going on, whichever is served first.
        """
        created = sum(self._children.values())
        if created < _MOST_CHILDREN and not self.is_spent:
            return _MOST_CHILDREN - created
        own = self._children.get(tree_of(run), 0)
        return max(0, (_CHILDREN_OF_NEXT if created < 2 * _MOST_CHILDREN else 1) - own)

    def created_child(self, run: bytes, size: int) -> None:
        """Take note of a child run that was created for a run, and of its input."""
        self.created(run, size)
        tree = tree_of(run)
        self._children[tree] = self._children.get(tree, 0) + 1

    def has_room_for_hooks(self, number: int, size: int) -> bool:
        """Take note of the hooks of a run that ends, each of which is given so many bytes, if it may end in this tick.

        The first does, however much that is; without hooks each does.
        """
        more = number * (_A_HOOK + size)
        if number and self._hooks and self._hooks + more > _MOST_DATA:
            self.has_put_off = True
            return False
        self._hooks += more
        return True

    def may_read_nodes(self) -> bool:
        """Say whether another definition of a flow may be read in this tick: the first one always, more while few."""
        if self.read_nodes and (self.read_nodes >= _MOST_NODES or self.is_spent):
            self.has_put_off = True
            return False
        return True

    def spent_on_rows(self) -> tuple[int, set[bytes], dict[bytes, int], int]:
        """Return what has been created so far, for `undo`."""
        return self._data, set(self._served), dict(self._children), self._hooks

    def undo(self, before: tuple[int, set[bytes], dict[bytes, int], int]) -> None:
        """Have as much room again as before something that was rolled back."""
        self._data, self._served, self._children, self._hooks = before

    @contextmanager
    def charging(self, whom: Iterable[bytes]) -> Iterator[None]:
        """Remember the runs or requests that are being handled. If that fails, they stay remembered."""
        before = self.busy_with, self._began
        self.busy_with, self.step = list(whom), None
        self._began = time.thread_time()
        yield
        if self.suspects:
            self.done.update(self.suspects.intersection(self.busy_with))
        self.busy_with, self._began = before

    def forgive(self, whom: Iterable[bytes]) -> None:
        """Try these again: a person asked for it."""
        self.met.update(self.refused.intersection(whom))
        self.refused -= self.met

    def finish(self, part: str, before: str | None) -> None:
        """A part of the tick is done, and another goes on. `part` is left standing where one fails."""
        self.part = before
        self.parts_done.add(part)

    @property
    def late_part(self) -> str | None:
        """The part to which a timeout belongs: none, if runs or requests are known whose fault it may be."""
        return None if self.busy_with else self.part

    @property
    def used(self) -> float:
        """Seconds of the processor that it has taken so far."""
        return time.thread_time() - self._began


class Suspects:
    """Runs and requests with which ticks took too long: suspected, then refused, then set aside, and forgotten."""

    def __init__(self) -> None:
        self.failures: Counter[bytes] = Counter()
        self.refused: set[bytes] = set()
        self.steps: dict[bytes, str] = {}
        """Of those that are refused, what was evaluated when they took too long."""

    def accuse(self, whom: bytes, evidence: Evidence, step: str | None) -> None:
        """Count a tick that took too long; after several, what was done in it is not tried any more."""
        if len(self.failures) >= _MOST_SUSPECTS:
            self.failures.clear()
        self.failures[whom] += evidence
        if self.failures[whom] >= _MOST_FAILURES:
            del self.failures[whom]
            self.refuse([whom])
            if step is not None:
                self.steps[whom] = step

    def refuse(self, whom: Iterable[bytes]) -> None:
        """Do not try these any more."""
        if len(self.refused) >= _MOST_SUSPECTS:
            self.refused.clear()
        self.refused.update(whom)

    def acquit(self, whom: Iterable[bytes]) -> None:
        """They were done in time."""
        for one in whom:
            del self.failures[one]

    def set_aside(self, whom: Iterable[bytes]) -> None:
        """Try these no more until a person frees them."""
        for one in whom:
            self.refused.discard(one)
            self.steps.pop(one, None)


class Pace:
    """Learns from ticks that took too long; it outlives them, and the terms of the leader."""

    def __init__(self, lease: float, monotonic: Callable[[], float]) -> None:
        self._lease = lease
        self._monotonic = monotonic
        self._slice = Share(SLICE)
        self._suspects = Suspects()
        self.parts = Parts(monotonic)

    def budget(self) -> TickBudget:
        """Return what a tick may do that begins now. One that does little at once does not do it often, either."""
        size, whole = self._slice.now, self._slice.whole
        return TickBudget(
            self._monotonic,
            self._monotonic() + SHARE * self._lease * size / whole,
            slice=size,
            is_slowed=size < whole,
            refused=frozenset(self._suspects.refused),
            at_fault=dict(self._suspects.steps),
            suspects=frozenset(self._suspects.failures),
            parts=self.parts,
        )

    def worked(self, budget: TickBudget, took: float = 0.0) -> None:
        """A tick has come to its end, after so many seconds."""
        if took > _LATE * self._lease:
            self._slice.shrink(self._slice.now // 2)
        elif took <= _IN_TIME * self._lease:
            self._slice.grow()
        for part in budget.parts_done if self.parts else ():
            self.parts.worked(part)
        if budget.done or budget.met or budget.given_up:
            self._suspects.acquit(budget.done)
            self._suspects.set_aside(budget.met)
            self._suspects.refuse(budget.given_up)

    def interrupted(self, budget: TickBudget, *, by_postgres: bool, took: float = 0.0) -> None:
        """A tick failed after so many seconds; `by_postgres`: which said that a statement took too long."""
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
