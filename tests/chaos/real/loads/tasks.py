"""Tasks of every kind, one by one and in bulk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.real.loads.kinds import LENGTHS, load
from tests.chaos.real.project import app, callbacks, pulls, tasks

if TYPE_CHECKING:
    from tests.chaos.real.client import Client


@load(weight=10)
def plain(client: Client) -> None:
    client.enqueued(tasks.work.enqueue(client.random.choice(LENGTHS)))


@load(weight=5)
def asynchronous(client: Client) -> None:
    client.enqueued(tasks.work_async.enqueue(client.random.choice(LENGTHS)))


@load(weight=2)
def isolated(client: Client) -> None:
    client.enqueued(tasks.work_isolated.enqueue(client.random.choice(LENGTHS)))


@load(weight=5)
def long(client: Client) -> None:
    """Enqueue a task that outlasts most faults, so that only heartbeats show that it is alive."""
    task = client.random.choice((tasks.work, tasks.work_async))
    client.enqueued(task.enqueue(client.random.uniform(1.0, 5.0)))


@load(weight=5)
def retrying(client: Client) -> None:
    client.enqueued(tasks.work_unluckily.enqueue(client.random.choice(LENGTHS)))


@load(weight=1)
def exiting(client: Client) -> None:
    """Enqueue a task that kills its process, with all other tasks in it."""
    task = tasks.exit_always if client.random.random() < 0.3 else tasks.work_and_exit
    client.enqueued(task.enqueue())


@load(weight=1)
def rude(client: Client) -> None:
    """Enqueue a task that forks its process, or stops the event loop that it shares."""
    client.enqueued(client.random.choice((tasks.work_beside_a_fork, tasks.work_and_stop_the_loop)).enqueue())


@load(weight=3)
def delayed(client: Client) -> None:
    task = tasks.work.options(delay=client.random.uniform(0.1, 4.0), priority=client.random.randint(-5, 5))
    client.enqueued(task.enqueue())


@load(weight=2)
def expiring(client: Client) -> None:
    client.enqueued(tasks.work.options(expires=client.random.uniform(0.05, 3.0)).enqueue())


@load(weight=3)
def nested(client: Client) -> None:
    """Enqueue a task that enqueues tasks from a worker, which has no database."""
    client.enqueued(tasks.enqueue_children.enqueue(client.random.randint(1, 3), client.random.random() < 0.5))


@load(weight=2)
def bulk(client: Client) -> None:
    for handle in app.enqueue_many(tasks.work, [()] * client.random.randint(2, 60)):
        client.enqueued(handle)


@load(weight=3)
def followed(client: Client) -> None:
    """Enqueue a task with callbacks for its result and for its final failure."""
    client.enqueued(callbacks.work_and_be_followed.enqueue())


@load(weight=5)
def pulled(client: Client) -> None:
    """Enqueue work for pull clients, usually long enough to be held when Redis loses its data."""
    client.enqueued(pulls.pulled.enqueue(client.random.choice((0.0, 1.0, 3.0, 6.0))))
