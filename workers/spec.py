"""The configuration of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.domain.fleet.announced import WITH_DATABASE
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE

EVERY_QUEUE = "*"


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The command line of a worker, as data."""

    app: str
    """Address of the application: `module:app`."""
    queues: tuple[str, ...] = ()
    """The queues to serve; by default only `default`. `*` stands for all queues that the application names."""
    processes: int = 1
    concurrency: int = 10
    """Tasks that one process runs at once."""
    allow: tuple[str, ...] = ()
    """Modules, files and folders whose plain functions may run as `module:function` or `file.py:function`."""
    commands: tuple[str, ...] = ()
    """Programs that the executor `process` may run. `*` stands for any text."""
    executions: int = 1_000
    """Executions that one process watches at once."""
    database: bool = False
    """Give tasks access to the database, for transactions that complete the task (`ctx.transaction()`)."""
    burst: bool = False
    """Work until the queues are empty, then exit."""
    autoscale: tuple[int, int] | None = None
    """Minimum and maximum number of processes; `processes` is then ignored."""
    max_tasks_per_process: int | None = None
    """Tasks after which a process is replaced. It runs a few more until its successor is ready."""
    max_memory: int | None = None
    """Bytes of resident memory at which a process is replaced."""
    reload: bool = False
    """Restart the processes when a Python file under the current folder changes."""
    log_level: str = "info"
    log_format: str = "text"

    @property
    def capabilities(self) -> list[str]:
        """Capabilities to announce in addition to the names of tasks."""
        return [WITH_DATABASE] if self.database else []

    def served(self, named: Sequence[str]) -> list[str]:
        """Return the queues to serve, for an application that names these queues."""
        requested = self.queues or (DEFAULT_QUEUE,)
        return list(dict.fromkeys(name for queue in requested for name in (named if queue == EVERY_QUEUE else [queue])))

    def unserved(self, named: Sequence[str]) -> list[str]:
        """Return the queues of the application that are not served, if no queues were chosen."""
        return [] if self.queues else [queue for queue in named if queue != DEFAULT_QUEUE]
