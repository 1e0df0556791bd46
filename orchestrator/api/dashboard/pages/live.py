"""What happens, as it happens, for pages that are open: the streams of the API, to whoever has logged in."""

from __future__ import annotations

import dataclasses

from orchestrator.api.endpoints import Endpoint
from orchestrator.api.routes import live

routes: tuple[Endpoint, ...] = tuple(
    dataclasses.replace(one, path=one.path.replace("/api/v1", "/ui/live", 1), tag="dashboard") for one in live.routes
)
