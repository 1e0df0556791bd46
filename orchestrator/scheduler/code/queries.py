"""Queries of open runs, from the inbox until the code has answered."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from orchestrator.domain.code.activation import Query
from orchestrator.domain.code.ends import NOTHING
from orchestrator.domain.code.history import Fact
from orchestrator.domain.code.other_runs import settled
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.store.code.expectations import Answered

Asked = Mapping[bytes, Mapping[bytes, Query]]
"""By run and its own id, what is asked of code."""


class Queries:
    """The queries that this leader knows of.

    Only the leader knows of a query, and only in memory: a client without an answer asks again. A query is kept until
    its turn is reported, and is sent again if the turn did not run, for example because the worker had evicted the
    code. A query whose worker died is sent again with a turn in a process of its own; if that dies, the answer is an
    error.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[bytes, Query]] = {}
        """Queries that were not sent yet."""
        self._sent: dict[bytes, tuple[int, dict[bytes, Query]]] = {}
        """Queries that were sent, and the attempt, which is not reported yet."""
        self.askers: dict[bytes, bytes] = {}
        """Queries of runs that are not answered, and the run that asks; it asks again if this is lost."""

    def committed(self, tick: TickResult) -> None:
        """Keep what was asked until the code has heard it."""
        for run, query in tick.code.asked:
            self._waiting.setdefault(run, {})[query.id] = query
        for run in tick.code.reported:
            self._sent.pop(run, None)
        for run in tick.code.passed_on:
            self._waiting.pop(run, None)
        for run, attempt in tick.code.sent.items():
            self._sent[run] = attempt, self._waiting.pop(run, {})

    def split(self, answers: Sequence[Answered]) -> tuple[dict[bytes, list[Fact]], Sequence[Answered]]:
        """Return, by run, the answers to queries of runs; and those to clients."""
        told: dict[bytes, list[Fact]] = {}
        others: list[Answered] = []
        for answer in answers:
            asker = self.askers.pop(answer.id, None)
            if asker is None:
                others.append(answer)
            else:
                told.setdefault(asker, []).append(settled(answer.id, answer.error, answer.result or NOTHING))
        return told, others

    @property
    def has_sent(self) -> bool:
        """Say whether some were sent and are not reported yet."""
        return bool(self._sent)

    def waiting(self, tick: TickResult) -> Asked:
        """Return, by run, what code is asked and has not been sent."""
        if not tick.code.asked:
            return self._waiting
        asked = {run: dict(queries) for run, queries in self._waiting.items()}
        for run, query in tick.code.asked:
            asked.setdefault(run, {})[query.id] = query
        return asked

    def send(self, tick: TickResult, asked: Asked, run: bytes, attempt: int) -> None:
        """Note that a turn is on its way, with what the run is asked."""
        if run in asked:
            tick.code.sent[run] = attempt
        else:
            self.forget(tick, [run])  # what was lost with a worker

    def not_shown(self, tick: TickResult, turns: Iterable[tuple[bytes, int]]) -> None:
        """Ask queries again whose turns did not run: run and attempt."""
        for run, attempt in turns:
            sent = self._sent.get(run)
            if sent is not None and sent[0] == attempt:
                tick.code.reported.append(run)
                tick.code.asked.extend((run, query) for query in sent[1].values())

    def lost(self, tick: TickResult, run: bytes, attempt: int) -> list[bytes]:
        """Return the queries that went down with the process that had nothing but this turn, and ask them no more."""
        sent = self._sent.get(run)
        if sent is None or sent[0] != attempt:
            return []
        tick.code.reported.append(run)
        for query in sent[1]:
            self._waiting.get(run, {}).pop(query, None)  # its client may have asked again
        return list(sent[1])

    def shown(self, tick: TickResult, runs: Sequence[bytes], answered: Container[bytes]) -> list[bytes]:
        """Note that the code of runs has taken a turn; return those that were asked something else meanwhile."""
        self.forget(tick, runs)
        asked = self.waiting(tick)
        if not asked:
            return []
        return [run for run in runs if any(query not in answered for query in asked.get(run, ()))]

    def forget(self, tick: TickResult, runs: Iterable[bytes]) -> None:
        """Keep no longer what runs were sent."""
        if self._sent:
            tick.code.reported.extend(run for run in runs if run in self._sent)
