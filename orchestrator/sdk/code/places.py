"""Where in the project's own code a workflow is, in words for people."""

from __future__ import annotations

import linecache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from orchestrator.domain.activation import Waiting
from orchestrator.sdk.code.guards import is_own_code

if TYPE_CHECKING:
    from orchestrator.sdk.code.flow import Flow

_MOST = 5
"""Places, signals and updates of one run that are told: there may be thousands."""
_LONGEST = 200
_INNER = ("cr_await", "gi_yieldfrom", "ag_await")
_FRAMES = ("cr_frame", "gi_frame", "ag_frame")


def place(frame: FrameType) -> str:
    """Return where a frame is: `shop.py, line 7, in order`."""
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def waiting(flow: Flow) -> Waiting:
    """Return where the code of a flow waits, which costs the same however much it waits for."""
    places = (_place_of(coroutine) for coroutine in flow.loop.first_suspended(_MOST))
    signals = (box.name for box in flow.mailboxes.values() if box.is_awaited)
    return Waiting(
        list(dict.fromkeys(filter(None, places))),
        list(islice(signals, _MOST)),
        list(islice(flow.handlers.open_updates(), _MOST)),
    )


def _place_of(waits: Any) -> str:
    """Return the innermost line of the project's own code at which a coroutine waits."""
    found: FrameType | None = None
    while waits is not None:
        frame = next((frame for name in _FRAMES if (frame := getattr(waits, name, None)) is not None), None)
        if frame is not None and is_own_code(frame):
            found = frame
        waits = next((inner for name in _INNER if (inner := getattr(waits, name, None)) is not None), None)
    if found is None:
        return ""
    line = linecache.getline(found.f_code.co_filename, found.f_lineno, found.f_globals).strip()
    text = f"{place(found)}: {line}" if line else place(found)
    return text[:_LONGEST].encode(errors="replace").decode()  # the name of a file need not be text
