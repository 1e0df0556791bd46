"""An application that needs nothing but the package, and says what its worker process has loaded."""

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
    """Name every module that the process has."""
    return sorted(sys.modules)


@app.task
def collect() -> int:
    """Do what Python does by itself after many tasks; say in which process."""
    gc.collect()
    return os.getpid()
