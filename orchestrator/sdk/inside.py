"""Whether the code of a workflow is running in this thread.

Such code runs in one go, in one thread, from the arrival of an event until nothing is left to do. So this is a plain
value per thread, and asking for it costs next to nothing. Which workflow it is, `code/commander.py` says.
"""

from __future__ import annotations

import threading
from typing import Any


class _Running(threading.local):
    commander: Any = None


running = _Running()


def inside_workflow() -> bool:
    """Say whether the code of a workflow is running here."""
    return running.commander is not None
