"""What clients do while everything breaks: one function per kind of load, chosen by weight.

A new kind of work joins by writing one more function here, and a task in project.py that writes down what it does.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Final

import psycopg2
from sqlalchemy import exc

from orchestrator import Handle, OrchestratorError, RunHandle, Workflow, WrongState
from tests.chaos.real import project
from tests.chaos.real.arena import Arena
from tests.chaos.real.journal import append

Load = Callable[["Client"], None]
LOADS: Final[list[tuple[Load, int]]] = []
MOST_OPEN = 1_500
"""Tasks; a client that is this far ahead waits."""
_LENGTHS = (0.0, 0.0, 0.0, 0.01, 0.05, 0.3)
_WEATHER = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError)


def load(weight: int) -> Callable[[Load], Load]:
    """Register a kind of load."""

    def register(function: Load) -> Load:
        LOADS.append((function, weight))
        return function

    return register


@load(weight=10)
def plain(client: Client) -> None:
    client.enqueued(project.work.enqueue(client.random.choice(_LENGTHS)))


@load(weight=5)
def asynchronous(client: Client) -> None:
    client.enqueued(project.work_async.enqueue(client.random.choice(_LENGTHS)))


@load(weight=2)
def isolated(client: Client) -> None:
    client.enqueued(project.work_isolated.enqueue(client.random.choice(_LENGTHS)))


@load(weight=5)
def long(client: Client) -> None:
    """Long enough to be running when a fault strikes, and still when it is healed: only heartbeats speak for it."""
    task = client.random.choice((project.work, project.work_async))
    client.enqueued(task.enqueue(client.random.uniform(1.0, 5.0)))


@load(weight=5)
def retrying(client: Client) -> None:
    client.enqueued(project.work_unluckily.enqueue(client.random.choice(_LENGTHS)))


@load(weight=3)
def delayed(client: Client) -> None:
    task = project.work.options(delay=client.random.uniform(0.1, 4.0), priority=client.random.randint(-5, 5))
    client.enqueued(task.enqueue())


@load(weight=2)
def expiring(client: Client) -> None:
    client.enqueued(project.work.options(expires=client.random.uniform(0.05, 3.0)).enqueue())


@load(weight=3)
def limited(client: Client) -> None:
    """Two at once for each customer. Never cancelled: what is cancelled makes room before its code has stopped."""
    lane = client.random.choice("ab")
    client.committed(project.work_in_lane.enqueue(lane, client.random.uniform(0.0, 0.5)))


@load(weight=3)
def unique(client: Client) -> None:
    """One at a time of each key; the handle may be that of the one before."""
    key = client.random.choice("xyz")
    client.committed(project.work_once.enqueue(key, client.random.uniform(0.0, 0.5)))


@load(weight=3)
def nested(client: Client) -> None:
    """Tasks that enqueue tasks, from a worker, which has no database."""
    client.enqueued(project.enqueue_children.enqueue(client.random.randint(1, 3), client.random.random() < 0.5))


@load(weight=2)
def bulk(client: Client) -> None:
    for handle in project.app.enqueue_many(project.work, [()] * client.random.randint(2, 60)):
        client.enqueued(handle)


@load(weight=2)
def run_of_many(client: Client) -> None:
    task = client.random.choice((project.work, project.work_async, project.work_unluckily))
    client.started(project.app.start_many(task, [client.random.choice(_LENGTHS)] * client.random.randint(1, 120)))


@load(weight=2)
def dag(client: Client) -> None:
    """A list is discovered, each item is worked on beside some shards, and the results come together."""
    client.started(project.app.workflows["fan"].start(count=client.random.randint(0, 60)))


@load(weight=2)
def cancelled(client: Client) -> None:
    """Cancel something of before, wherever it stands."""
    handles: list[Handle[Any] | RunHandle[Any]] = [*client.tasks[-200:], *client.runs[-10:]]
    if handles:
        handle = client.random.choice(handles)
        try:
            handle.cancel()
        except WrongState:
            client.counts["too late"] += 1


def workflow() -> Workflow:
    """Return the DAG that `dag` starts."""
    flow = Workflow("fan", params={"count": int})
    count = flow.params.count
    found = flow.task("discover", project.discover, input={"count": count})
    each = flow.task("each", project.work, depends_on=[found], foreach=found.items, retries=1)
    shards = flow.task("shards", project.work_async, depends_on=[found], parallel=3, concurrency=2)
    flow.task("gather", project.gather, depends_on=[each, shards, found], input={"count": count})
    return flow


class Client:
    """Submits work, in a thread, and writes down every enqueue that committed."""

    def __init__(self, arena: Arena, seed: int, rate: float) -> None:
        self._arena = arena
        self._pause = 1.0 / rate
        self.random = Random(f"{seed} load")
        self.tasks: list[Handle[Any]] = []
        self.runs: list[RunHandle[Any]] = []
        self.counts: Counter[str] = Counter()
        """How often each kind was submitted; `refused` raised, and may or may not have committed."""
        self.open = 0
        self.violations: list[str] = []
        """What no caller should ever see."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)

    def committed(self, handle: Handle[Any]) -> None:
        """Write down that this enqueue returned."""
        append(self._arena.journal.commit_log, "task", handle.id)

    def enqueued(self, handle: Handle[Any]) -> None:
        """Write it down; the task may be cancelled later."""
        self.committed(handle)
        self.tasks.append(handle)

    def started(self, run: RunHandle[Any]) -> None:
        append(self._arena.journal.commit_log, "run", run.id)
        self.runs.append(run)

    def start(self) -> None:
        project.app.close()
        project.app._settings = self._arena.settings
        project.app.workflows.apply(workflow())
        self._thread.start()

    def stop(self) -> None:
        """Submit no more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        project.app.close()
        project.app._settings = None

    def _run(self) -> None:
        kinds, weights = zip(*LOADS, strict=True)
        looked_at = 0.0
        while not self._stopping.wait(self._pause):
            try:
                if time.monotonic() - looked_at > 1.0:
                    self._count_open()
                    looked_at = time.monotonic()
                if self.open < MOST_OPEN:
                    kind = self.random.choices(kinds, weights)[0]
                    kind(self)
                    self.counts[kind.__name__] += 1
            except _WEATHER:
                self.counts["refused"] += 1
            except Exception as error:  # noqa: BLE001  # whatever else a caller sees is a defect
                if isinstance(error, OrchestratorError) and isinstance(error.__cause__, _WEATHER):
                    self.counts["refused"] += 1
                else:
                    self.violations.append(f"the client was told {type(error).__name__}: {error}")

    def _count_open(self) -> None:
        try:
            self.open = self._arena.sql("SELECT count(*) AS open FROM orchestrator.tasks")[0]["open"]
        except psycopg2.OperationalError:
            return  # down at the moment; the last count will do
