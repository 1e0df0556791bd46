"""Workers: drain one."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from orchestrator.api.context import Api
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WHOLE
from orchestrator.sdk.calls.fleet import Drained

routes = Routes("workers", "/api/v1/workers")

WorkerName = Annotated[str, Meta(min_length=1, max_length=300, examples=["web1-812"])]


@routes.post("/{id}/drain", about=WHOLE, status=202)
def drain_worker(api: Api, id: WorkerName) -> Drained:
    """Have a worker take nothing more, finish what it runs, and end, with all of its processes, as SIGTERM does.

    The id is that of one of its processes, the name of the worker (its host and the number of its parent process), or
    its host if no other worker is there. What starts again under that name is another worker, and goes on.
    """
    return api.backend.fleet.drain(id)
