"""What a worker is asked to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The command line of a worker, as data."""

    app: str
    """Where the application is: `module:app`."""
    queues: tuple[str, ...] = ("default",)
    processes: int = 1
    concurrency: int = 10
    """Tasks that one process runs at once."""
    allow: tuple[str, ...] = ()
    """Modules, files and folders whose plain functions may be run as `module:function` or `file.py:function`."""
    database: bool = False
    """Tasks may complete in transactions of their own (`ctx.transaction()`), so this worker is given the database."""
    burst: bool = False
    """Work until the queues are empty, then exit."""
    autoscale: tuple[int, int] | None = None
    """Fewest and most processes; then `processes` is not used."""
    max_tasks_per_process: int | None = None
    """Tasks after which a process is replaced; a little more, since it works on until its successor is ready."""
    max_memory: int | None = None
    """Bytes of resident memory at which a process is replaced."""
    reload: bool = False
    """Start the processes again when a Python file under the current folder changes."""
    log_level: str = "info"
    log_format: str = "text"
