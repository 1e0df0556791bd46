"""What a client seals before it leaves the program, where the settings have data keys."""

from __future__ import annotations

import msgspec

from orchestrator.domain.tasks.task import NewTask
from orchestrator.sealing import CALL, Vault, vault_of
from orchestrator.settings import Settings


def sealed_task(task: NewTask, settings: Settings) -> NewTask:
    """Return a task with its arguments sealed."""
    vault = vault_of(settings)
    return task if vault is None else seal_task(task, vault)


def seal_task(task: NewTask, vault: Vault) -> NewTask:
    """Return a task with its arguments sealed; the request to start a run is not for a worker, and stays as it is."""
    return msgspec.structs.replace(task, payload=vault.seal(CALL, task.payload))


def sealed(data: bytes, kind: bytes, settings: Settings) -> bytes:
    """Return an encoded value, sealed."""
    vault = vault_of(settings)
    return data if vault is None else vault.seal(kind, data)
