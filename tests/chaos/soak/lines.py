"""The metrics that a soak test draws: their panels, and how much each may grow and still count as flat."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

LATENCY_WINDOW = 10.0
"""Seconds over which percentiles of latency are computed."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A metric, drawn as a line."""

    key: str
    panel: str
    label: str
    unit: str
    may_grow: float | None = None
    """Allowed growth over the second half of the soak test, in the line's unit. None: displayed, but not judged."""
    may_grow_share: float = 0.0
    """Allowed growth as a share of the median; the larger limit applies."""


_memory = partial(Line, unit="MB", may_grow=4.0, may_grow_share=0.05)

LINES = (
    _memory(key="scheduler_veteran", panel="Memory of schedulers", label="veteran"),
    Line(key="scheduler_others", panel="Memory of schedulers", label="the other", unit="MB"),
    _memory(key="worker_veteran", panel="Memory of workers", label="veteran"),
    Line(key="worker_others", panel="Memory of workers", label="the other", unit="MB"),
    Line(key="files_scheduler", panel="Open files of veterans", label="scheduler", unit="files", may_grow=3),
    Line(key="files_worker", panel="Open files of veterans", label="worker", unit="files", may_grow=3),
    Line(key="postgres_connections", panel="Connections", label="Postgres", unit="connections", may_grow=2),
    Line(key="redis_connections", panel="Connections", label="Redis", unit="connections", may_grow=4),
    Line(key="events", panel="Redis: entries", label="events", unit="entries", may_grow=100),
    Line(key="queues", panel="Redis: entries", label="dispatch", unit="entries", may_grow=50),
    Line(key="orders", panel="Redis: entries", label="orders", unit="entries", may_grow=50),
    Line(key="quarantine", panel="Redis: entries", label="quarantine", unit="entries", may_grow=0.5),
    Line(key="redis_keys", panel="Redis: names", label="keys", unit="names", may_grow=10),
    Line(key="known_workers", panel="Redis: names", label="workers", unit="names", may_grow=10),
    Line(key="consumers", panel="Redis: names", label="consumers", unit="names", may_grow=10),
    Line(key="redis_memory", panel="Redis: memory", label="used", unit="MB", may_grow=1.0, may_grow_share=0.1),
    Line(key="open_tasks", panel="Open tasks", label="all", unit="tasks", may_grow=50, may_grow_share=0.5),
    Line(key="in_flight", panel="Open tasks", label="in flight", unit="tasks", may_grow=20, may_grow_share=0.5),
    Line(key="tasks_size", panel="Hot tables with indexes", label="tasks", unit="MB", may_grow=1.0, may_grow_share=0.2),
    Line(key="small_size", panel="Hot tables with indexes", label="small ones", unit="MB", may_grow=0.5),
    Line(key="dead_tuples", panel="Dead rows, hot tables", label="as Postgres counts", unit="rows"),
    Line(key="history_size", panel="History (grows up to its retention)", label="ended tasks and runs", unit="MB"),
    Line(key="history_age", panel="Age of the oldest that is kept", label="ended tasks", unit="s"),
    Line(key="idle", panel="Processors", label="idle", unit="%"),
    Line(key="stolen", panel="Processors", label="taken by the host", unit="%"),
    Line(key="p50", panel="Latency of a short task", label="p50", unit="ms", may_grow=20, may_grow_share=0.5),
    Line(key="p99", panel="Latency of a short task", label="p99", unit="ms", may_grow=500, may_grow_share=0.5),
)

LOGARITHMIC = frozenset({"Latency of a short task"})

Samples = dict[str, list[float | None]]
"""Values by key of a line, one for each time of sampling; None where the value was unavailable or not due."""
