"""Tasks that share a limit, a rate or a key."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from orchestrator import WrongState
from tests.chaos.real.loads.kinds import ONLY_IF_NAMED, load
from tests.chaos.real.project import app, limits

if TYPE_CHECKING:
    from tests.chaos.real.client import Client


@load(weight=3)
def limited(client: Client) -> None:
    """Enqueue a task with limits per lane and over all lanes. A cancelled task counts until its code stops."""
    lane = client.random.choice("abc")
    client.enqueued(limits.work_in_lane.enqueue(lane, client.random.uniform(0.0, 0.5)))


@load(weight=ONLY_IF_NAMED)
def reconsidered(client: Client) -> None:
    """Enqueue a task with concurrency 1 and cancel the previous one, which is slow to stop; the new one must wait."""
    if client.slow_to_stop is not None:
        client.cancelling(client.slow_to_stop)
        with suppress(WrongState):  # the task has ended
            client.slow_to_stop.cancel()
    client.slow_to_stop = limits.work_and_tidy_up.enqueue(1.0, client.random.uniform(0.2, 0.8))
    client.committed(client.slow_to_stop)


@load(weight=3)
def unique(client: Client) -> None:
    """Enqueue a task with a unique key; the handle may be that of an earlier task."""
    key = client.random.choice("xyz")
    client.committed(limits.work_once.enqueue(key, client.random.uniform(0.0, 0.5)))


@load(weight=2)
def rated(client: Client) -> None:
    """Enqueue more tasks than may start in a second."""
    customers = [(client.random.choice("pq"),) for _ in range(client.random.randint(1, 8))]
    for handle in app.enqueue_many(limits.work_at_rate, customers):
        client.enqueued(handle)
