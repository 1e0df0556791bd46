"""The text format of Prometheus: families of samples, with a bounded number of labels."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

from orchestrator.domain.durations import SECONDS as SECONDS
from orchestrator.telemetry import Outage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_QUEUES = 100
"""Queues with a label of their own, at most. All other queues share one label."""
OTHER_QUEUES = "other"
"""The label shared by all further queues."""

SIZES = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000)
"""Histogram bounds for batch sizes."""

_ESCAPES = {"\\": r"\\", "\n": r"\n", '"': r"\""}
_ESCAPED = re.compile(r'[\\\n"]')


@dataclass
class Histogram:
    """A Prometheus histogram: a count for each bound, and one for larger values."""

    bounds: Sequence[float] = SECONDS
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, or several values of about that size."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


Labels = Mapping[str, str]
Sample = tuple[Labels, "float | Histogram"]


@dataclass(frozen=True)
class Family:
    """A metric with all its samples."""

    name: str
    kind: str
    """`counter`, `gauge` or `histogram`."""
    help: str
    samples: Sequence[Sample]


def gauge(name: str, help: str, *samples: Sample) -> Family:
    """Return a metric that goes up and down."""
    return Family(name, "gauge", help, samples)


def counter(name: str, help: str, *samples: Sample) -> Family:
    """Return a metric that only grows until its process ends."""
    return Family(name, "counter", help, samples)


def histogram(name: str, help: str, *samples: Sample) -> Family:
    """Return a metric with the distribution of a value."""
    return Family(name, "histogram", help, samples)


def render(families: Iterable[Family]) -> bytes:
    """Render families in the text format. Families without samples are left out."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines += [f"# HELP {family.name} {_line(family.help)}", f"# TYPE {family.name} {family.kind}"]
        for labels, value in family.samples:
            if isinstance(value, Histogram):
                lines += _buckets(family.name, labels, value)
            else:
                lines.append(f"{family.name}{_labels(labels)} {_number(value)}")
    return "".join(f"{line}\n" for line in lines).encode()


def _buckets(name: str, labels: Labels, value: Histogram) -> list[str]:
    counts = list(accumulate(list(value.counts)))  # of a copy: another thread may be adding values
    bounds = (*map(_number, value.bounds), "+Inf")
    lines = [
        f"{name}_bucket{_labels({**labels, 'le': bound})} {count}" for bound, count in zip(bounds, counts, strict=True)
    ]
    return [*lines, f"{name}_sum{_labels(labels)} {_number(value.sum)}", f"{name}_count{_labels(labels)} {counts[-1]}"]


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items()) + "}"


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: _ESCAPES[found[0]], text)


def _line(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


# -- metrics of every process, under the customary names

_STARTED = time.time()
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


def own_metrics(role: str, **outages: Outage) -> Iterator[Family]:
    """Yield the version, CPU time and memory of this process, and its outages by server."""
    release = {"version": version("durable-orchestrator"), "python": sys.version.split()[0], "role": role}
    yield gauge("orchestrator_build_info", "Release and role of this process.", (release, 1))
    used = os.times()
    yield counter("process_cpu_seconds_total", "CPU time of this process.", ({}, round(used.user + used.system, 3)))
    yield gauge("process_start_time_seconds", "Start of this process, as Unix time.", ({}, round(_STARTED, 3)))
    memory = _resident_memory()
    if memory is not None:
        yield gauge("process_resident_memory_bytes", "Memory of this process.", ({}, memory))
    lasting = [({"server": name}, float(outage.is_ongoing)) for name, outage in outages.items()]
    yield gauge("orchestrator_outage", "Whether a server is unavailable to this process now.", *lasting)
    begun = [({"server": name}, float(outage.begun)) for name, outage in outages.items()]
    yield counter(
        "orchestrator_outages_total", "Number of times that a server became unavailable to this process.", *begun
    )


def _resident_memory() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_SIZE
    except (OSError, ValueError, IndexError):  # not on Linux
        return None
