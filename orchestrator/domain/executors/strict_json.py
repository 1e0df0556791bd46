"""Values on their way out as JSON, which has no NaN and no infinity: what would arrive as null is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from orchestrator.errors import PayloadError


def strict_json(value: Any, what: str) -> bytes:
    """Return plain data as JSON, or say which number of it JSON does not have."""
    data = msgspec.json.encode(value)
    if b"null" in data:  # which stands for None as well
        found = _no_number(value)
        if found is not None:
            place, number = found
            at = f" at `{place}`" if place else ""
            raise PayloadError(
                f"{what} goes out as JSON, which has no NaN and no infinity; found {number!r}{at}. Give null or a text."
            )
    return data


def _no_number(value: Any) -> tuple[str, float] | None:
    """Return a number that JSON does not have, with its place, if there is one."""
    left = [("", value)]
    while left:
        place, item = left.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return place, item
        elif isinstance(item, dict):
            left += [(f"{place}.{key}" if place else str(key), inner) for key, inner in item.items()]
        elif isinstance(item, (list, tuple)):
            left += [(f"{place}[{number}]", inner) for number, inner in enumerate(item)]
    return None
