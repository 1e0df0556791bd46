"""Who acts, as the audit log has it: whoever the HTTP API serves at the moment, else the user of this process."""

from __future__ import annotations

import getpass
import os
import socket
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple


class Actor(NamedTuple):
    """Somebody who does something."""

    who: str
    origin: str
    """From where: an address, or the process."""


served: ContextVar[Actor | None] = ContextVar("orchestrator_served", default=None)
"""For whom this is done; None where the process acts for itself."""

may_operate: ContextVar[bool] = ContextVar("orchestrator_may_operate", default=True)
"""Whether whoever this is done for may act upon what is under way, and not only start things."""


def current(called: str) -> Actor:
    """Return who acts; a process may be `called` something by its settings."""
    actor = served.get()
    if actor is not None:
        return actor
    host = socket.gethostname()
    return Actor(called or f"{_user()}@{host}", f"{host}:{os.getpid()}")


@cache
def _user() -> str:
    """Return the user of this process, who may have a number only."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
