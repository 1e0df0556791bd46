"""Workflows of an application: definitions in the database, and runs of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.tasks.starts import StartSteps
from orchestrator.sdk.catalogue import Catalogue, start_run
from orchestrator.sdk.checks import check_label, check_name, check_tags
from orchestrator.sdk.client import Client
from orchestrator.sdk.dag.registered import take_over
from orchestrator.sdk.tasks.handle import RunHandle
from orchestrator.sdk.waiting.async_variants import async_variant

if TYPE_CHECKING:
    from orchestrator.sdk.dag.builder import Workflow


class Workflows(Catalogue["StoredWorkflow"]):
    """`app.workflows`: the workflows that have been applied, by name."""

    def __getitem__(self, name: str) -> StoredWorkflow:
        return StoredWorkflow(self._client, check_name("workflow", name))

    def names(self) -> list[str]:
        """Return the names of all that have been applied."""
        return self._client.backend.workflows.names()

    def apply(self, source: Definition | Workflow | str | Path, *, elsewhere: Iterable[str] = ()) -> int:
        """Store a definition, built in Python or written in a file; return its version. The same again is a no-op.

        Steps take over what the application's tasks say of themselves, and that is a part of the version. Where it has
        tasks, a step that names none of them is refused, unless that is `elsewhere`: a task of another application.
        """
        from orchestrator.sdk.dag import definitions  # loads the YAML parser, which workers do without

        self._registry.modules.load()
        further = partial(take_over, tasks=self._registry.tasks, elsewhere=elsewhere)
        if isinstance(source, (str, Path)):
            definition = definitions.load(Path(source), further)
        else:
            definition = definitions.checked(source) if isinstance(source, Definition) else source.definition()
            definition = definitions.completed(definition, f"workflow {definition.name!r}", further)
        return self._client.backend.workflows.apply(definition).version

    anames = async_variant(names)
    aapply = async_variant(apply)


class StoredWorkflow:
    """One workflow, by name; the newest version counts when a run is started."""

    def __init__(self, client: Client, name: str, key: str | None = None, tags: tuple[str, ...] = ()) -> None:
        self._client = client
        self.name = name
        """Its name."""
        self._key = key
        self._tags = tags

    def __repr__(self) -> str:
        return f"<Workflow {self.name}>"

    def options(self, *, key: str | None = None, tags: tuple[str, ...] | list[str] = ()) -> StoredWorkflow:
        """Return this workflow with an idempotency key, and tags beside its own, for the runs that follow.

        A second start with the same key returns the first run.
        """
        key = None if key is None else check_label("key", key)
        return StoredWorkflow(self._client, self.name, key, check_tags(tags))

    def definition(self) -> Definition:
        """Return the newest version."""
        return self._client.backend.workflows.latest(self.name).definition

    def start(self, /, **params: Any) -> RunHandle[Any]:
        """Start a run; it is durable when this returns. Inside a task, the scheduler starts it."""
        key, tags = self._key, self._tags

        def create(run_id: bytes) -> bytes:
            return self._client.backend.workflows.start(self.name, params, run_id, key=key, tags=tags)

        run_id = start_run(self._client, StartSteps(self.name, key=key, tags=tags), params, create)
        return RunHandle(self._client, run_id)

    def delete(self) -> None:
        """Delete the workflow and its schedules: nothing starts it any more. Its runs stay, and open ones go on.

        Applying it again restores it, with its history.
        """
        if not self._client.backend.workflows.delete(self.name):
            self._client.backend.workflows.latest(self.name)  # which says that there is none

    adefinition = async_variant(definition)
    astart = async_variant(start)
    adelete = async_variant(delete)
