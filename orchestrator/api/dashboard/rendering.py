"""Templates, made into pages: everything in them is escaped, and nothing that a browser would run stands in them."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response

from orchestrator.api.dashboard import words
from orchestrator.api.dashboard.visit import current, prefix
from orchestrator.api.problems import Problem
from orchestrator.sealing import describe_json

HTML = "text/html"
STATIC = Path(__file__).parent / "static"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The origin of a form is told to our own server, which looks at it, and to nobody else."""
_ADDRESSES = re.compile(r'(\b(?:href|src|action|formaction|data-live|data-pulse|data-name-in-path)=")(/ui\b)')
"""Where templates have addresses. Nothing that is only shown looks so: its quotation marks are escaped."""


@cache
def version_of(name: str) -> str:
    """Return what names the content of a file, so that a browser may keep it for ever."""
    return hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]


def _asset(name: str) -> str:
    return f"/ui/static/{name}?{version_of(name)}"


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("orchestrator.api.dashboard", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["asset"] = _asset
    found.globals["words"] = words
    found.filters.update(words.FILTERS)
    return found


def page(template: str, status: int = 200, **values: Any) -> Response:
    """Return a page for whoever looks at it; what only others can open is told to be sealed."""
    text = _environment().get_template(template).render(visit=current.get(), now=words.present(), **values)
    if before := prefix.get():
        text = _ADDRESSES.sub(lambda found: f"{found[1]}{before}{found[2]}", text)
    return HTMLResponse(describe_json(text.encode()), status, headers=_HEADERS)


def go(to: str) -> Response:
    """Lead to another page of the dashboard."""
    return RedirectResponse(f"{prefix.get()}{to}", 303)


def refusal(problem: Problem, headers: dict[str, str]) -> Response:
    """Return a page that says why there is no other."""
    answer = page("problem.html", problem.status, problem=problem)
    answer.headers.update(headers)
    return answer
