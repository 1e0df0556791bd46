"""Metrics of every process, under the names that all exporters use."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from orchestrator.monitoring.exposition import Family, counter, gauge
from orchestrator.telemetry import Outage

_STARTED = time.time()
_PAGE = os.sysconf("SC_PAGE_SIZE")


def own_metrics(role: str, **outages: Outage) -> Iterator[Family]:
    """Yield version, time and memory of this process, and which servers it could not use."""
    release = {"version": version("durable-orchestrator"), "python": sys.version.split()[0], "role": role}
    yield gauge("orchestrator_build_info", "Which release this process runs, and as what.", (release, 1))
    used = os.times()
    yield counter("process_cpu_seconds_total", "CPU time of this process.", ({}, round(used.user + used.system, 3)))
    yield gauge("process_start_time_seconds", "When this process started, as Unix time.", ({}, round(_STARTED, 3)))
    memory = _resident_memory()
    if memory is not None:
        yield gauge("process_resident_memory_bytes", "Memory of this process.", ({}, memory))
    lasting = [({"server": name}, float(outage.lasts)) for name, outage in outages.items()]
    yield gauge("orchestrator_outage", "Whether this process cannot use a server now.", *lasting)
    begun = [({"server": name}, float(outage.begun)) for name, outage in outages.items()]
    yield counter("orchestrator_outages_total", "Times that this process could not use a server.", *begun)


def _resident_memory() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):  # not on Linux
        return None
