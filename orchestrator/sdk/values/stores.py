"""The payload store of a process, which finds in Redis whether a folder is new or not mounted."""

from __future__ import annotations

from orchestrator.payloads import keeping
from orchestrator.payloads.keeping import MEANS, PayloadStore
from orchestrator.sealing import key_name
from orchestrator.settings import Settings


def store_of(settings: Settings) -> PayloadStore | None:
    """Return the store that settings name; None where there is none. From then on this process reads from it."""
    if not settings.payload_store:
        return None
    from orchestrator.transport.stores_in_use import StoresInUse  # it imports redis, which few programs need so early

    return keeping.store_of(settings, StoresInUse)


def means(settings: Settings) -> list[str]:
    """Return how a worker says that it has a store."""
    return [] if store_of(settings) is None else [key_name(MEANS)]
