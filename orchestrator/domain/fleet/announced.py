"""What workers say that they know: tasks and workflows by name, and beside them what some of these need."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from orchestrator.domain.executors.call import is_announced
from orchestrator.sealing import key_of_name

WITH_DATABASE = "--database"
"""Published with the names that a worker knows, so that it is of another kind than one without."""
_OURS = "orchestrator."
"""With which the names of built-in tasks begin."""


def tasks_among(names: Collection[str]) -> list[str]:
    """Return the tasks of the application among what workers know."""
    workflows = set(workflows_among(names))
    return sorted(name for name in _named(names) if "@" not in name and name not in workflows)


def workflows_among(names: Collection[str]) -> list[str]:
    """Return the workflows among what workers know: each is there with its versions, too."""
    return sorted({name.rpartition("@")[0] for name in _named(names) if "@" in name})


def count_known(names: Collection[str]) -> int:
    """Return how many tasks and workflows of the application are among what a worker knows."""
    return sum("@" not in name for name in _named(names))


def _named(names: Collection[str]) -> Iterator[str]:
    """Yield names, and no means: no database, executor, key or store, nor leave to import whatever is asked for."""
    for name in names:
        is_means = name == WITH_DATABASE or "*" in name or is_announced(name) or key_of_name(name) is not None
        if not is_means and not name.startswith(_OURS):
            yield name
