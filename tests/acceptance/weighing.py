"""An application without other dependencies, whose tasks report what the worker process has loaded."""

from __future__ import annotations

import gc
import os
import sys

from orchestrator import Orchestrator

app = Orchestrator()


@app.task
def noop(number: int) -> int:
    return number


@app.task
def loaded() -> list[str]:
    """Return the names of all loaded modules."""
    return sorted(sys.modules)


@app.task
def collect() -> int:
    """Collect garbage, as Python does after many tasks; return the process id."""
    gc.collect()
    return os.getpid()
