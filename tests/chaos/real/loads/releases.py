"""Work that only one release of the application knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.real.loads.kinds import LENGTHS, load
from tests.chaos.real.project import app
from tests.chaos.real.project.releases import RELAY, RELEASES, WORK

if TYPE_CHECKING:
    from tests.chaos.real.client import Client


@load(weight=3)
def released(client: Client) -> None:
    """Enqueue tasks of one release, sometimes in bulk; workers of the other release must not circulate them."""
    task = WORK[client.random.choice(RELEASES)]
    number = client.random.choice((1, 1, 1, 40))
    for handle in app.enqueue_many(task, [(client.random.choice(LENGTHS),) for _ in range(number)]):
        client.committed(handle)


@load(weight=2)
def relay(client: Client) -> None:
    """Start a run that is pinned to its version, or one that both versions can continue."""
    workflow = RELAY[client.random.choice(RELEASES)]
    pinned = client.random.random() < 0.7
    client.begun(workflow.starting(pinned=pinned).start(alike=not pinned))
