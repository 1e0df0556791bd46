"""Which run is meant: by its id, or by an id or key that somebody has chosen for it."""

from __future__ import annotations

from uuid import UUID

import click

from orchestrator.cli.reading import reading
from orchestrator.errors import NotFound
from orchestrator.store import run_keys


class RunId(click.ParamType):  # type: ignore[type-arg]  # which older releases of click are not
    """A run's id, the id under which a run of a workflow as code was started, or an idempotency key."""

    name = "ID"

    def convert(self, value: str | UUID, param: click.Parameter | None, ctx: click.Context | None) -> UUID:  # noqa: ARG002
        """Return the run's own id."""
        if isinstance(value, UUID):
            return value
        try:
            return UUID(value)
        except ValueError:
            return _find(value)


RUN = RunId()


def _find(chosen: str) -> UUID:
    with reading() as connection:
        found = run_keys.find(connection, chosen)
    if not found:
        raise NotFound(
            f"No run has the id {chosen!r}, nor was one started under it. Expected a UUID, or an id or key that was "
            f"given at its start; see `orchestrator runs list`."
        )
    if len(found) > 1:
        names = ", ".join(sorted(f"{one.workflow}/{one.key} is {one.run}" for one in found))
        raise NotFound(f"Runs of several workflows were started under {chosen!r}: {names}. Say which.")
    return found[0].run
