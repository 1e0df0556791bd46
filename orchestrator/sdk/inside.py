"""Whether the code of a workflow is running in this thread.

A turn of a workflow runs in one thread without interruption, from the arrival of an event until the code waits. So a
thread-local value is enough, and cheap to read. Its commander is an object of `code/commander.py`.
"""

from __future__ import annotations

import threading
from typing import Any


class _Running(threading.local):
    commander: Any = None


running = _Running()


def inside_workflow() -> bool:
    """Return whether the code of a workflow is running in this thread."""
    return running.commander is not None
