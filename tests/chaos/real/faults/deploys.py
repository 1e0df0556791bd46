"""Rolling deploys: workers are drained and start again with the other release of the application.

The last worker always has the code of both, so that whatever was begun can end.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.chaos.real.arena import Arena
from tests.chaos.real.faults.kinds import fault
from tests.chaos.real.members import Member
from tests.chaos.real.project.releases import RELEASES


@fault
def deploy_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """One worker changes its release; the others keep theirs."""
    changing = arena.workers[:-1]
    yield _deploy([pick.choice(changing)] if changing else [], pick)


@fault
def deploy_fleet(arena: Arena, pick: Random) -> Iterator[str]:
    """All but one change to the same release at once."""
    yield _deploy(arena.workers[:-1], pick)


def _deploy(workers: list[Member], pick: Random) -> str:
    wanted = pick.choice(RELEASES)
    if len(workers) == 1 and workers[0].release == str(wanted):
        wanted = next(release for release in RELEASES if release != wanted)
    for worker in workers:
        worker.deploy(str(wanted))
    return f"release {wanted} deployed to {', '.join(map(str, workers)) or 'nobody'}"
