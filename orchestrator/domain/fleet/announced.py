"""Names that workers announce: tasks, workflows, and requirements of some of them."""

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
"""Announced by workers with the database, so that they count as a different kind of worker."""
_BUILT_IN = "orchestrator."
"""The prefix of the names of built-in tasks."""
_REDACTED = "@redact:"
"""The prefix of a task's announced `redact` patterns, used for calls by name."""
SIGNALS = "@signals:"
"""The prefix of the announced signals of a class workflow. Other workflows may take any signal."""


def tasks_among(names: Collection[str]) -> list[str]:
    """Return the application's tasks among the names that workers announce."""
    workflows = set(workflows_among(names))
    return sorted(name for name in _named(names) if "@" not in name and name not in workflows)


def workflows_among(names: Collection[str]) -> list[str]:
    """Return the workflows among announced names. A workflow is announced as `name` and as `name@version`."""
    return sorted({name.rpartition("@")[0] for name in _named(names) if "@" in name})


def count_known(names: Collection[str]) -> int:
    """Return the number of the application's tasks and workflows among announced names."""
    return sum("@" not in name for name in _named(names))


def _named(names: Collection[str]) -> Iterator[str]:
    """Yield the names of tasks and workflows, without requirements such as databases, executors, keys and stores."""
    for name in names:
        is_means = name == WITH_DATABASE or "*" in name or is_announced(name) or key_of_name(name) is not None
        if not is_means and not name.startswith((_BUILT_IN, _REDACTED, SIGNALS)):
            yield name


def upgrading(workflow: str, version: int) -> str:
    """Return the announcement that open runs of older versions of a workflow continue with this version."""
    return f"{workflow}@{version}+"


def upgrades_among(names: Iterable[str]) -> dict[str, int]:
    """Return, by workflow, the version with which open runs of older versions continue."""
    parts = (name[:-1].rpartition("@") for name in names if name.endswith("+") and "@" in name)
    return {workflow: int(version) for workflow, _, version in parts if version.isdecimal()}


def redacting(task: str, patterns: Iterable[str]) -> str:
    """Return the announcement of a task's redaction patterns, quoted so that it equals no task name."""
    return f"{_REDACTED}{','.join(quote(pattern, safe='') for pattern in patterns)} {task}"


def redacted_among(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the redaction patterns of each task. If workers differ, the patterns of all count."""
    redacted: dict[str, tuple[str, ...]] = {}
    for name in sorted(name for name in names if name.startswith(_REDACTED)):
        patterns, _, task = name.removeprefix(_REDACTED).partition(" ")
        announced = (unquote(pattern) for pattern in patterns.split(","))
        redacted[task] = tuple(dict.fromkeys((*redacted.get(task, ()), *announced)))
    return redacted


def taking(workflow: str, signals: Iterable[str]) -> str:
    """Return the announcement of the signals that a workflow takes."""
    return f"{SIGNALS}{','.join(sorted(signals))} {workflow}"


def signals_among(kinds: Iterable[Sequence[str]]) -> frozenset[str] | None:
    """Return the signals that a workflow takes, as announced by each kind of worker that knows it.

    Return None if the workflow may take any: no worker knows it, or some worker does not announce signals.
    """
    signals: set[str] = set()
    is_known = False
    for names in kinds:
        if not names:
            return None
        is_known = True
        signals.update(*(name.removeprefix(SIGNALS).partition(" ")[0].split(",") for name in names))
    return frozenset(signals - {""}) if is_known else None


def unknown_signal(workflow: str, name: str, signals: Collection[str]) -> str:
    """Return the message that a workflow has no handler for a signal."""
    return (
        f"Workflow {workflow!r} has no handler for signal {name!r:.100}.{did_you_mean(name, sorted(signals))} It "
        f"handles: {', '.join(sorted(signals)) or 'none'}. Nothing was sent."
    )


def with_redaction(options: str | None, patterns: Iterable[str]) -> str | None:
    """Return the stored options of a call by name, with the redaction patterns of its task added.

    Patterns that the call does not name are marked as `inherited`, so that equal calls still compare equal.
    """
    parsed = parse_options(options)
    if not (more := tuple(pattern for pattern in patterns if pattern not in parsed.redact)):
        return options
    changed = msgspec.structs.replace(parsed, redact=(*parsed.redact, *more), inherited=(*parsed.inherited, *more))
    return msgspec.json.encode(changed).decode()


# -- standby schedulers


class Standby(msgspec.Struct, frozen=True, kw_only=True):
    """A standby scheduler."""

    address: Annotated[str, Meta(max_length=300)]
    """The host and process id."""
    since: datetime
    """The start of its standby, by its own clock."""


# -- finding a worker by name. A worker is one parent process; users see its child processes


_STOPPED = "stopped"
_SILENT = ("dead", _STOPPED)


@dataclass(frozen=True, kw_only=True)
class FleetProcess:
    """A process of a worker, as displayed."""

    id: str
    """The name of its worker, and a random part."""
    host: str
    state: str
    parent: UUID | None
    """The id of its parent process. None if the parent takes no orders."""

    @property
    def worker(self) -> str:
        """The name of the worker: the host and the parent's process id, which another worker may have later."""
        return self.id.rpartition("-")[0] or self.id

    @property
    def is_over(self) -> bool:
        """Return whether the process has shut down cleanly and will send no more heartbeats."""
        return self.state == _STOPPED

    @property
    def is_heard(self) -> bool:
        """Return whether the process has sent a heartbeat lately."""
        return self.state not in _SILENT


def matching_workers(processes: Sequence[FleetProcess], name: str) -> list[list[FleetProcess]]:
    """Return the workers, as lists of processes, that match a process id, a worker's name or a host.

    Live workers take precedence over silent ones, because a restarted worker may have the name of an earlier one.
    """
    for attribute in ("id", "worker", "host"):
        matches = [p for p in processes if getattr(p, attribute) == name]
        matches = [p for p in matches if p.is_heard] or [p for p in matches if not p.is_over] or matches
        if matches:
            workers = dict.fromkeys(p.parent or p.worker for p in matches)
            return [[p for p in processes if (p.parent or p.worker) == worker] for worker in workers]
    return []
