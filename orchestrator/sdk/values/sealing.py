"""Values that a client seals before they leave the program, where the settings have data keys."""

from __future__ import annotations

import msgspec

from orchestrator.domain.tasks.task import NewTask
from orchestrator.payloads import keeping
from orchestrator.payloads.keeping import MEANS, PayloadStore
from orchestrator.sealing import CALL, Vault, key_name, vault_of
from orchestrator.settings import Settings


def outgoing_task(task: NewTask, settings: Settings) -> NewTask:
    """Return a task whose arguments, if they are large, are in the payload store, and are sealed otherwise."""
    if len(task.payload) > settings.inline_payload and (store := store_of(settings)) is not None:
        task = left_task(task, store)
    return sealed_task(task, settings)


def left_task(task: NewTask, store: PayloadStore) -> NewTask:
    """Return a task with its arguments in the payload store, if they are large.

    Those under a key of one call stay, because they are compared with those of the next call under that key.
    """
    if not _leaves(task, store.inline):
        return task
    return msgspec.structs.replace(task, payload=store.arguments(task.payload, task.id, task.run_id))


def _leaves(task: NewTask, inline: int) -> bool:
    return len(task.payload) > inline and not (task.unique is not None and task.unique.same_call)


def scheduled_task(task: NewTask, settings: Settings) -> NewTask:
    """Return a task with its arguments sealed, unless they are so large that its worker puts them into the store."""
    leaves = bool(settings.payload_store) and _leaves(task, settings.inline_payload)
    return task if leaves else sealed_task(task, settings)


def sealed_task(task: NewTask, settings: Settings) -> NewTask:
    vault = vault_of(settings)
    return task if vault is None else seal_task(task, vault)


def seal_task(task: NewTask, vault: Vault) -> NewTask:
    """Return a task with its arguments sealed; the request to start a run is not for a worker, and stays as it is."""
    return msgspec.structs.replace(task, payload=vault.seal(CALL, task.payload))


def outgoing(data: bytes, kind: bytes, run: bytes, settings: Settings) -> bytes:
    """Return what a run is given: what is large in the payload store, and sealed otherwise."""
    if len(data) > settings.inline_payload and (store := store_of(settings)) is not None:
        return store.arguments(data, run, None)
    return sealed(data, kind, settings)


def sealed(data: bytes, kind: bytes, settings: Settings) -> bytes:
    """Return an encoded value, sealed."""
    vault = vault_of(settings)
    return data if vault is None else vault.seal(kind, data)


def store_of(settings: Settings) -> PayloadStore | None:
    """Return the store that settings name; None where there is none. From then on this process reads from it."""
    if not settings.payload_store:
        return None
    from orchestrator.transport.announcements import StoresInUse  # it imports redis, which few programs need so early

    return keeping.store_of(settings, StoresInUse)


def means(settings: Settings) -> list[str]:
    """Return how a worker says that it has a store."""
    return [] if store_of(settings) is None else [key_name(MEANS)]
