"""After Postgres has lost commits: tasks that workers have had, and that are gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import KnownTask
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.tasks import unique
from orchestrator.transport.codec import encode
from orchestrator.transport.quarantine import Refused

_MOST = 200
"""Ids in one message: as many as the quarantine keeps of it."""


def find_gone(tx: Transaction, tasks: Sequence[KnownTask]) -> Iterator[Refused]:
    """Yield those of these tasks that Postgres does not know, by name and what they last did, as people are told."""
    known = unique.known(tx.connection, [task.id for task in tasks])
    gone: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for task in tasks:
        if task.id not in known:
            gone[task.name, task.state].append(to_text(task.id))
    for (name, state), ids in gone.items():
        for start in range(0, len(ids), _MOST):
            some = ids[start : start + _MOST]
            yield Refused("lost commits", encode(some), f"Postgres has lost tasks: {len(some)} of {name} ({state})")
