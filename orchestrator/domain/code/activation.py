"""One turn of a workflow's code: the leader's message to a worker, and the worker's report.

Each activation is an attempt of the run's turn task. At most one is in flight.

    leader                                             worker
      │  Activation(after=0, cached=0, whole history) ──▶  begins or replays, runs until nothing is left to do
      │  ◀── Activated(through=1, commands=[…])             keeps the workflow in memory, under this attempt
      │  applies the batch: marker, records, tasks, timers
      │  … a task ends: a fact is appended …
      │  Activation(after=6, cached=1, facts 7…8) ──────▶  shows the cached workflow the new facts
      │  ◀── Activated(through=8, commands=[…])
      │  Activation(after=12, cached=2, …) ─────────────▶  no longer cached, or in another state
      │  ◀── Activated(missing=True)                        did not run; needs the whole history

A worker uses its cached workflow only if attempt `cached` left it: the last one whose report was applied. An attempt
whose report came too late is not part of the history. An activation without events, only with queries, does not change
the workflow or the attempt under which it is cached. Records may be omitted for a cached workflow, which does not need
them.

**Next turns.** If the code waits only for one task, the leader sends that task to the worker that has the code cached.
When the task succeeds, the worker shows the result to the code at once, as the expected next event, and reports both
together in `Flush.turns`. If another event came first, the leader discards the turn and sends an activation. The worker
then replays the history, because its code has seen an event that is not part of it.

Events too large for one message are stored beside it, in a number of `pages`, each a list of events. If a page is lost,
the worker does not run the code and reports `missing`.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.history import Event
from orchestrator.domain.tasks.task import TaskError

NO_HANDLER = ", which has no handler in the code yet"
"""Appended to the names of updates without a handler in `WaitingPlaces.updates`."""


class Query(msgspec.Struct, frozen=True, array_like=True):
    """A query for the workflow's code, which may read its state but not change it."""

    id: bytes
    name: str
    payload: bytes
    """The arguments, encoded like a task's."""


