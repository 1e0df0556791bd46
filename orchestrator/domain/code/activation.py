"""One turn of a workflow's code: what the leader sends to a worker, and what it reports back.

The run's turn task carries the turns: each activation is an attempt of it, and at most one is out at a time.

    leader                                             worker
      │  Activation(after=0, cached=0, whole history) ──▶  begins or replays, runs until nothing is left to do
      │  ◀── Activated(through=1, commands=[…])             keeps the workflow in memory, under this attempt
      │  applies the batch: mark, records, tasks, timers
      │  … a task ends: a fact is appended …
      │  Activation(after=6, cached=1, facts 7…8) ──────▶  shows the cached workflow the new facts
      │  ◀── Activated(through=8, commands=[…])
      │  Activation(after=12, cached=2, …) ─────────────▶  has it no more, or not in that state
      │  ◀── Activated(missing=True)                        nothing was run; send everything

A worker uses what it has cached only if that was left by attempt `cached`, the last one whose report was applied: what
an attempt did whose report came too late is no part of the history. An activation without events, which only asks
queries, leaves the workflow as it was, and cached under the attempt that left it so. Records may be left out of what is
sent to a cached workflow, which has no use for them.

**Next turns.** If the code waits for one task and for nothing else, the leader sends that task to the worker that has
the code. When it succeeds, the worker shows its result to the code at once, as the event that must come next, and
reports both together: `Flush.turns`. The leader takes the turn if that event has come next indeed; else it drops it and
sends an activation, and the worker replays the history, because its code has seen something that is no part of it.

Events that are too many for one message stand beside it, in so many `pages`, each a list of events in order. If one of
them is gone, nothing was run either: the workflow is missing.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.history import Event
from orchestrator.domain.tasks.task import TaskError

NO_HANDLER = ", for which the code has no handler yet"
"""Follows the name of such an update in `WaitingPlaces.updates`."""


class Query(msgspec.Struct, frozen=True, array_like=True):
    """A question to the workflow's code, which may look at its state but not change it."""

    id: bytes
    name: str
    payload: bytes
    """The arguments, encoded like those of a task."""


class QueryResult(msgspec.Struct, frozen=True, array_like=True):
    """The answer of a query: a result or an error."""

    id: bytes
    result: bytes | None = None
    error: TaskError | None = None


class Activation(msgspec.Struct, frozen=True, array_like=True):
    """Show these events to the run's code, then answer these queries."""

    run_id: bytes
    workflow: str
    version: int
    after: int
    """The events follow this number; 0 means that they are the whole history."""
    through: int
    """The number of the last event there is, whether it was sent or left out."""
    events: list[Event]
    cached: int = 0
    """The attempt that left the cached workflow to which these events are added; 0 where the history is whole."""
    queries: list[Query] = []
    pages: int = 0
    """In how many pages the events stand, if they are not here."""
    may_follow: bool = False
    """The leader takes next turns; one of the previous release does not."""
    tells: bool = False
    """The leader says what became of signals, and how other runs end; one of the previous release does not."""


class Violation(msgspec.Struct, frozen=True, array_like=True):
    """Why the code cannot go on with this history. The run is stuck until code comes that fits, and has not failed."""

    event: int
    """The number of the event at which they part."""
    kind: str
    message: str
    """What history has and what the code did."""
    difference: str = ""
    """The commands of the history and of the code around that place, as a diff."""


class WaitingPlaces(msgspec.Struct, frozen=True, array_like=True):
    """The waiting points of code, which only its worker knows, for people to read; what is open stands in Postgres."""

    places: list[str] = []
    """Where in the code its function waits, and the first of the tasks beside it: `shop.py, line 7, in order: …`."""
    signals: list[str] = []
    """Names of signals that it waits for."""
    updates: list[str] = []
    """Names of updates that have no answer yet."""
    handlers: list[tuple[str, str, list[str]]] = []
    """What it answers: `query`, `update` or `signal`, the name, and the names of the arguments."""


