"""Names that workers announce: tasks and workflows, and beside them requirements of some of these."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from urllib.parse import quote, unquote
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.domain.executors.record import is_announced
from orchestrator.domain.tasks.task import parse_options
from orchestrator.errors import did_you_mean
from orchestrator.sealing import key_of_name

WITH_DATABASE = "--database"
"""Published with the names that a worker knows, so that it is of another kind than one without."""
_OURS = "orchestrator."
"""With which the names of built-in tasks begin."""
_REDACTED = "@redact:"
"""With which begins what a task names in `redact`, for those that call it by its name alone."""
SIGNALS = "@signals:"
"""With which begin the names of the signals that a workflow as a class takes; others may take any."""


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
        if not is_means and not name.startswith((_OURS, _REDACTED, SIGNALS)):
            yield name


def upgrading(workflow: str, version: int) -> str:
    """Return how a worker says that open runs of older versions of a workflow are to go on with this one."""
    return f"{workflow}@{version}+"


def upgrades_among(names: Iterable[str]) -> dict[str, int]:
    """Return the versions with which open runs of older ones are to go on, by workflow."""
    found = (name[:-1].rpartition("@") for name in names if name.endswith("+") and "@" in name)
    return {workflow: int(version) for workflow, _, version in found if version.isdecimal()}


def redacting(task: str, patterns: Iterable[str]) -> str:
    """Return how a worker says what a task does not want shown; quoted, so that it is like no name of anything."""
    return f"{_REDACTED}{','.join(quote(pattern, safe='') for pattern in patterns)} {task}"


def redacted_among(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return what tasks do not want shown, by their names; where workers differ, what any of them says."""
    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(name for name in names if name.startswith(_REDACTED)):
        patterns, _, task = name.removeprefix(_REDACTED).partition(" ")
        said = (unquote(pattern) for pattern in patterns.split(","))
        found[task] = tuple(dict.fromkeys((*found.get(task, ()), *said)))
    return found


def taking(workflow: str, signals: Iterable[str]) -> str:
    """Return how a worker says which signals a workflow takes."""
    return f"{SIGNALS}{','.join(sorted(signals))} {workflow}"


def signals_among(kinds: Iterable[Sequence[str]]) -> frozenset[str] | None:
    """Return the names of signals that a workflow takes, by what each kind of worker that knows it says.

    None if it may take any: no worker knows it, or one does not say.
    """
    found: set[str] = set()
    is_said = False
    for names in kinds:
        if not names:
            return None
        is_said = True
        found.update(*(name.removeprefix(SIGNALS).partition(" ")[0].split(",") for name in names))
    return frozenset(found - {""}) if is_said else None


def unknown_signal(workflow: str, name: str, known: Collection[str]) -> str:
    """Say that a workflow takes no signals of a name."""
    return (
        f"Workflow {workflow!r} takes no signal {name!r:.100}.{did_you_mean(name, sorted(known))} It takes: "
        f"{', '.join(sorted(known)) or 'none'}. Nothing was sent."
    )


def hiding(options: str | None, patterns: Iterable[str]) -> str | None:
    """Return the stored options of a call by name, with what its task does not want shown.

    What the call has not named itself is marked as `inherited`, so that the same call is the same with and without it.
    """
    known = parse_options(options)
    if not (more := tuple(pattern for pattern in patterns if pattern not in known.redact)):
        return options
    changed = msgspec.structs.replace(known, redact=(*known.redact, *more), inherited=(*known.inherited, *more))
    return msgspec.json.encode(changed).decode()


# -- schedulers that stand by


class Standby(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler that stands by."""

    address: Annotated[str, Meta(max_length=300)]
    """Its host and process id."""
    since: datetime
    """When it began to, by its own clock."""


# -- the worker that people mean by a name: it is one parent process, and people see its processes


_OVER = "stopped"
_SILENT = ("dead", _OVER)


@dataclass(frozen=True, kw_only=True)
class FleetProcess:
    """One process of a worker, as people see it."""

    id: str
    """The name of its worker, and something random."""
    host: str
    state: str
    parent: UUID | None
    """The id of its parent process; None if that takes no orders."""

    @property
    def worker(self) -> str:
        """The name of its worker: the host and the number of the parent process, which others may have later."""
        return self.id.rpartition("-")[0] or self.id

    @property
    def is_over(self) -> bool:
        """Say whether it has ended in good order, and so will not be heard of again."""
        return self.state == _OVER

    @property
    def is_heard(self) -> bool:
        """Say whether it has been heard of lately."""
        return self.state not in _SILENT


def workers_meant(processes: Sequence[FleetProcess], wanted: str) -> list[list[FleetProcess]]:
    """Return the workers, as lists of their processes, that an id, a worker's name or a host may mean.

    Live workers come before silent ones: a restarted worker may have the name of an earlier one.
    """
    for way in ("id", "worker", "host"):
        found = [one for one in processes if getattr(one, way) == wanted]
        found = [one for one in found if one.is_heard] or [one for one in found if not one.is_over] or found
        if found:
            lives = dict.fromkeys(one.parent or one.worker for one in found)
            return [[one for one in processes if (one.parent or one.worker) == life] for life in lives]
    return []
