"""Runs of workflows and flows that a running task starts: the scheduler does it, for a worker has no database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.domain.dag.definition import check_size
from orchestrator.domain.plain import stored_json, unstorable
from orchestrator.domain.tasks.starts import StartSteps, as_task
from orchestrator.errors import PayloadError
from orchestrator.sdk.client import Client
from orchestrator.sdk.tasks.context import TaskRuntime
from orchestrator.sealing import vault_of
from orchestrator.trace_context import current_trace


def start_in_task(client: Client, runtime: TaskRuntime, start: StartSteps, params: Mapping[str, Any]) -> bytes:
    """Have the leader start a run with these parameters, and return which one it is."""
    what = f"The parameters of {'flow' if start.flow else 'workflow'} {start.workflow!r}"
    if problem := unstorable(params):
        raise PayloadError(f"{what} cannot be kept as JSON: {problem}.")
    check_size(stored_json(params), what, client.settings.max_payload)
    vault = vault_of(client.settings)
    given = stored_json(params) if vault is None else vault.seal_json(stored_json(params))
    wanted = runtime.next_id()
    request = as_task(wanted, msgspec.structs.replace(start, params=given), current_trace())
    return runtime.enqueue([request]).get(wanted, wanted)
