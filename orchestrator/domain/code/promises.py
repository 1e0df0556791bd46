"""Promises that are settled before the code waits for them.

Who resolves or rejects a promise need not know how far the code has come. Of a name that the code has not waited for
yet, the first resolution is kept, and becomes known to the code as soon as it makes the promise. Who comes second is
told so, as is who comes when a promise of that name was settled or given up, and no other is open. Who comes when the
code has given it up, and the leader does not know that yet, is early for the next one of the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from orchestrator.domain.code import history
from orchestrator.domain.code.history import PromiseSettled
from orchestrator.domain.tasks.task import TaskError


class Resolution(NamedTuple):
    """What somebody said of a promise, by its name: a value or an error."""

    name: str
    value: bytes | None = None
    error: TaskError | None = None

    def of(self, promise: bytes) -> PromiseSettled:
        """Return what the code learns, by the id that it knows the promise by."""
        if self.error is not None:
            return history.PromiseRejected(promise, self.error)
        return history.PromiseResolved(promise, self.value or b"\xc0")


def resolutions(settled: Sequence[PromiseSettled], created: Iterable[history.PromiseCreated]) -> list[Resolution]:
    """Return by name what became of promises, given how they were created."""
    names = {promise.id: promise.name for promise in created}
    return [
        Resolution(names[fact.id], fact.value)
        if isinstance(fact, history.PromiseResolved)
        else Resolution(names[fact.id], error=fact.error)
        for fact in settled
    ]
