"""The actor in the audit log: the caller that the HTTP API serves at the moment, else the user of this process."""

from __future__ import annotations

import getpass
import os
import socket
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple


class Actor(NamedTuple):
    """The actor of an action."""

    who: str
    origin: str
    """From where: an address, or the process."""


served: ContextVar[Actor | None] = ContextVar("orchestrator_served", default=None)
"""The actor for whom this is done; None where the process acts for itself."""

may_operate: ContextVar[bool] = ContextVar("orchestrator_may_operate", default=True)
"""Whether the actor may act on open work, and not only start new work."""


def current(called: str) -> Actor:
    """Return the actor; the settings may give the process a name."""
    actor = served.get()
    if actor is not None:
        return actor
    host = socket.gethostname()
    return Actor(called or f"{_user()}@{host}", f"{host}:{os.getpid()}")


@cache
def _user() -> str:
    """Return the user of this process; perhaps only its number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
