"""Whether the system works at all: open pages ask for it now and then, because an outage sends no events."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.pages.overview import Whole, read_whole
from orchestrator.api.endpoints import JSON, Routes
from orchestrator.api.key_scope import WITHIN
from orchestrator.domain.access import KeyScope
from orchestrator.errors import Unavailable

routes = Routes("dashboard", "/ui")

_RECENT = 3.0
"""Seconds for which all pages of this process share what was found, also that nothing could be read."""
_OUTAGES = {
    "redis away": "Redis is away",
    "redis full": "Redis is full",
    "redis refuses writes": "Redis refuses writes",
    "no leader": "no scheduler leads",
    "leader in trouble": "the scheduler is in trouble",
}
"""Troubles that stop everything, and what every page says of them, causes first; the overview says more."""


class Pulse(msgspec.Struct, frozen=True):
    """How the system is, in a word."""

    outage: str
    """Why nothing moves; empty while something does."""
    troubles: str = ""
    """A mark of all that needs a person, for those who see all."""


@routes.get("/pulse", about=WITHIN)
def pulse(api: Api, key_scope: KeyScope) -> Response:
    """Say whether the system works. Neither the scheduler nor a worker is asked."""

    def read() -> Whole | None:
        try:
            return api.recent.get(("whole",), _RECENT, lambda: read_whole(api))
        except Unavailable:
            return None

    whole = api.recent.get(("pulse",), _RECENT, read)
    if whole is None:
        return _answer(Pulse("Postgres is away"), 503)
    kinds = {one.kind for one in whole.troubles}
    found = next((text for kind, text in _OUTAGES.items() if kind in kinds), "")
    return _answer(Pulse(found, "" if key_scope.is_bound else whole.mark))


def _answer(found: Pulse, status: int = 200) -> Response:
    return Response(msgspec.json.encode(found), status, media_type=JSON, headers={"Cache-Control": "no-store"})
