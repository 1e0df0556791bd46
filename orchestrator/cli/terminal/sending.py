"""An application for commands that ask for something and need none of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.sdk.app import Orchestrator
from orchestrator.settings import load_settings


@contextmanager
def sending() -> Iterator[Orchestrator]:
    """Yield an application without tasks, and close its connections afterwards."""
    app = Orchestrator(load_settings())
    try:
        yield app
    finally:
        app.close()
