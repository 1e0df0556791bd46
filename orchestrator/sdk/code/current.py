"""Which workflow's code is running in this thread, if any.

Code of a workflow runs in one go, in one thread, from the arrival of an event until nothing is left to do. So this is
a plain value per thread, and asking for it costs next to nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.sdk.code.flow import Flow


class _Current(threading.local):
    flow: Flow | None = None


_current = _Current()


def current_flow() -> Flow | None:
    """Return the workflow whose code is running here."""
    return _current.flow


def enter_flow(flow: Flow | None) -> Flow | None:
    """Make this the workflow whose code is running here; return which one it was before."""
    before, _current.flow = _current.flow, flow
    return before