class QueryResult(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a query: a result or an error."""

    id: bytes
    result: bytes | None = None
    error: TaskError | None = None


class Activation(msgspec.Struct, frozen=True, array_like=True):
    """Show these events to the code of a run, then answer these queries."""

    run_id: bytes
    workflow: str
    version: int
    after: int
    """The events follow this number. 0 if they are the whole history."""
    through: int
    """The number of the last event in the history, whether sent or omitted."""
    events: list[Event]
    cached: int = 0
    """The attempt that left the cached workflow to continue. 0 if the events are the whole history."""
    queries: list[Query] = []
    pages: int = 0
    """The number of pages with the events, if they are not in this message."""
    may_follow: bool = False
    """The leader accepts next turns. Leaders of the previous release do not."""
    tells: bool = False
    """The leader reports outcomes of signals and ends of other runs. Leaders of the previous release do not."""


class Violation(msgspec.Struct, frozen=True, array_like=True):
    """Why the code does not fit its history. The run is stuck, but not failed, until fitting code is deployed."""

    event: int
    """The number of the event where code and history differ."""
    kind: str
    message: str
    """The event in the history and the command of the code."""
    difference: str = ""
    """The surrounding commands of the history and of the code, as a diff."""


class WaitingPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Where the code waits, as displayed. Only its worker knows it; open tasks and timers are in Postgres."""

    places: list[str] = []
    """Where the main function waits, then the first coroutines beside it: `shop.py, line 7, in order: …`."""
    signals: list[str] = []
    """Names of awaited signals."""
    updates: list[str] = []
    """Names of updates without an answer."""
    handlers: list[tuple[str, str, list[str]]] = []
    """Handlers: `query`, `update` or `signal`, the name, and the names of the arguments."""


class Activated(msgspec.Struct, frozen=True, array_like=True, tag="activated"):
    id: bytes
    attempt: int
    duration: float
    through: int = 0
    """The number of the last event that the code was shown, for the marker. Events delivered with or after the one at
    which the code ended are not included."""
    commands: list[Command] = []
    """Commands to apply in one transaction. Empty with `stuck` or `missing`."""
    stuck: Violation | None = None
    missing: bool = False
    """The expected workflow is not cached, or pages are lost. The leader must send the whole history."""
    answers: list[QueryResult] = []
    cached: int = 0
    """The attempt under which the worker now caches the workflow: this one if the code was shown events."""
    waiting: WaitingPlaces | None = None
    """Where the code waits now, if it was shown events."""
    version: int = 0
    """The version of the code that ran this turn. Workers of older releases send 0."""
    awaits: bytes = b""
    """The only task that the code waits for, if it has started nothing else that is open."""
    follows: bytes = b""
    """For a next turn, the task whose success was shown as event `through`."""
    at: float = 0.0
    """For a next turn, the time of that event, in Unix seconds."""
    accepted: list[str] = []
    """For the marker: see `history.ActivationApplied`."""
    refusals: int = -1
    """How many ends of the code in a row were refused, according to its history. Workers of older releases send -1:
    they would order messages as if no end had been refused."""
    holds: bool = False
    """The worker can show messages to code after its side effects (see *Ends* in `domain/code/history.py`)."""


def json_text(finding: Violation | WaitingPlaces, retry_at: float | None = None) -> str:
    """Return a worker's finding about a run as stored JSON: its fields by name."""
    fields = {name: getattr(finding, name) for name in finding.__struct_fields__}
    if retry_at is not None:
        fields["retry_at"] = retry_at
    return msgspec.json.encode(fields).decode()


# -- the delivery of events to workers, limited by memory

PAGE = 1_000_000
"""Bytes of events in one message or page, at most."""
MAX_HISTORY = 1_000_000_000
"""Bytes of a history that can be sent, at most."""
MAX_IN_MESSAGES = 64_000_000
"""Bytes of history in the messages of one tick, at most, because the leader holds them in memory."""
MAX_IN_PAGES = 256_000_000
"""Bytes of undelivered pages, at most, because Redis holds them in memory."""

_BYTES_A_SECOND = 32_000_000
"""The estimated speed at which pages are sent and read."""
_MAX_WAIT = 60.0


class Delivery(Enum):
    """How events are delivered to a worker."""

    MESSAGE = "in the message"
    PAGES = "in pages beside it"
    LATER = "not now"
    NEVER = "not at all"


class HistoryBudget:
    """The bytes of history that one tick may send. While there is room, a history of any size is sent."""

    def __init__(self, in_pages: int) -> None:
        """Start with `in_pages` bytes of undelivered pages."""
        self._in_pages = in_pages
        self._in_messages = 0
        self._waiting = 0

    def delivery(self, size: int) -> Delivery:
        """Return how to deliver a history of this size, and charge it."""
        if size > MAX_HISTORY:
            return Delivery.NEVER
        if size <= PAGE and self._in_messages < MAX_IN_MESSAGES:
            self._in_messages += size
            return Delivery.MESSAGE
        if size > PAGE and self._in_pages < MAX_IN_PAGES:
            self._in_pages += size
            return Delivery.PAGES
        self._waiting += size
        return Delivery.LATER

    @property
    def wait(self) -> float:
        """The estimated seconds until a history that must wait now has room."""
        return min(_MAX_WAIT, 1.0 + self._waiting / _BYTES_A_SECOND)


def history_unreadable(error: Exception) -> Violation:
    """Return the violation that a history cannot be read."""
    return Violation(0, type(error).__name__, f"The history cannot be sent to a worker: {error}")


def history_too_long(size: int) -> Violation:
    """Return the violation that a history is too large."""
    return Violation(
        0,
        "HistoryTooLong",
        f"The history has {size:,} bytes, and at most {MAX_HISTORY:,} can be sent to a worker. "
        f"Let the workflow continue_as_new earlier.",
    )
