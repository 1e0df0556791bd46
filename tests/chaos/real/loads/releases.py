"""What only one release of the application knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.real.loads.kinds import LENGTHS, load
from tests.chaos.real.project import app
from tests.chaos.real.project.releases import RELAY, RELEASES, WORK

if TYPE_CHECKING:
    from tests.chaos.real.client import Client


@load(weight=3)
def released(client: Client) -> None:
    """Tasks of one release, many of them at once now and then: workers of the other must not pass them round."""
    task = WORK[client.random.choice(RELEASES)]
    number = client.random.choice((1, 1, 1, 40))
    for handle in app.enqueue_many(task, [(client.random.choice(LENGTHS),) for _ in range(number)]):
        client.committed(handle)


@load(weight=2)
def relay(client: Client) -> None:
    """A run that is held to its version, or one that code of either version can go on with."""
    workflow = RELAY[client.random.choice(RELEASES)]
    pinned = client.random.random() < 0.7
    client.begun(workflow.starting(pinned=pinned).start(alike=not pinned))
