"""The shared part of `app.workflows` and `app.flows`: a mapping by name, and the start of a run."""

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
        """Return the names of all."""


def start_run(
    client: Client,
    start: StartSteps,
    params: Mapping[str, Any],
    create: Callable[[bytes], bytes],
    run_id: bytes | None = None,
    hand_over: Callable[[Sequence[NewTask]], Mapping[bytes, bytes]] | None = None,
    parts: Callable[[], Sequence[EnqueueCall]] | None = None,
) -> bytes:
    """Start a run, and return which one it is: `create` makes it under a new id, or the leader if a task asks.

    `hand_over` is how the task asks, if not at once. `parts` are the calls of a composition, for middleware.
    """
    if client.middleware is not None and of_start.get() is None:
        called = start.name or start.workflow
        seen, calls = (params, ()) if parts is None else ({}, parts())
        with client.middleware.starting("flow" if start.flow else "workflow", called, (), seen, calls):
            return start_run(client, start, params, create, run_id, hand_over)
    runtime = client.runtime()
    if run_id is None:
        run_id = new_id() if runtime is None else runtime.next_id()
    with sending("start", start.name or start.workflow) as sent:
        if runtime is None:
            run_id = create(run_id)
        else:
            run_id = _start_in_task(client, hand_over or runtime.enqueue, start, params, run_id)
        sent.created(run_id)
    return run_id


def _start_in_task(
    client: Client,
    hand_over: Callable[[Sequence[NewTask]], Mapping[bytes, bytes]],
    start: StartSteps,
    params: Mapping[str, Any],
    wanted: bytes,
) -> bytes:
    """Have the leader start a run with these parameters, for a worker has no database."""
    what = f"The parameters of {'flow' if start.flow else 'workflow'} {start.workflow!r}"
    if problem := unstorable(params):
        raise PayloadError(f"{what} cannot be kept as JSON: {problem}.")
    check_size(stored_json(params), what, client.settings.max_payload)
    vault = vault_of(client.settings)
    given = stored_json(params) if vault is None else vault.seal_json(stored_json(params))
    request = as_task(wanted, msgspec.structs.replace(start, params=given), current_trace())
    return hand_over([request]).get(wanted, wanted)
