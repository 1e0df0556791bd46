"""Runs of many tasks, DAGs, flows and code workflows, and their cancellation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator import Workflow, WrongState
from tests.chaos.real.loads.kinds import LENGTHS, ONLY_IF_NAMED, load
from tests.chaos.real.project import app, journeys, tasks

if TYPE_CHECKING:
    from tests.chaos.real.client import Cancellable, Client


@load(weight=2)
def run_of_many(client: Client) -> None:
    task = client.random.choice((tasks.work, tasks.work_async, tasks.work_unluckily))
    client.started(app.start_many(task, [client.random.choice(LENGTHS)] * client.random.randint(1, 120)))


@load(weight=2)
def dag(client: Client) -> None:
    """Start a DAG: discover a list, process each item next to some shards, and gather the results."""
    client.started(app.workflows["fan"].start(count=client.random.randint(0, 60)))


@load(weight=3)
def flow(client: Client) -> None:
    """Start a flow; `outsider.py` approves it."""
    client.started(app.flows["errands"].start(items=[*range(client.random.randint(0, 6))]))


@load(weight=4)
def journey(client: Client) -> None:
    """Start a code workflow; `outsider.py` sends its messages."""
    width = client.random.randint(1, 5)
    client.set_out(journeys.journey.start(width), width)


@load(weight=3)
def rounds(client: Client) -> None:
    """Start a workflow that continues as new forever, until its timeout, its cancellation or the end of its parent."""
    if client.random.random() < 0.5:
        client.go_round(journeys.guardian.start())
    else:
        client.go_round(journeys.rounds.options(timeout=client.random.choice((2.0, 4.0))).start())


@load(weight=ONLY_IF_NAMED)
def inquiry(client: Client) -> None:
    """Start a workflow that repeats a question in run after run; `outsider.py` finally answers."""
    client.begun(journeys.inquiry.start([]))


@load(weight=2)
def cancelled(client: Client) -> None:
    """Cancel an earlier task or run, in whatever state."""
    kinds: list[list[Cancellable]] = [[*client.tasks[-200:]], [*client.runs[-10:]], [*client.journeys[-3:]]]
    handles = client.random.choice(kinds)
    if handles:
        handle = client.random.choice(handles)
        client.cancelling(handle)
        try:
            handle.cancel()
        except WrongState:
            client.counts["too late"] += 1


def workflow() -> Workflow:
    """Return the DAG that `dag` starts."""
    flow = Workflow("fan", params={"count": int})
    count = flow.params.count
    found = flow.task("discover", tasks.discover, input={"count": count})
    each = flow.task("each", tasks.work, depends_on=[found], foreach=found.items, retries=1)
    shards = flow.task("shards", tasks.work_async, depends_on=[found], parallel=3, concurrency=2)
    flow.task("gather", tasks.gather, depends_on=[each, shards, found], input={"count": count})
    return flow
