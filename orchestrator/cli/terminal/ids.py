"""Task and run ids on the command line: the shortest unique prefix, as in git, or the suffix that lists print."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar
from uuid import UUID

import click

from orchestrator.cli.terminal.output import on_terminal
from orchestrator.cli.terminal.reading import open_calls
from orchestrator.errors import NotFound
from orchestrator.monitoring.times import ago, present
from orchestrator.sdk.calls.interface import Calls
from orchestrator.store.insights.lookup import Kind
from orchestrator.terminal_safe import one_line

T = TypeVar("T")

_PARTIAL_ID = re.compile("[0-9a-f]{4,31}")
_MAX_SHOWN = 10
"""Matching ids that the error message for an ambiguous prefix prints, at most."""


class IdOf(click.ParamType):  # type: ignore[type-arg]  # which older releases of click are not
    """A click parameter: the id of a task or a run, or a unique prefix or suffix of one."""

    name = "id"

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def convert(self, value: str | UUID, param: click.Parameter | None, ctx: click.Context | None) -> UUID:
        try:
            return value if isinstance(value, UUID) else UUID(value)
        except ValueError:
            pass
        found = self.find(str(value))
        if found is None:
            self.fail(
                f"{value!r} is not the id of a {self.kind}: expected one such as "
                f"0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17, or its first 4 or last 8 digits, or more.",
                param,
                ctx,
            )
        return found

    def find(self, partial: str) -> UUID | None:
        """Return the only id with this prefix, or else this suffix; None if `partial` cannot be part of an id."""
        digits = partial.replace("-", "").lower()
        if not _PARTIAL_ID.fullmatch(digits):
            return None
        with open_calls() as calls:
            matches = calls.insights.ids_begin_with(self.kind, digits, _MAX_SHOWN + 1)
        if not matches:
            raise NotFound.by_id(self.kind, f"{partial}…")
        if len(matches) == 1:
            return matches[0].id
        now = present()
        several = [
            f"  {row.id}  {one_line(row.name)}, {row.status}, {ago(row.created_at, now)}"
            for row in matches[:_MAX_SHOWN]
        ]
        more = ["  …"] if len(matches) > _MAX_SHOWN else []
        raise click.ClickException(
            "\n".join(
                [f"The ids of several {self.kind}s begin or end with {partial}. Give more of the id:", *several, *more]
            )
        )


class RunId(IdOf):
    """A run's id, the id under which a run of a workflow as code was started, or an idempotency key."""

    def find(self, identifier: str) -> UUID | None:
        """Return the run that was started under this id or key, else the only run whose id begins with it."""
        with open_calls() as calls:
            matches = calls.insights.runs_under(identifier)
        if len(matches) > 1:
            names = ", ".join(sorted(f"{match.workflow}/{match.key} is {match.run}" for match in matches))
            raise NotFound(f"Runs of several workflows were started under {identifier!r}: {names}. Specify one.")
        run = matches[0].run if matches else super().find(identifier)
        if run is None:
            raise NotFound(
                f"No run has the id {identifier!r}, nor was one started under it. Expected a UUID, its first 4 "
                f"or last 8 digits or more, or an id or key that was given at its start; see `orchestrator runs list`."
            )
        return run


TASK, RUN = IdOf("task"), RunId("run")
task_argument = click.argument("task", type=TASK, metavar="ID")
run_argument = click.argument("run", type=RUN, metavar="ID")
runs_argument = click.argument("runs", type=RUN, metavar="ID…", nargs=-1, required=True)


def existing(row: T | None, kind: Kind, identifier: UUID) -> T:
    """Return the row found under an id; raise NotFound if it is None."""
    if row is None:
        raise NotFound.by_id(kind, str(identifier))
    return row


def of_another_kind(kind: str, sought: str) -> str | None:
    """If an id belongs to a run instead of a task (or the reverse), return a message with the command that shows it."""
    other: Kind = "run" if kind == "task" else "task"
    digits = sought.rstrip("…").replace("-", "").lower()
    with open_calls() as calls:
        matches = calls.insights.ids_begin_with(other, digits, 2)
    if not matches:
        return None
    command = f"orchestrator {other}s show {matches[0].id if len(matches) == 1 else sought.rstrip('…')}"
    return f"{sought} is not a {kind} but a {other}: {one_line(matches[0].name)}. To see it: {command}"


class IdFormat:
    """Formats ids: on a terminal the shortest unique prefix, elsewhere the whole id."""

    def __init__(self, calls: Calls, kind: Kind, shown: Iterable[UUID]) -> None:
        self._length = calls.insights.enough_of_ids(kind, list(shown)) if on_terminal() else None

    def __call__(self, identifier: UUID) -> str:
        return str(identifier)[: self._length]
