"""Log-in and log-out; and the static files of the pages."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.rendering import FILES, TYPES, page, pages
from orchestrator.api.dashboard.session import own_page
from orchestrator.api.key_scope import NOTHING
from orchestrator.api.problems import refused

routes = pages("/ui")


class LogInQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The page to open after the log-in."""

    to: str = ""


@routes.get("/login", about=NOTHING, scope=None)
def log_in(api: Api, query: LogInQuery) -> Response:
    """Show the log-in form."""
    del api
    return page("login.html", to=own_page(query.to), wrong=None)


@routes.post("/login", about=NOTHING, scope=None)
@routes.post("/logout", about=NOTHING, scope=None)
def enter_or_leave(api: Api) -> Response:
    """Start or end a session; `serving.py` handles the form, because it authenticates."""
    del api
    return page("login.html", to=own_page(""), wrong=None)


@routes.get("/static/{name}", about=NOTHING, scope=None)
def static_file(api: Api, name: str) -> Response:
    """Send a static file."""
    del api
    file = FILES.get(name)
    if file is None:
        raise refused(404, "There is no such file", f"There is no file {name!r:.100}.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(file, media_type=TYPES[name.rpartition(".")[2]], headers=headers)


@routes.get("/{anything}", about=NOTHING)
def nothing(api: Api, anything: str) -> Response:
    """Show the error for unknown pages."""
    del api
    raise refused(404, "There is no such page", f"There is no page {anything!r:.100}. The menu lists all pages.")
