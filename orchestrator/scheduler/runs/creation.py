"""Create runs on behalf of running tasks, other runs, schedules, events and people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from orchestrator.domain.runs import Nesting
from orchestrator.scheduler.transaction import Transaction
from orchestrator.sealing import VALUE
from orchestrator.store.dag import plans as dags
from orchestrator.store.runs import ancestry, creation
from orchestrator.store.runs.creation import NewRun


def create_runs(tx: Transaction, new: Sequence[NewRun]) -> set[bytes]:
    """Create runs of any kind, once. Return the new ones. Code runs without a lane begin at once."""
    if not new:
        return set()
    tx.result.wake.runs_to_begin |= any((run.code is None or run.lane is not None) and not run.begun for run in new)
    tx.result.wake.delayed |= any((run.code is not None or run.begun) and run.timeout is not None for run in new)
    if tx.vault is not None:
        new = [dags.sealed(run, tx.vault) for run in new]
    return creation.create(tx.connection, new, tx.now, has_spans=tx.has_spans)


def copy_begun(tx: Transaction, new: Sequence[tuple[NewRun, bytes]]) -> None:
    """Create runs that have begun with a single task, with their states. If one exists, Postgres refuses all."""
    tx.result.wake.delayed |= any(run.timeout is not None for run, _ in new)
    if tx.vault is not None:
        new = [(dags.sealed(run, tx.vault), tx.vault.seal(VALUE, state)) for run, state in new]
    creation.copy_begun(tx.connection, new, tx.now)


def full_trees(tx: Transaction, new: Iterable[NewRun], nesting: Nesting) -> set[bytes]:
    """Count runs with ancestors. Return the roots of trees that have grown too large for the new runs."""
    roots = Counter(run.root for run in new if run.root is not None)
    return ancestry.count_descendants(tx.connection, roots, nesting.descendants) if roots else set()
