"""Where in the project's own code a workflow is, in words for people."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from orchestrator.domain.code.activation import WaitingPlaces
from orchestrator.sdk.code.commander import Commander
from orchestrator.sdk.code.guards import is_own_code

_MOST = 5
"""Lines, signals and updates of one run that are shown: there may be thousands."""
_MOST_HANDLERS = 20
_LONGEST = 200
_INNER = ("cr_await", "gi_yieldfrom", "ag_await")
_FRAMES = ("cr_frame", "gi_frame", "ag_frame")


def place(frame: FrameType) -> str:
    """Return where a frame is: `shop.py, line 7, in order`."""
    return _place(frame.f_code, frame.f_lineno)


def _place(code: CodeType, number: int) -> str:
    return f"{Path(code.co_filename).name}, line {number}, in {code.co_name}"


def waiting(
    commander: Commander, updates: Iterable[str], handlers: Mapping[tuple[str, str], list[str]]
) -> WaitingPlaces:
    """Return where the code of a run waits, which costs the same however much it waits for; and what it answers."""
    places = (_place_of(coroutine) for coroutine in commander.loop.first_suspended(_MOST))
    signals = (box.name for box in commander.mailboxes.values() if box.is_awaited)
    return WaitingPlaces(
        list(dict.fromkeys(filter(None, places))),
        list(islice(signals, _MOST)),
        list(islice(updates, _MOST)),
        [(kind, name, names) for (kind, name), names in islice(handlers.items(), _MOST_HANDLERS)],
    )


def _place_of(waits: Any) -> str:
    """Return the innermost line of the project's own code at which a coroutine waits."""
    found: FrameType | None = None
    while waits is not None:
        frame = next((frame for name in _FRAMES if (frame := getattr(waits, name, None)) is not None), None)
        if frame is not None and is_own_code(frame):
            found = frame
        waits = next((inner for name in _INNER if (inner := getattr(waits, name, None)) is not None), None)
    return "" if found is None else _line(found.f_code, found.f_lineno)


@lru_cache(maxsize=4096)
def _line(code: CodeType, number: int) -> str:
    """Return a line of code, with its place."""
    line = linecache.getline(code.co_filename, number).strip()
    text = f"{_place(code, number)}: {line}" if line else _place(code, number)
    return text[:_LONGEST].encode(errors="replace").decode()  # the name of a file need not be text
