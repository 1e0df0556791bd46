"""Rolling deploys: workers are drained, and restart with another release of the application.

The last worker always has the code of both releases, so that all work can end.
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
    """Deploy a release to one worker."""
    changing = arena.workers[:-1]
    yield _deploy([pick.choice(changing)] if changing else [], pick)


@fault
def deploy_fleet(arena: Arena, pick: Random) -> Iterator[str]:
    """Deploy a release to all workers but the last, at once."""
    yield _deploy(arena.workers[:-1], pick)


def _deploy(workers: list[Member], pick: Random) -> str:
    release_number = pick.choice(RELEASES)
    if len(workers) == 1 and workers[0].release == str(release_number):
        release_number = next(release for release in RELEASES if release != release_number)
    for worker in workers:
        worker.deploy(str(release_number))
    return f"release {release_number} deployed to {', '.join(map(str, workers)) or 'nobody'}"
