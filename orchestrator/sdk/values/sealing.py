"""Preparation of values in the client: large ones go to the payload store, others are sealed if there are data keys."""

from __future__ import annotations

import msgspec

from orchestrator.domain.tasks.task import NewTask
from orchestrator.payloads import keeping
from orchestrator.payloads.keeping import STORE_CAPABILITY, PayloadStore
from orchestrator.sealing import CALL, Vault, key_name, vault_of
from orchestrator.settings import Settings


def outgoing_task(task: NewTask, settings: Settings) -> NewTask:
    """Return a task with its arguments in the payload store if they are large, and sealed otherwise."""
    if len(task.payload) > settings.inline_payload and (store := store_of(settings)) is not None:
        task = task_with_stored_arguments(task, store)
    return sealed_task(task, settings)


def task_with_stored_arguments(task: NewTask, store: PayloadStore) -> NewTask:
    """Return a task with its arguments in the payload store, if they are large.

    Arguments under an idempotency key stay inline, because they are compared with those of the next call.
    """
    if not _belongs_in_store(task, store.inline):
        return task
    return msgspec.structs.replace(task, payload=store.arguments(task.payload, task.id, task.run_id))


def _belongs_in_store(task: NewTask, inline: int) -> bool:
    return len(task.payload) > inline and not (task.unique is not None and task.unique.same_call)


def scheduled_task(task: NewTask, settings: Settings) -> NewTask:
    """Return a task with its arguments sealed, unless they are large: the worker moves these to the payload store."""
    is_stored = bool(settings.payload_store) and _belongs_in_store(task, settings.inline_payload)
    return task if is_stored else sealed_task(task, settings)


def sealed_task(task: NewTask, settings: Settings) -> NewTask:
    vault = vault_of(settings)
    return task if vault is None else seal_task(task, vault)


def seal_task(task: NewTask, vault: Vault) -> NewTask:
    """Return a task with its arguments sealed, except for a request to start a run, which no worker reads."""
    return msgspec.structs.replace(task, payload=vault.seal(CALL, task.payload))


def outgoing(data: bytes, kind: bytes, run: bytes, settings: Settings) -> bytes:
    """Return an encoded input of a run: a reference to the payload store if it is large, else the sealed value."""
    if len(data) > settings.inline_payload and (store := store_of(settings)) is not None:
        return store.arguments(data, run, None)
    return sealed(data, kind, settings)


def sealed(data: bytes, kind: bytes, settings: Settings) -> bytes:
    """Return an encoded value, sealed."""
    vault = vault_of(settings)
    return data if vault is None else vault.seal(kind, data)


def store_of(settings: Settings) -> PayloadStore | None:
    """Return the payload store in the settings, or None, and register the store for reads in this process."""
    if not settings.payload_store:
        return None
    from orchestrator.transport.announcements import StoresInUse  # imports redis, which few programs need so early

    return keeping.store_of(settings, StoresInUse)


def store_capabilities(settings: Settings) -> list[str]:
    """Return the capabilities that a worker announces for its payload store."""
    return [] if store_of(settings) is None else [key_name(STORE_CAPABILITY)]
