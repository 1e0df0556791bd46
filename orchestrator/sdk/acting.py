"""The actor in the audit log: the caller of the current HTTP request, else the user of this process."""

from __future__ import annotations

import getpass
import os
import socket
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple


class Actor(NamedTuple):
    """The author of an entry in the audit log."""

    who: str
    origin: str
    """The caller's address, or host and id of the process."""


served: ContextVar[Actor | None] = ContextVar("orchestrator_served", default=None)
"""The caller of the current HTTP request; None where the process acts for itself."""

may_operate: ContextVar[bool] = ContextVar("orchestrator_may_operate", default=True)
"""Whether the caller may change existing tasks and runs; otherwise the caller may only start new ones."""


def current(name: str) -> Actor:
    """Return the actor. `name` is the name that the settings give to the process, or empty."""
    actor = served.get()
    if actor is not None:
        return actor
    host = socket.gethostname()
    return Actor(name or f"{_user()}@{host}", f"{host}:{os.getpid()}")


@cache
def _user() -> str:
    """Return the name of the user of this process, or the user id if there is no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
