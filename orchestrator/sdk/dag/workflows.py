"""The stored workflows of an application, and runs of them."""

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
from orchestrator.sdk.dag.registered import copy_task_options
from orchestrator.sdk.tasks.handle import RunHandle
from orchestrator.sdk.values.sorting import sorted_sets
from orchestrator.sdk.waiting.async_variants import async_variant

if TYPE_CHECKING:
    from orchestrator.sdk.dag.builder import Workflow


class Workflows(Catalogue["StoredWorkflow"]):
    """`app.workflows`: the applied workflows, by name."""

    def __getitem__(self, name: str) -> StoredWorkflow:
        return StoredWorkflow(self._client, check_name("workflow", name))

    def names(self) -> list[str]:
        """Return the names of all applied workflows."""
        return self._client.backend.workflows.names()

    def apply(self, source: Definition | Workflow | str | Path, *, elsewhere: Iterable[str] = ()) -> int:
        """Store a definition, built in Python or read from a file, and return its version. Unchanged, it is a no-op.

        The options of the application's tasks are copied into the steps, as part of the version. If the application has
        tasks, a step that names an unknown task is refused, unless `elsewhere` lists the task as another application's.
        """
        from orchestrator.sdk.dag import definitions  # loads the YAML parser, which workers do without

        self._registry.modules.load()
        further = partial(copy_task_options, tasks=self._registry.tasks, elsewhere=elsewhere)
        if isinstance(source, (str, Path)):
            definition = definitions.load(Path(source), further)
        else:
            definition = definitions.checked(source) if isinstance(source, Definition) else source.definition()
            definition = definitions.completed(definition, f"workflow {definition.name!r}", further)
        return self._client.backend.workflows.apply(definition).version

    anames = async_variant(names)
    aapply = async_variant(apply)


class StoredWorkflow:
    """A stored workflow. Runs start with its newest version."""

    def __init__(self, client: Client, name: str, key: str | None = None, tags: tuple[str, ...] = ()) -> None:
        self._client = client
        self.name = name
        """The name of the workflow."""
        self._key = key
        self._tags = tags

    def __repr__(self) -> str:
        return f"<Workflow {self.name}>"

    def options(self, *, key: str | None = None, tags: tuple[str, ...] | list[str] = ()) -> StoredWorkflow:
        """Return a copy of this workflow with an idempotency key and additional tags for its runs.

        A second start with the same key returns the first run.
        """
        key = None if key is None else check_label("key", key)
        return StoredWorkflow(self._client, self.name, key, check_tags(tags))

    def definition(self) -> Definition:
        """Return the newest version of the definition."""
        return self._client.backend.workflows.latest(self.name).definition

    def start(self, /, **params: Any) -> RunHandle[Any]:
        """Start a run. The run is durable when this returns. Inside a task, the scheduler starts it."""
        key, tags = self._key, self._tags
        if key is not None:
            params = sorted_sets(params)  # they are compared with those of another start with the same key

        def create(run_id: bytes) -> bytes:
            return self._client.backend.workflows.start(self.name, params, run_id, key=key, tags=tags)

        run_id = start_run(self._client, StartSteps(self.name, key=key, tags=tags), params, create)
        return RunHandle(self._client, run_id)

    def delete(self) -> None:
        """Delete the workflow and its schedules: nothing starts it any more. Its runs are kept, and open ones continue.

        A person can still run one of its runs again. Applying the workflow again restores it, with its history.
        """
        if not self._client.backend.workflows.delete(self.name):
            self._client.backend.workflows.latest(self.name)  # raises NotFound

    adefinition = async_variant(definition)
    astart = async_variant(start)
    adelete = async_variant(delete)
