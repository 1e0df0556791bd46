"""A look behind an application that uses the stores themselves."""

from __future__ import annotations

from orchestrator import Orchestrator
from orchestrator.sdk.backend import Backend


def backend_of(app: Orchestrator) -> Backend:
    """Return what an application has open."""
    backend = app._client.backend
    assert isinstance(backend, Backend)
    return backend
