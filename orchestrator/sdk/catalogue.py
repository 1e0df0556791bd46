"""The base class of `app.workflows` and `app.flows`, a mapping by name, and the function that starts their runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from orchestrator.domain.dag.definition import check_size
from orchestrator.domain.plain import stored_json, unstorable
from orchestrator.domain.tasks.headers import of_start
from orchestrator.domain.tasks.starts import StartSteps, as_task
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import PayloadError
from orchestrator.sdk.client import Client
from orchestrator.sdk.code.workflow import Registry
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.middleware import EnqueueCall
from orchestrator.sealing import vault_of
from orchestrator.trace_context import current_trace
from orchestrator.tracing.entry import sending

T = TypeVar("T")


class Catalogue(Mapping[str, T]):
    """Stored definitions, by name."""

    def __init__(self, client: Client, registry: Registry) -> None:
        self._client = client
        self._registry = registry

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    @abstractmethod
    def names(self) -> list[str]:
        """Return all names."""


def start_run(
    client: Client,
    start: StartSteps,
    params: Mapping[str, Any],
    create: Callable[[bytes], bytes],
    run_id: bytes | None = None,
    submit: Callable[[Sequence[NewTask]], Mapping[bytes, bytes]] | None = None,
    parts: Callable[[], Sequence[EnqueueCall]] | None = None,
) -> bytes:
    """Start a run and return its id, which is that of an earlier run if the start has a key that is taken.

    Outside of tasks, `create` inserts the run. Inside a task, the leader does: `submit` submits the request, by
    default `runtime.enqueue`. `parts` are the calls of a composition, for middleware.
    """
    if client.middleware is not None and of_start.get() is None:
        called = start.name or start.workflow
        seen, calls = (params, ()) if parts is None else ({}, parts())
        with client.middleware.starting("flow" if start.flow else "workflow", called, (), seen, calls):
            return start_run(client, start, params, create, run_id, submit)
    runtime = client.runtime()
    if run_id is None:
        run_id = new_id() if runtime is None else runtime.next_id()
    with sending("start", start.name or start.workflow) as sent:
        if runtime is None:
            run_id = create(run_id)
        else:
            run_id = _start_in_task(client, submit or runtime.enqueue, start, params, run_id)
        sent.created(run_id)
    return run_id


def _start_in_task(
    client: Client,
    submit: Callable[[Sequence[NewTask]], Mapping[bytes, bytes]],
    start: StartSteps,
    params: Mapping[str, Any],
    run_id: bytes,
) -> bytes:
    """Ask the leader to start a run. A task cannot insert the run, because its worker has no database."""
    subject = f"The parameters of {'flow' if start.flow else 'workflow'} {start.workflow!r}"
    if problem := unstorable(params):
        raise PayloadError(f"{subject} cannot be kept as JSON: {problem}.")
    check_size(stored_json(params), subject, client.settings.max_payload)
    vault = vault_of(client.settings)
    sealed_params = stored_json(params) if vault is None else vault.seal_json(stored_json(params))
    request = as_task(run_id, msgspec.structs.replace(start, params=sealed_params), current_trace())
    return submit([request]).get(run_id, run_id)
