"""Processes that have ended: their ends, and the reports of what they held, until Redis has taken them."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.transport.codec import encode
from orchestrator.transport.worker import WorkerStreams


class EndedProcesses:
    """Signs processes off, and reports what they held; while Redis is away, both wait."""

    def __init__(self, streams: WorkerStreams) -> None:
        self._streams = streams
        self._gone: dict[str, bool] = {}
        """Ended processes that are not reported to the leader yet, and whether they ended in good order."""
        self._reports: list[Flush] = []

    def add(self, worker: str, reports: Sequence[Report], *, in_order: bool) -> None:
        """Note that a process has ended."""
        self._gone[worker] = in_order
        if reports:
            self._reports.append(Flush(worker, list(reports)))

    @property
    def has_reports(self) -> bool:
        """Say whether there are reports that Redis has not taken yet."""
        return bool(self._reports)

    def report(self) -> None:
        """Report as far as Redis takes it."""
        if self._gone:
            self._streams.leave(list(self._gone), [worker for worker, in_order in self._gone.items() if in_order])
            self._gone = {}
        while self._reports:
            generation = self._streams.generation()
            if generation is None or self._streams.flush(generation, encode(self._reports[0]), {}).entry is None:
                return
            self._reports.pop(0)
