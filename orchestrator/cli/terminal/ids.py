"""Ids as people type and read them: the shortest unique prefix, like git's, or the end that lists show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar
from uuid import UUID

import click

from orchestrator.cli.terminal.output import on_terminal
from orchestrator.cli.terminal.reading import looking
from orchestrator.errors import NotFound
from orchestrator.monitoring.times import ago, present
from orchestrator.sdk.calls.interface import Calls
from orchestrator.store.insights.lookup import Kind
from orchestrator.terminal_safe import one_line

T = TypeVar("T")

_BEGINNING = re.compile("[0-9a-f]{4,31}")
_MOST = 10
"""How many ids are named that begin alike."""


class IdOf(click.ParamType):  # type: ignore[type-arg]  # which older releases of click are not
    """The id of a task or a run, or enough of its beginning or end."""

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

    def find(self, beginning: str) -> UUID | None:
        """Return the only id that begins like this, or else ends so, or None if none can."""
        digits = beginning.replace("-", "").lower()
        if not _BEGINNING.fullmatch(digits):
            return None
        with looking() as calls:
            found = calls.insights.ids_begin_with(self.kind, digits, _MOST + 1)
        if not found:
            raise NotFound.by_id(self.kind, f"{beginning}…")
        if len(found) == 1:
            return found[0].id
        now = present()
        several = [
            f"  {one.id}  {one_line(one.name)}, {one.status}, {ago(one.created_at, now)}" for one in found[:_MOST]
        ]
        more = ["  …"] if len(found) > _MOST else []
        raise click.ClickException(
            "\n".join(
                [f"The ids of several {self.kind}s begin or end with {beginning}. Write more of it:", *several, *more]
            )
        )


class RunId(IdOf):
    """A run's id, the id under which a run of a workflow as code was started, or an idempotency key."""

    def find(self, beginning: str) -> UUID | None:
        """Return the run that was started under this id or key, else the only one whose id begins with it."""
        with looking() as calls:
            found = calls.insights.runs_under(beginning)
        if len(found) > 1:
            names = ", ".join(sorted(f"{one.workflow}/{one.key} is {one.run}" for one in found))
            raise NotFound(f"Runs of several workflows were started under {beginning!r}: {names}. Say which.")
        run = found[0].run if found else super().find(beginning)
        if run is None:
            raise NotFound(
                f"No run has the id {beginning!r}, nor was one started under it. Expected a UUID, its first 4 "
                f"or last 8 digits or more, or an id or key that was given at its start; see `orchestrator runs list`."
            )
        return run


TASK, RUN = IdOf("task"), RunId("run")
task_argument = click.argument("task", type=TASK, metavar="ID")
run_argument = click.argument("run", type=RUN, metavar="ID")
runs_argument = click.argument("runs", type=RUN, metavar="ID…", nargs=-1, required=True)


def existing(found: T | None, kind: Kind, identifier: UUID) -> T:
    """Return what was found under an id, or say that there is nothing."""
    if found is None:
        raise NotFound.by_id(kind, str(identifier))
    return found


def of_another_kind(kind: str, sought: str) -> str | None:
    """Say what an id or its beginning is, and which command shows it, if it is that of a run and not of a task, or
    the other way round.
    """
    other: Kind = "run" if kind == "task" else "task"
    digits = sought.rstrip("…").replace("-", "").lower()
    with looking() as calls:
        found = calls.insights.ids_begin_with(other, digits, 2)
    if not found:
        return None
    command = f"orchestrator {other}s show {found[0].id if len(found) == 1 else sought.rstrip('…')}"
    return f"{sought} is no {kind}, but a {other}: {one_line(found[0].name)}. Look at it: {command}"


class Shown:
    """Shows ids: on a terminal as much of each as is enough, elsewhere all of it."""

    def __init__(self, calls: Calls, kind: Kind, shown: Iterable[UUID]) -> None:
        self._length = calls.insights.enough_of_ids(kind, list(shown)) if on_terminal() else None

    def __call__(self, identifier: UUID) -> str:
        return str(identifier)[: self._length]
