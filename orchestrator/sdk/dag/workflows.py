"""Workflows of an application: definitions in the database, and runs of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.tasks.starts import StartSteps
from orchestrator.sdk.checks import check_label, check_name, check_tags
from orchestrator.sdk.client import Client
from orchestrator.sdk.code.workflow import Registry
from orchestrator.sdk.dag.registered import take_over
from orchestrator.sdk.dag.starting import start_in_task
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.context import current_runtime
from orchestrator.sdk.tasks.handle import RunHandle
from orchestrator.sdk.waiting.async_variants import async_variant
from orchestrator.tracing.entry import sending

if TYPE_CHECKING:
    from orchestrator.sdk.dag.builder import Workflow


class Workflows(Mapping[str, "StoredWorkflow"]):
    """`app.workflows`: the workflows that have been applied, by name."""

    def __init__(self, client: Client, registry: Registry) -> None:
        self._client = client
        self._registry = registry

    def __getitem__(self, name: str) -> StoredWorkflow:
        return StoredWorkflow(self._client, check_name("workflow", name))

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

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


@dataclass(frozen=True)
class RunOptions:
    """How a run is started."""

    key: str | None = None
    """An idempotency key: a second start with the same key returns the first run."""
    tags: tuple[str, ...] = ()
    """Added to the definition's own tags."""


class StoredWorkflow:
    """One workflow, by name; the newest version counts when a run is started."""

    def __init__(self, client: Client, name: str, options: RunOptions | None = None) -> None:
        self._client = client
        self.name = name
        """What it is called."""
        self._options = options or RunOptions()

    def __repr__(self) -> str:
        return f"<Workflow {self.name}>"

    def options(self, *, key: str | None = None, tags: tuple[str, ...] | list[str] = ()) -> StoredWorkflow:
        """Return this workflow with an idempotency key or tags for the runs that follow."""
        key = None if key is None else check_label("key", key)
        return StoredWorkflow(self._client, self.name, replace(self._options, key=key, tags=check_tags(tags)))

    def definition(self) -> Definition:
        """Return the newest version."""
        return self._client.backend.workflows.latest(self.name).definition

    def start(self, /, **params: Any) -> RunHandle[Any]:
        """Start a run; it is durable when this returns. Inside a task, the scheduler starts it."""
        runtime = current_runtime()
        with sending("start", self.name) as sent:
            if runtime is not None:
                start = StartSteps(self.name, key=self._options.key, tags=tuple(self._options.tags))
                run_id = start_in_task(self._client, runtime, start, params)
            else:
                run_id = self._client.backend.workflows.start(
                    self.name, params, new_id(), key=self._options.key, tags=self._options.tags
                )
            sent.created(run_id)
        return RunHandle(self._client, run_id)

    def delete(self) -> None:
        """Delete the workflow and its schedules: nothing starts it any more. Its runs stay, and those under way go on.

        Who applies it again has it back, with its history.
        """
        if not self._client.backend.workflows.delete(self.name):
            self._client.backend.workflows.latest(self.name)  # which says that there is none

    adefinition = async_variant(definition)
    astart = async_variant(start)
    adelete = async_variant(delete)
