"""Queries of open runs, from the inbox until the code has answered."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from orchestrator.domain.code.activation import Query
from orchestrator.domain.code.ends import ENCODED_NONE
from orchestrator.domain.code.history import Fact
from orchestrator.domain.code.other_runs import settled
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.store.code.expectations import PromiseAnswer

QueriesByRun = Mapping[bytes, Mapping[bytes, Query]]
"""Pending queries, by run and query id."""


class Queries:
    """The queries that this leader knows of, in memory only: a client without an answer asks again.

    A query is kept until its turn is reported, and sent again if the turn did not run, for example because the worker
    had evicted the code. A query whose worker died is sent again with a turn in a process of its own; if that dies, the
    answer is an error.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[bytes, Query]] = {}
        """Queries that have not been sent."""
        self._sent: dict[bytes, tuple[int, dict[bytes, Query]]] = {}
        """Queries that were sent, with the attempt, and not reported yet."""
        self.askers: dict[bytes, bytes] = {}
        """The asking run of each unanswered query by a run. If this is lost, the run asks again."""

    def committed(self, tick: TickResult) -> None:
        for run, query in tick.code.queries:
            self._waiting.setdefault(run, {})[query.id] = query
        for run in tick.code.reported:
            self._sent.pop(run, None)
        for run in tick.code.forwarded:
            self._waiting.pop(run, None)
        for run, attempt in tick.code.sent.items():
            self._sent[run] = attempt, self._waiting.pop(run, {})

    def split(self, answers: Sequence[PromiseAnswer]) -> tuple[dict[bytes, list[Fact]], Sequence[PromiseAnswer]]:
        """Split answers into facts for asking runs, and answers for clients."""
        facts: dict[bytes, list[Fact]] = {}
        for_clients: list[PromiseAnswer] = []
        for answer in answers:
            asker = self.askers.pop(answer.id, None)
            if asker is None:
                for_clients.append(answer)
            else:
                facts.setdefault(asker, []).append(settled(answer.id, answer.error, answer.result or ENCODED_NONE))
        return facts, for_clients

    @property
    def has_sent(self) -> bool:
        """Return whether queries were sent and not reported yet."""
        return bool(self._sent)

    def waiting(self, tick: TickResult) -> QueriesByRun:
        """Return the queries that have not been sent, by run."""
        if not tick.code.queries:
            return self._waiting
        queries_by_run = {run: dict(queries) for run, queries in self._waiting.items()}
        for run, query in tick.code.queries:
            queries_by_run.setdefault(run, {})[query.id] = query
        return queries_by_run

    def send(self, tick: TickResult, queries_by_run: QueriesByRun, run: bytes, attempt: int) -> None:
        """Note that a turn is being sent, with the queries for its run."""
        if run in queries_by_run:
            tick.code.sent[run] = attempt
        else:
            self.forget(tick, [run])  # these were lost with a worker

    def requeue(self, tick: TickResult, turns: Iterable[tuple[bytes, int]]) -> None:
        """Queue the queries of turns that did not run, each given as run and attempt."""
        for run, attempt in turns:
            sent = self._sent.get(run)
            if sent is not None and sent[0] == attempt:
                tick.code.reported.append(run)
                tick.code.queries.extend((run, query) for query in sent[1].values())

    def lost(self, tick: TickResult, run: bytes, attempt: int) -> list[bytes]:
        """Drop and return the queries sent with a turn whose own process died."""
        sent = self._sent.get(run)
        if sent is None or sent[0] != attempt:
            return []
        tick.code.reported.append(run)
        for query in sent[1]:
            self._waiting.get(run, {}).pop(query, None)  # the client may have asked again
        return list(sent[1])

    def turn_taken(self, tick: TickResult, runs: Sequence[bytes], answered: Container[bytes]) -> list[bytes]:
        """Note that the code of runs has taken a turn. Return the runs with newer queries."""
        self.forget(tick, runs)
        queries_by_run = self.waiting(tick)
        if not queries_by_run:
            return []
        return [run for run in runs if any(query not in answered for query in queries_by_run.get(run, ()))]

    def forget(self, tick: TickResult, runs: Iterable[bytes]) -> None:
        """Forget the queries sent to runs."""
        if self._sent:
            tick.code.reported.extend(run for run in runs if run in self._sent)
