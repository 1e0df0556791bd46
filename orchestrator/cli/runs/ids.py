"""Which run is meant: by its id, or by an id or key that somebody has chosen for it."""

from __future__ import annotations

from uuid import UUID

import click

from orchestrator.cli.terminal.ids import IdOf
from orchestrator.cli.terminal.reading import looking
from orchestrator.errors import NotFound


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
                f"No run has the id {beginning!r}, nor was one started under it. Expected a UUID or the first 4 "
                f"or more of its digits, or an id or key that was given at its start; see `orchestrator runs list`."
            )
        return run


RUN = RunId("run")
run_argument = click.argument("run", type=RUN, metavar="ID")
runs_argument = click.argument("runs", type=RUN, metavar="ID…", nargs=-1, required=True)
