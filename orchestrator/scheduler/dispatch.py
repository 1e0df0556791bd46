"""Hand ready tasks to the fleet, up to each queue's window."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from orchestrator.domain.task import Dispatch
from orchestrator.domain.window import room, smoothed_rate
from orchestrator.scheduler.fleet import Fleet
from orchestrator.scheduler.tick import Tick
from orchestrator.store import transitions
from orchestrator.store.transitions import Again, Claimed
from orchestrator.transport.codec import encode

BUNDLE = 20
"""Most tasks in one message."""


class Dispatcher:
    """Remembers how much each queue has in flight and how fast it drains; claims what fits."""

    def __init__(self, fleet: Fleet, batch: int) -> None:
        self._fleet = fleet
        self._batch = batch
        self._outstanding: Counter[str] = Counter()
        self._rates: dict[str, float] = {}
        self._measured_at = 0.0
        self._finished: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """How many tasks are dispatched or running."""
        return self._outstanding.total()

    def recount(self, in_flight: Mapping[str, int]) -> None:
        """Start from what Postgres says is in flight."""
        self._outstanding = Counter(in_flight)

    def claim(self, tick: Tick, unknown_timeout: float) -> None:
        """Claim what fits each queue's window. What no live worker knows is held back until one does."""
        rooms = {
            queue: min(self._batch, free)
            for queue in self._fleet.queues
            if (
                free := room(
                    self._fleet.slots(queue),
                    self._outstanding[queue] - tick.landed[queue],
                    self._rates.get(queue, 0.0),
                )
            )
        }
        if not rooms:
            return
        unknown: list[Claimed] = []
        for task in transitions.claim(tick.connection, rooms, tick.now):
            (tick.claimed if self._fleet.knows(task.queue, task.name) else unknown).append(task)
        if unknown:
            held = [Again(task.id, task.attempt, unknown_timeout, hold="unknown") for task in unknown]
            transitions.again(tick.connection, held, tick.now)

    def committed(self, tick: Tick, monotonic: float) -> None:
        """The tick stands: move the counts, and measure how fast each queue drains."""
        self._outstanding.subtract(tick.landed)
        self._outstanding.update(task.queue for task in tick.claimed)
        self._finished.update(tick.finished)
        elapsed = monotonic - self._measured_at
        if elapsed >= 0.02:
            for queue in {*self._rates, *self._finished}:
                self._rates[queue] = smoothed_rate(self._rates.get(queue, 0.0), self._finished[queue], elapsed)
                if self._rates[queue] < 1.0:
                    del self._rates[queue]
            self._finished.clear()
            self._measured_at = monotonic

    def messages(self, claimed: Sequence[Claimed]) -> dict[str, list[bytes]]:
        """Return the claimed tasks as messages by queue. A long line is bundled; a short one is spread."""
        by_queue: dict[str, list[Claimed]] = defaultdict(list)
        for task in claimed:
            by_queue[task.queue].append(task)
        return {queue: self._bundles(queue, tasks) for queue, tasks in by_queue.items()}

    def _bundles(self, queue: str, tasks: Sequence[Claimed]) -> list[bytes]:
        size = max(1, min(BUNDLE, len(tasks) // max(1, self._fleet.slots(queue))))
        shared = [_message(task) for task in tasks if not task.alone]
        alone = [_message(task) for task in tasks if task.alone]
        return [encode(shared[start : start + size]) for start in range(0, len(shared), size)] + [
            encode([task]) for task in alone
        ]


def _message(task: Claimed) -> Dispatch:
    return Dispatch(
        task.id,
        task.attempt,
        task.name,
        task.payload,
        task.queue,
        task.options,
        task.run_id,
        task.position,
        task.alone,
    )
