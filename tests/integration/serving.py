"""The HTTP API, served from a thread of the test process, for commands and programs that use it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import uvicorn

from orchestrator.api.app import create_app
from orchestrator.settings import Settings

Way = Literal["database", "http"]


@pytest.fixture(scope="module", params=["database", "http"], name="way")
def both_ways(request: pytest.FixtureRequest) -> Way:
    """Run the tests of a module over the database and over HTTP. Import it into the module to use it."""
    way: Way = request.param
    return way


@contextmanager
def serving(settings: Settings, **options: Any) -> Iterator[str]:
    """Serve the API; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_config=None, **options))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"{'https' if options else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(40)
        listener.close()
