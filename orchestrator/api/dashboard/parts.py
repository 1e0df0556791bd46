"""A page that is read again: it comes without the rows and nodes that the reader has, or not at all if nothing changed.

GET If-None-Match: "3f2a…"  →  304, or the page with <tr data-key="…" data-same></tr> for each row that is as it was
"""

from __future__ import annotations

import re
from hashlib import blake2b

from starlette.responses import HTMLResponse, Response

from orchestrator.api.recent import Recent

_PART = re.compile(r'<(tr|g) ([^>]*)data-key="([^"]*)".*?</\1>', re.DOTALL)
"""Rows of tables and nodes of graphs. None has another one inside."""
_AGE = re.compile(r'(<time [^>]*>|name="since" value=")[^<"]*')
"""Texts that change with the clock, which the reader's page changes by itself; and since when it has a form, which is
when the row with it last changed."""
_KEPT = 600.0
"""Seconds for which it is known what a version of a page has; after that, a page is sent whole."""


def without_known(response: Response, known: str, sent: Recent) -> Response:
    """Return a page without the parts that its version `known` has."""
    if not isinstance(response, HTMLResponse) or response.status_code != 200:
        return response
    text = bytes(response.body).decode()
    version = f'"{_digest(text)}"'
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    headers["ETag"] = version
    if version == known:
        return Response(status_code=304, headers=headers)
    has = sent.get(known, _KEPT, frozenset[str])
    sent.get(version, _KEPT, lambda: frozenset(_digest(part[0]) for part in _PART.finditer(text)))

    def left(part: re.Match[str]) -> str:
        return f'<{part[1]} data-key="{part[3]}" data-same></{part[1]}>' if _digest(part[0]) in has else part[0]

    return HTMLResponse(_PART.sub(left, text) if has else text, headers=headers)


def _digest(text: str) -> str:
    return blake2b(_AGE.sub(r"\1", text).encode(), digest_size=12).hexdigest()