class Activated(msgspec.Struct, frozen=True, array_like=True, tag="activated"):
    id: bytes
    attempt: int
    duration: float
    through: int = 0
    """The number of the last event that the code was shown: the mark to be recorded. Events that came with the one at
    which the code ended, and after it, are beyond it."""
    commands: list[Command] = []
    """To be applied in one transaction; empty together with `stuck` and `missing`."""
    stuck: Violation | None = None
    missing: bool = False
    """The workflow is not cached here as the leader thought, or pages are gone; it has to send the whole history."""
    answers: list[QueryResult] = []
    cached: int = 0
    """The attempt under which the worker keeps the workflow now: this one if the code was shown any events."""
    waiting: WaitingPlaces | None = None
    """Where the code waits now, if it was shown any events."""
    version: int = 0
    """The version of the code that took this turn; 0 where an older worker does not say."""
    awaits: bytes = b""
    """The one task that the code waits for, if it waits for nothing else that it has started."""
    follows: bytes = b""
    """Of a next turn: the task whose success the code was shown as event `through`."""
    at: float = 0.0
    """Of a next turn: the time of that event, in Unix seconds."""
    accepted: list[str] = []
    """For the mark: see `history.ActivationApplied`."""
    refusals: int = -1
    """How many ends of the code were refused in a row, by its history; -1 where an older worker does not say. That
    would show messages as if no end had been refused."""


def json_text(known: Violation | WaitingPlaces, retry_at: float | None = None) -> str:
    """Return what a worker has found out about a run as it is stored: its fields by name."""
    fields = {name: getattr(known, name) for name in known.__struct_fields__}
    if retry_at is not None:
        fields["retry_at"] = retry_at
    return msgspec.json.encode(fields).decode()


# -- how the events that code is to be shown travel, and what has to wait so that they fill no memory

PAGE = 1_000_000
"""Bytes of events that go into one message, or into one page where there are more."""
LARGEST_HISTORY = 1_000_000_000
"""Bytes of a history that can be sent at all."""
MOST_IN_MESSAGES = 64_000_000
"""Bytes that the messages of one tick may hold before others have to wait; the leader has them in memory."""
MOST_IN_PAGES = 256_000_000
"""Bytes of pages that may be out before others have to wait; Redis has them in memory."""

_BYTES_A_SECOND = 32_000_000
"""How fast pages are sent, and read by workers, at a guess."""
_LONGEST_WAIT = 60.0


class Delivery(Enum):
    """How events reach a worker."""

    MESSAGE = "in the message"
    PAGES = "in pages beside it"
    LATER = "not now"
    NEVER = "not at all"


class HistoryBudget:
    """The bytes that one tick may send. A history goes while there is room, however large, so none waits for ever."""

    def __init__(self, in_pages: int) -> None:
        """Begin with so many bytes of pages that are out."""
        self._in_pages = in_pages
        self._in_messages = 0
        self._waiting = 0

    def delivery(self, size: int) -> Delivery:
        """Decide on one more, of so many bytes."""
        if size > LARGEST_HISTORY:
            return Delivery.NEVER
        if size <= PAGE and self._in_messages < MOST_IN_MESSAGES:
            self._in_messages += size
            return Delivery.MESSAGE
        if size > PAGE and self._in_pages < MOST_IN_PAGES:
            self._in_pages += size
            return Delivery.PAGES
        self._waiting += size
        return Delivery.LATER

    @property
    def wait(self) -> float:
        """Return how many seconds the last one that has to wait should: until those before it have gone, roughly."""
        return min(_LONGEST_WAIT, 1.0 + self._waiting / _BYTES_A_SECOND)


def history_unreadable(error: Exception) -> Violation:
    """Say that a history cannot be read."""
    return Violation(0, type(error).__name__, f"The history cannot be sent to a worker: {error}")


def history_too_long(size: int) -> Violation:
    """Say that a history is too large."""
    return Violation(
        0,
        "HistoryTooLong",
        f"The history has {size:,} bytes, and at most {LARGEST_HISTORY:,} can be sent to a worker. "
        f"Let the workflow continue_as_new earlier.",
    )
