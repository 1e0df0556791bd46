"""What the code of runs is asked, from when it stands in the inbox until the code has heard it.

Only the leader knows of a query, and only in memory: who gets no answer asks again. A query that was sent is kept until
its turn is reported, and is sent again if nobody took that turn, because the worker had the code no longer in memory
for example. One whose worker died is not sent again: it may be what took the worker down.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from orchestrator.domain.code.activation import Query
from orchestrator.scheduler.news import News

Asked = Mapping[bytes, Mapping[bytes, Query]]
"""By run and its own id, what is asked of code."""


class Queries:
    """What the leader remembers of queries between two ticks."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[bytes, Query]] = {}
        """What no code has been sent."""
        self._sent: dict[bytes, tuple[int, dict[bytes, Query]]] = {}
        """What the code of runs was sent, and in which attempt, which has not been reported."""

    def committed(self, news: News) -> None:
        """Keep what was asked until the code has heard it."""
        for run, query in news.code.asked:
            self._waiting.setdefault(run, {})[query.id] = query
        for run in news.code.reported:
            self._sent.pop(run, None)
        for run in news.code.passed_on:
            self._waiting.pop(run, None)
        for run, attempt in news.code.sent.items():
            self._sent[run] = attempt, self._waiting.pop(run, {})

    def waiting(self, news: News) -> Asked:
        """Return, by run, what code is asked and has not been sent."""
        if not news.code.asked:
            return self._waiting
        asked = {run: dict(queries) for run, queries in self._waiting.items()}
        for run, query in news.code.asked:
            asked.setdefault(run, {})[query.id] = query
        return asked

    def send(self, news: News, asked: Asked, run: bytes, attempt: int) -> None:
        """Note that a turn is on its way, with what the run is asked."""
        if run in asked:
            news.code.sent[run] = attempt
        else:
            self.forget(news, [run])  # what was lost with a worker

    def not_shown(self, news: News, turns: Iterable[tuple[bytes, int]]) -> None:
        """Ask again, in their next turns, what runs were asked in turns that nobody took: run and attempt."""
        for run, attempt in turns:
            sent = self._sent.get(run)
            if sent is not None and sent[0] == attempt:
                news.code.reported.append(run)
                news.code.asked.extend((run, query) for query in sent[1].values())

    def shown(self, news: News, runs: Sequence[bytes], answered: Container[bytes]) -> list[bytes]:
        """Note that the code of runs has taken a turn; return those that were asked something else meanwhile."""
        self.forget(news, runs)
        asked = self.waiting(news)
        if not asked:
            return []
        return [run for run in runs if any(query not in answered for query in asked.get(run, ()))]

    def forget(self, news: News, runs: Iterable[bytes]) -> None:
        """Keep no longer what runs were sent."""
        if self._sent:
            news.code.reported.extend(run for run in runs if run in self._sent)
