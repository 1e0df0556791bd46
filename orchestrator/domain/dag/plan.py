"""Plan a DAG run: which steps start, which are skipped, how far a fan-out has come.

Pure. The state of a run is one byte per step and a few numbers per fan-out, whatever the number of its tasks; it is
saved in the transaction that applies the events it follows from. A step has no tasks until it starts:

    waiting ──its trigger fires──▶ candidate ──its condition, fan-out and input are evaluated──▶ open ──▶ ended
       └──its trigger can no longer fire──▶ skipped          └──▶ skipped, failed, or success of an empty fan-out

A trigger fires as soon as it is certain. What a step's end means for the steps below it is settled at once, so the
cost of an event is the number of its edges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.state import COUNTER_OF, ENDED, DagState, Delta, Fan, StepState, decide


class Plan:
    """One run, from its state and the events of a tick to the steps that are to start."""

    def __init__(self, graph: Graph, state: DagState | None = None) -> None:
        self.graph = graph
        self._steps = bytearray(state.steps if state else bytes(len(graph.steps)))
        self._fans = {place: msgspec.structs.replace(fan) for place, fan in state.fans.items()} if state else {}
        self._reasons = dict(state.reasons) if state else {}
        self._stopping = state.stopping if state else False
        self.retried = state.retried if state else 0
        self.retried_at = state.retried_at if state else 0.0
        self._unsettled_above = self._count_unsettled() if self.retried else None
        self._tally: dict[int, list[int]] = {}
        self._candidates: deque[int] = deque()
        self._marked: set[int] = set()
        self._unsettled: deque[int] = deque()
        self.delta = Delta()
        self.fans_with_room: dict[int, None] = {}
        """Fan-outs of which more tasks may be created now."""

    def state(self) -> DagState:
        return DagState(bytes(self._steps), self._fans, self._reasons, self._stopping, self.retried, self.retried_at)

    def step_state(self, place: int) -> StepState:
        return StepState(self._steps[place])

    def fan(self, place: int) -> Fan | None:
        return self._fans.get(place)

    # -- events

    def begin(self) -> None:
        """Start the run: every step counts as one open task until its fan-out is known, unless it was kept."""
        for place, state in enumerate(self._steps):
            fan = self._fans.get(place)
            number = fan.total if fan is not None else 1
            self.delta.total += number
            self.delta.opened += number
            if state == StepState.SUCCESS:
                self.delta.end(StepState.SUCCESS, number)
        for place in range(len(self._steps)):
            self._consider(place)

    def task_ended(self, place: int, state: StepState, number: int = 1) -> None:
        """Tasks of a step have ended; the transitions have counted them."""
        if self._steps[place] != StepState.OPEN:
            return
        fan = self._fans.get(place)
        if fan is None:
            self._end(place, state)
            return
        name = COUNTER_OF[state]
        setattr(fan, name, getattr(fan, name) + number)
        if fan.ended >= fan.total:
            self._end(place, StepState.FAILED if fan.failed or fan.cancelled else StepState.SUCCESS)
        elif self._is_unfinished(place):
            self.fans_with_room[place] = None

    @property
    def is_open(self) -> bool:
        """Say whether any step has tasks that have not ended, or will have."""
        return StepState.OPEN in self._steps

    @property
    def has_more(self) -> bool:
        """Say whether steps could start, or tasks of fan-outs be created, for which there was no room yet."""
        return bool(self.fans_with_room or self._candidates)

    def resume(self) -> None:
        """Go on with what was too large for one tick, whether this plan remembers it or was read again."""
        for place in range(len(self._steps)):
            self._consider(place)
        self.fans_with_room.update(dict.fromkeys(place for place in self._fans if self._is_unfinished(place)))

    def _is_unfinished(self, place: int) -> bool:
        """Say whether more tasks of a fan-out are to be created or opened again."""
        return self._steps[place] == StepState.OPEN and not self._stopping and self._rest(place) > 0

    def _rest(self, place: int) -> int:
        """Return how many tasks of a fan-out are to be created or opened again. What cannot be created has failed."""
        fan = self._fans[place]
        return fan.held + (0 if place in self._reasons else fan.total - fan.created)

    def halt(self) -> None:
        """Start nothing more: the run is being cancelled."""
        self._stopping = True
        self._candidates.clear()
        self.fans_with_room.clear()

    def close(self) -> None:
        """Let all that has not ended be cancelled, as it is counted: the run has ended."""
        for place, state in enumerate(self._steps):
            if state not in ENDED:
                self._steps[place] = StepState.CANCELLED
                fan = self._fans.get(place)
                if fan is not None:
                    fan.cancelled += fan.total - fan.ended
                    fan.held = 0

    def stop(self) -> None:
        """Let what waits be cancelled, and start nothing more; what is open ends by its tasks."""
        self.halt()
        for place, state in enumerate(self._steps):
            if state == StepState.WAITING:
                self._steps[place] = StepState.CANCELLED
                self.delta.end(StepState.CANCELLED)
            fan = self._fans.get(place)
            if state == StepState.OPEN and fan is not None and (rest := self._rest(place)):
                fan.held = 0
                fan.cancelled += rest
                self.delta.end(StepState.CANCELLED, rest)
                if fan.ended >= fan.total:
                    self._steps[place] = StepState.CANCELLED

    def reopen(self, revived: Iterable[tuple[int, StepState]]) -> None:
        """A person retries tasks of the run: they are open again, and what was skipped below is considered anew.

        `revived` names, per task that was opened again, its step and how it had ended.
        """
        opened = set()
        for place, before in revived:
            opened.add(place)
            self._steps[place] = StepState.OPEN
            fan = self._fans.get(place)
            if fan is not None:
                name = COUNTER_OF[before]
                setattr(fan, name, getattr(fan, name) - 1)
        for place in self.graph.below(opened):
            if self._steps[place] == StepState.SKIPPED:
                self._put_back(place)
        self._try_again()

    def may_be_incomplete(self, place: int) -> bool:
        """Say whether tasks of an ended fan-out may never have been created."""
        return place in self._fans and (self._stopping or place in self._reasons)

    def retry(
        self, again: Iterable[int], anew: Iterable[int], now: float, created: Mapping[int, int] | None = None
    ) -> None:
        """A person retries the run, which has ended (see `retrying`).

        Steps in `again` go on where they were: tasks of fan-outs that did not succeed are held until there is room. Of
        those in `anew` nothing is left. `created` are the numbers of tasks of fan-outs that may be incomplete.
        """
        self.retried_at = now
        for place, number in (created or {}).items():
            self._fans[place].created = number
        for place in again:
            fan = self._fans.get(place)
            if fan is None:
                self._uncount(StepState(self._steps[place]), 1)
            else:
                fan.held = fan.failed + fan.cancelled + fan.skipped - (fan.total - fan.created)
                for state in (StepState.FAILED, StepState.CANCELLED, StepState.SKIPPED):
                    self._uncount(state, getattr(fan, COUNTER_OF[state]))
                fan.failed = fan.cancelled = fan.skipped = 0
                self.fans_with_room[place] = None
            self._reasons.pop(place, None)
            self._steps[place] = StepState.OPEN
        for place in anew:
            self._put_back(place)
        self._try_again()

    def _try_again(self) -> None:
        """Go on after steps of a run that had ended were opened or put back."""
        self._stopping = False
        self.retried += 1
        self._tally.clear()
        self._candidates.clear()
        self._marked.clear()
        self._unsettled_above = self._count_unsettled()
        for place, state in enumerate(self._steps):
            if state == StepState.WAITING:
                self._consider(place)

    def _put_back(self, place: int) -> None:
        """Let an ended step wait as one open task, as it did when the run began."""
        fan = self._fans.pop(place, None)
        if fan is None:
            self._uncount(StepState(self._steps[place]), 1)
        else:
            for state, name in COUNTER_OF.items():
                self._uncount(state, getattr(fan, name))
            self.delta.total += 1 - fan.total
            self.delta.opened += 1 - fan.total
        self._reasons.pop(place, None)
        self._steps[place] = StepState.WAITING

    def _uncount(self, state: StepState, number: int) -> None:
        name = COUNTER_OF[state]
        self.delta.opened += number
        self.delta.counts[name] = self.delta.counts.get(name, 0) - number

    # -- candidates: the caller evaluates each, and says what came of it

    def next_candidate(self) -> int | None:
        """Return a step whose trigger has fired, or None."""
        while self._candidates:
            place = self._candidates.popleft()
            self._marked.discard(place)
            if self._steps[place] == StepState.WAITING and not self._stopping:
                return place
        return None

    def open_single(self, place: int) -> None:
        """The step becomes one task."""
        self._steps[place] = StepState.OPEN

    def put_back(self, place: int) -> None:
        """Let a step that was to become one task be a candidate again: there is no room for it now."""
        self._steps[place] = StepState.WAITING
        self._marked.add(place)
        self._candidates.append(place)

    def open_fan(self, place: int, total: int) -> None:
        """The step becomes `total` tasks; none at all is a success with nothing in it."""
        self.delta.total += total - 1
        self.delta.opened += total - 1
        self._fans[place] = Fan(total)
        if total:
            self._steps[place] = StepState.OPEN
            self.fans_with_room[place] = None
        else:
            self._end(place, StepState.SUCCESS)

    def skip(self, place: int, reason: str) -> None:
        """The step's condition is not met."""
        self._reasons[place] = reason
        self.delta.end(StepState.SKIPPED)
        self._end(place, StepState.SKIPPED)

    def fail(self, place: int, reason: str) -> None:
        """The step's condition, fan-out or input cannot be evaluated."""
        self._reasons[place] = reason
        self.delta.end(StepState.FAILED)
        self._end(place, StepState.FAILED)

    def abandon(self, place: int, number: int, reason: str) -> None:
        """The tasks of an open step cannot be created: `number` that were taken, and all that were to follow.

        How many there are is remembered, so that a retry goes on from there.
        """
        self._reasons[place] = reason
        fan = self._fans.get(place)
        if fan is None:
            self.delta.end(StepState.FAILED)
            self._end(place, StepState.FAILED)
            return
        fan.created -= number
        number = fan.total - fan.created
        fan.failed += number
        if not fan.held:
            self.fans_with_room.pop(place, None)
        self.delta.end(StepState.FAILED, number)
        if fan.ended >= fan.total:
            self._end(place, StepState.FAILED)

    def lose(self, place: int, number: int, reason: str) -> None:
        """Tasks that were to be opened again are not there any more: they have failed for good."""
        fan = self._fans[place]
        fan.failed += number
        self.delta.end(StepState.FAILED, number)
        if fan.ended >= fan.total:
            self._reasons[place] = reason
            self._end(place, StepState.FAILED)

    def create(self, place: int, limit: int) -> range:
        """Take up to `limit` tasks of a fan-out to create now, within its concurrency; return their positions."""
        fan = self._fans[place]
        number = min(self._rest(place) - fan.held, self._room(place), limit)
        positions = range(fan.created, fan.created + number)
        fan.created += number
        if not self._room(place):
            self.fans_with_room.pop(place, None)
        return positions

    def reopen_held(self, place: int, limit: int) -> int:
        """Take up to `limit` tasks of a fan-out to open again now, within its concurrency; return how many."""
        fan = self._fans[place]
        number = min(fan.held, self._room(place), limit)
        fan.held -= number
        if not self._room(place):
            self.fans_with_room.pop(place, None)
        return number

    def _room(self, place: int) -> int:
        """Return how many more tasks of a fan-out may be out now."""
        fan, concurrency, rest = self._fans[place], self.graph.steps[place].concurrency, self._rest(place)
        out = fan.total - fan.ended - rest
        return rest if concurrency is None else max(0, min(rest, concurrency - out))

    def give_back(self, place: int, number: int) -> None:
        """Leave the last tasks of a fan-out that were to be created now for later."""
        self._fans[place].created -= number
        self.fans_with_room[place] = None

    # -- what follows from an end

    def _end(self, place: int, state: StepState) -> None:
        """End a step and settle all that follows; a chain of ten thousand skips is a loop, not a recursion."""
        self._steps[place] = state
        for child in self.graph.downstream[place]:
            tally = self._tally.get(child)
            if tally is not None:
                tally[state] += 1
        self._unsettled.append(place)
        if len(self._unsettled) > 1:
            return
        while self._unsettled:
            for child in self._settled_by(self._unsettled[0]):
                self._consider(child)
            self._unsettled.popleft()

    def _settled_by(self, place: int) -> Iterable[int]:
        """Return what an end may let start: the steps below.

        In a run that was tried again those for which everything above has ended, also where a success lies between.
        """
        waits = self._unsettled_above
        if waits is None:
            return self.graph.downstream[place]
        free: list[int] = []
        settled = [place] if not waits[place] else []
        while settled:
            for child in self.graph.downstream[settled.pop()]:
                waits[child] -= 1
                if not waits[child]:
                    (settled if self._steps[child] in ENDED else free).append(child)
        return free

    def _count_unsettled(self) -> list[int]:
        """Return for each step how many right above it have not ended, or have something above them that has not."""
        waits = [len(parents) for parents in self.graph.upstream]
        for place in self.graph.order:
            if self._steps[place] in ENDED and not waits[place]:
                for child in self.graph.downstream[place]:
                    waits[child] -= 1
        return waits

    def _consider(self, place: int) -> None:
        """Fire or skip a waiting step if what has ended above it decides that."""
        if self._steps[place] != StepState.WAITING or self._stopping or place in self._marked:
            return
        if self._unsettled_above is not None and self._unsettled_above[place]:
            return
        parents = self.graph.upstream[place]
        tally = self._tally.get(place)
        if tally is None:
            tally = self._tally[place] = [0] * len(StepState)
            for parent in parents:
                tally[self._steps[parent]] += 1
        fires = decide(self.graph.steps[place].trigger, len(parents), tally)
        if fires:
            self._marked.add(place)
            self._candidates.append(place)
        elif fires is False:
            self.skip(place, self._why_skipped(place))

    def _why_skipped(self, place: int) -> str:
        trigger = self.graph.steps[place].trigger
        unhappy = [
            f"{self.graph.steps[parent].name} {COUNTER_OF[StepState(self._steps[parent])]}"
            for parent in self.graph.upstream[place]
            if self._steps[parent] in ENDED and self._steps[parent] != StepState.SUCCESS
        ]
        return f"{trigger}: {', '.join(unhappy[:3])}{' …' if len(unhappy) > 3 else ''}" if unhappy else str(trigger)
