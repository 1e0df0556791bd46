"""The plan of a DAG run: which steps start or are skipped, and the progress of fan-outs.

There is no I/O. The state of a run is one byte per step and a few numbers per fan-out, whatever the number of tasks. It
is saved in the transaction that applies the events. A step has no tasks until it starts:

    waiting ──its trigger fires──▶ candidate ──its condition, fan-out and input are evaluated──▶ open ──▶ ended
       └──its trigger can no longer fire──▶ skipped          └──▶ skipped, failed, or success of an empty fan-out

A trigger fires as soon as its outcome is certain. The end of a step is applied to the steps below it at once, so the
cost of an event is the number of its edges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.state import COUNTER_OF, ENDED, DagState, Delta, Fan, StepState, decide


class Plan:
    """The plan of one run: it turns the events of a tick into steps to start."""

    def __init__(self, graph: Graph, state: DagState | None = None) -> None:
        self.graph = graph
        self._steps = bytearray(state.steps if state else bytes(len(graph.steps)))
        self._fans = {index: msgspec.structs.replace(fan) for index, fan in state.fans.items()} if state else {}
        self._reasons = dict(state.reasons) if state else {}
        self._stopping = state.stopping if state else False
        self.retried = state.retried if state else 0
        self.retried_at = state.retried_at if state else 0.0
        self._unsettled_above = self._count_unsettled() if self.retried else None
        self._tally: dict[int, list[int]] = {}
        self._candidates: deque[int] = deque()
        self._queued: set[int] = set()
        self._unsettled: deque[int] = deque()
        self.delta = Delta()
        self.fans_with_room: dict[int, None] = {}
        """Fan-outs that may create more tasks now."""

    def state(self) -> DagState:
        return DagState(bytes(self._steps), self._fans, self._reasons, self._stopping, self.retried, self.retried_at)

    def step_state(self, index: int) -> StepState:
        return StepState(self._steps[index])

    def fan(self, index: int) -> Fan | None:
        return self._fans.get(index)

    # -- events

    def begin(self) -> None:
        """Start the run. Each step counts as one open task until its fan-out is known, except kept steps."""
        for index, state in enumerate(self._steps):
            fan = self._fans.get(index)
            count = fan.total if fan is not None else 1
            self.delta.total += count
            self.delta.opened += count
            if state == StepState.SUCCESS:
                self.delta.end(StepState.SUCCESS, count)
        for index in range(len(self._steps)):
            self._consider(index)

    def task_ended(self, index: int, state: StepState, count: int = 1) -> None:
        """Apply the end of tasks of a step. The counters of the run are updated elsewhere."""
        if self._steps[index] != StepState.OPEN:
            return
        fan = self._fans.get(index)
        if fan is None:
            self._end(index, state)
            return
        name = COUNTER_OF[state]
        setattr(fan, name, getattr(fan, name) + count)
        if fan.ended >= fan.total:
            self._end(index, StepState.FAILED if fan.failed or fan.cancelled else StepState.SUCCESS)
        elif self._has_remaining(index):
            self.fans_with_room[index] = None

    @property
    def is_open(self) -> bool:
        """Whether any step has open tasks, or tasks to create."""
        return StepState.OPEN in self._steps

    @property
    def has_more(self) -> bool:
        """Whether steps or tasks of fan-outs still have to be created that did not fit into this tick."""
        return bool(self.fans_with_room or self._candidates)

    def resume(self) -> None:
        """Continue with what did not fit into one tick. This also works on a plan loaded from the database."""
        for index in range(len(self._steps)):
            self._consider(index)
        self.fans_with_room.update(dict.fromkeys(index for index in self._fans if self._has_remaining(index)))

    def _has_remaining(self, index: int) -> bool:
        """Return whether more tasks of a fan-out are to be created or reopened."""
        return self._steps[index] == StepState.OPEN and not self._stopping and self._remaining(index) > 0

    def _remaining(self, index: int) -> int:
        """Return how many tasks of a fan-out are to be created or reopened. After a failed creation, only the held
        ones."""
        fan = self._fans[index]
        return fan.held + (0 if index in self._reasons else fan.total - fan.created)

    def stop_starting(self) -> None:
        """Start no further steps: the run is being cancelled."""
        self._stopping = True
        self._candidates.clear()
        self.fans_with_room.clear()

    def close(self) -> None:
        """Mark everything open as cancelled: the run has ended. The counters of the run already include it."""
        for index, state in enumerate(self._steps):
            if state not in ENDED:
                self._steps[index] = StepState.CANCELLED
                fan = self._fans.get(index)
                if fan is not None:
                    fan.cancelled += fan.total - fan.ended
                    fan.held = 0

    def stop(self) -> None:
        """Cancel waiting steps and start no others. Open steps end when their tasks end."""
        self.stop_starting()
        for index, state in enumerate(self._steps):
            if state == StepState.WAITING:
                self._steps[index] = StepState.CANCELLED
                self.delta.end(StepState.CANCELLED)
            fan = self._fans.get(index)
            if state == StepState.OPEN and fan is not None and (count := self._remaining(index)):
                fan.held = 0
                fan.cancelled += count
                self.delta.end(StepState.CANCELLED, count)
                if fan.ended >= fan.total:
                    self._steps[index] = StepState.CANCELLED

    def withhold(self, index: int) -> None:
        """Cancel a step that has not started."""
        if self._steps[index] == StepState.WAITING:
            self.delta.end(StepState.CANCELLED)
            self._end(index, StepState.CANCELLED)

    def reopen(self, revived: Iterable[tuple[int, StepState]]) -> None:
        """Reopen tasks that a user retries, and reconsider skipped steps below them.

        `revived` holds, for each reopened task, its step and the state in which it had ended.
        """
        opened = set()
        for index, before in revived:
            opened.add(index)
            self._steps[index] = StepState.OPEN
            fan = self._fans.get(index)
            if fan is not None:
                name = COUNTER_OF[before]
                setattr(fan, name, getattr(fan, name) - 1)
        for index in self.graph.below(opened):
            if self._steps[index] == StepState.SKIPPED:
                self._reset_step(index)
        self._restart()

    def may_be_incomplete(self, index: int) -> bool:
        """Return whether an ended fan-out may have tasks that were never created."""
        return index in self._fans and (self._stopping or index in self._reasons)

    def retry(
        self, resumed: Iterable[int], restarted: Iterable[int], now: float, created: Mapping[int, int] | None = None
    ) -> None:
        """Retry an ended run (see `to_retry`).

        Steps in `resumed` continue: the unsuccessful tasks of fan-outs are held until there is room. Steps in
        `restarted` start over. `created` has the number of created tasks of fan-outs that may be incomplete.
        """
        self.retried_at = now
        for index, count in (created or {}).items():
            self._fans[index].created = count
        for index in resumed:
            fan = self._fans.get(index)
            if fan is None:
                self._uncount(StepState(self._steps[index]), 1)
            else:
                fan.held = fan.failed + fan.cancelled + fan.skipped - (fan.total - fan.created)
                for state in (StepState.FAILED, StepState.CANCELLED, StepState.SKIPPED):
                    self._uncount(state, getattr(fan, COUNTER_OF[state]))
                fan.failed = fan.cancelled = fan.skipped = 0
                self.fans_with_room[index] = None
            self._reasons.pop(index, None)
            self._steps[index] = StepState.OPEN
        for index in restarted:
            self._reset_step(index)
        self._restart()

    def _restart(self) -> None:
        """Continue an ended run after steps were reopened or reset."""
        self._stopping = False
        self.retried += 1
        self._tally.clear()
        self._candidates.clear()
        self._queued.clear()
        self._unsettled_above = self._count_unsettled()
        for index, state in enumerate(self._steps):
            if state == StepState.WAITING:
                self._consider(index)

    def _reset_step(self, index: int) -> None:
        """Reset an ended step to waiting, counted as one open task as when the run began."""
        fan = self._fans.pop(index, None)
        if fan is None:
            self._uncount(StepState(self._steps[index]), 1)
        else:
            for state, name in COUNTER_OF.items():
                self._uncount(state, getattr(fan, name))
            self.delta.total += 1 - fan.total
            self.delta.opened += 1 - fan.total
        self._reasons.pop(index, None)
        self._steps[index] = StepState.WAITING

    def _uncount(self, state: StepState, count: int) -> None:
        name = COUNTER_OF[state]
        self.delta.opened += count
        self.delta.counts[name] = self.delta.counts.get(name, 0) - count

    # -- candidates: the caller evaluates each and applies the outcome

    def next_candidate(self) -> int | None:
        """Return a step whose trigger has fired, or None."""
        while self._candidates:
            index = self._candidates.popleft()
            self._queued.discard(index)
            if self._steps[index] == StepState.WAITING and not self._stopping:
                return index
        return None

    def open_single(self, index: int) -> None:
        """Open a step as one task."""
        self._steps[index] = StepState.OPEN

    def put_back(self, index: int) -> None:
        """Make a step a candidate again: there is no room for its task now."""
        self._steps[index] = StepState.WAITING
        self._queued.add(index)
        self._candidates.append(index)

    def open_fan(self, index: int, total: int) -> None:
        """Open a step as `total` tasks. An empty fan-out succeeds at once."""
        self.delta.total += total - 1
        self.delta.opened += total - 1
        self._fans[index] = Fan(total)
        if total:
            self._steps[index] = StepState.OPEN
            self.fans_with_room[index] = None
        else:
            self._end(index, StepState.SUCCESS)

    def skip(self, index: int, reason: str) -> None:
        """Skip a step whose condition is not met."""
        self._reasons[index] = reason
        self.delta.end(StepState.SKIPPED)
        self._end(index, StepState.SKIPPED)

    def fail(self, index: int, reason: str) -> None:
        """Fail a step whose condition, fan-out or input cannot be evaluated."""
        self._reasons[index] = reason
        self.delta.end(StepState.FAILED)
        self._end(index, StepState.FAILED)

    def abandon(self, index: int, number: int, reason: str) -> None:
        """Fail the tasks of an open step that cannot be created: the `number` taken last, and all that were to follow.

        The number of created tasks is kept, so that a retry continues from there.
        """
        self._reasons[index] = reason
        fan = self._fans.get(index)
        if fan is None:
            self.delta.end(StepState.FAILED)
            self._end(index, StepState.FAILED)
            return
        fan.created -= number
        number = fan.total - fan.created
        fan.failed += number
        if not fan.held:
            self.fans_with_room.pop(index, None)
        self.delta.end(StepState.FAILED, number)
        if fan.ended >= fan.total:
            self._end(index, StepState.FAILED)

    def fail_held(self, index: int, number: int, reason: str) -> None:
        """Fail tasks that were to be reopened but no longer exist."""
        fan = self._fans[index]
        fan.failed += number
        self.delta.end(StepState.FAILED, number)
        if fan.ended >= fan.total:
            self._reasons[index] = reason
            self._end(index, StepState.FAILED)

    def create(self, index: int, limit: int) -> range:
        """Take up to `limit` tasks of a fan-out to create now, within its concurrency. Return their positions."""
        fan = self._fans[index]
        count = min(self._remaining(index) - fan.held, self._room(index), limit)
        positions = range(fan.created, fan.created + count)
        fan.created += count
        if not self._room(index):
            self.fans_with_room.pop(index, None)
        return positions

    def reopen_held(self, index: int, limit: int) -> int:
        """Take up to `limit` held tasks of a fan-out to reopen now, within its concurrency. Return how many."""
        fan = self._fans[index]
        count = min(fan.held, self._room(index), limit)
        fan.held -= count
        if not self._room(index):
            self.fans_with_room.pop(index, None)
        return count

    def _room(self, index: int) -> int:
        """Return how many more tasks of a fan-out may be open now."""
        fan, concurrency, remaining = self._fans[index], self.graph.steps[index].concurrency, self._remaining(index)
        open_tasks = fan.total - fan.ended - remaining
        return remaining if concurrency is None else max(0, min(remaining, concurrency - open_tasks))

    def undo_create(self, index: int, number: int) -> None:
        """Return the last `number` tasks that `create` took, to be created later."""
        self._fans[index].created -= number
        self.fans_with_room[index] = None

    # -- the effects of a step's end

    def _end(self, index: int, state: StepState) -> None:
        """End a step and settle everything that follows, in a loop: long chains of skips need no recursion."""
        self._steps[index] = state
        for child in self.graph.downstream[index]:
            tally = self._tally.get(child)
            if tally is not None:
                tally[state] += 1
        self._unsettled.append(index)
        if len(self._unsettled) > 1:
            return
        while self._unsettled:
            for child in self._steps_to_consider(self._unsettled[0]):
                self._consider(child)
            self._unsettled.popleft()

    def _steps_to_consider(self, index: int) -> Iterable[int]:
        """Return the steps that may start after a step's end: those directly below.

        In a retried run, these are the steps with all ancestors ended, possibly below steps that stay successful.
        """
        unsettled = self._unsettled_above
        if unsettled is None:
            return self.graph.downstream[index]
        startable: list[int] = []
        settled = [index] if not unsettled[index] else []
        while settled:
            for child in self.graph.downstream[settled.pop()]:
                unsettled[child] -= 1
                if not unsettled[child]:
                    (settled if self._steps[child] in ENDED else startable).append(child)
        return startable

    def _count_unsettled(self) -> list[int]:
        """Return, for each step, how many parents have not ended or have an ancestor that has not."""
        unsettled = [len(parents) for parents in self.graph.upstream]
        for index in self.graph.order:
            if self._steps[index] in ENDED and not unsettled[index]:
                for child in self.graph.downstream[index]:
                    unsettled[child] -= 1
        return unsettled

    def _consider(self, index: int) -> None:
        """Fire or skip a waiting step if the ended steps above it decide its trigger."""
        if self._steps[index] != StepState.WAITING or self._stopping or index in self._queued:
            return
        if self._unsettled_above is not None and self._unsettled_above[index]:
            return
        parents = self.graph.upstream[index]
        tally = self._tally.get(index)
        if tally is None:
            tally = self._tally[index] = [0] * len(StepState)
            for parent in parents:
                tally[self._steps[parent]] += 1
        fires = decide(self.graph.steps[index].trigger, len(parents), tally)
        if fires:
            self._queued.add(index)
            self._candidates.append(index)
        elif fires is False:
            self.skip(index, self._why_skipped(index))

    def _why_skipped(self, index: int) -> str:
        trigger = self.graph.steps[index].trigger
        reasons = [
            f"{self.graph.steps[parent].name} {COUNTER_OF[StepState(self._steps[parent])]}"
            for parent in self.graph.upstream[index]
            if self._steps[parent] in ENDED and self._steps[parent] != StepState.SUCCESS
        ]
        return f"{trigger}: {', '.join(reasons[:3])}{' …' if len(reasons) > 3 else ''}" if reasons else str(trigger)
