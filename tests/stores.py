"""Access to the backend of an application."""

from __future__ import annotations

from orchestrator import Orchestrator
from orchestrator.sdk.backend import Backend


def backend_of(app: Orchestrator) -> Backend:
    """Return the backend that an application has opened."""
    backend = app._client.backend
    assert isinstance(backend, Backend)
    return backend
