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
    """Where the application is: `module:app`."""
    queues: tuple[str, ...] = ()
    """The queues to serve, of which `*` stands for every one that the application names; none: `default`."""
    processes: int = 1
    concurrency: int = 10
    """Tasks that one process runs at once."""
    allow: tuple[str, ...] = ()
    """Modules, files and folders whose plain functions may be run as `module:function` or `file.py:function`."""
    commands: tuple[str, ...] = ()
    """Programs that the executor `process` may run; `*` in one stands for any text."""
    executions: int = 1_000
    """Executions that one process watches at once."""
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

    @property
    def means(self) -> list[str]:
        """Names to announce beside those of tasks, because some tasks need them."""
        return [WITH_DATABASE] if self.database else []

    def served(self, named: Sequence[str]) -> list[str]:
        """Return the queues to serve, for an application that names these."""
        given = self.queues or (DEFAULT_QUEUE,)
        return list(dict.fromkeys(queue for one in given for queue in (named if one == EVERY_QUEUE else [one])))

    def unserved(self, named: Sequence[str]) -> list[str]:
        """Return those of an application's queues that are not served although none were chosen."""
        return [] if self.queues else [queue for queue in named if queue != DEFAULT_QUEUE]
