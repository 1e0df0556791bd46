"""A task that is pulled over HTTP; `puller.py` executes it."""

from __future__ import annotations

from orchestrator.executors import Pull
from tests.chaos.real.project.base import app

SERVICE = "pulled"
LEASE = 4.0
"""Seconds of a lease: longer than most faults, and shorter than some."""


@app.task(executor=Pull(service=SERVICE, lease=LEASE, max_leases=100))
def pulled(seconds: float) -> str: ...
