"""What the routes work with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.api.desk import Desk
from orchestrator.api.observed import ObservedApi
from orchestrator.api.readiness import Readiness
from orchestrator.api.recent import Past, Recent
from orchestrator.domain import redaction
from orchestrator.domain.redaction import Redaction
from orchestrator.sdk.backend import Backend
from orchestrator.settings import Settings
from orchestrator.store import insights

T = TypeVar("T")
PAGE = 50
LARGEST_PAGE = 1_000
LARGEST = 2**31 - 1
"""Of a whole number, as Postgres keeps it."""


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Some of what matches, and where the rest begins.

    A page looks at some thousand rows: of what is rare, it may have few, or none, and yet not be the last.
    """

    items: list[T]
    next: UUID | None
    """Give it as `cursor` to get the next page; null on the last one."""


class Asked(msgspec.Struct, frozen=True):
    """Something that the leader will do: at once, or when there is one."""

    id: UUID
    asked: str
    """What was asked for."""


class Done(msgspec.Struct, frozen=True):
    """Something that has been done."""

    done: str


class Api:
    """The client's side of everything that is stored, and a connection to look at it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.backend = Backend(settings)
        self.redaction = Redaction(redaction.words(settings.redact))
        """What is not shown of anything."""
        self.observed = ObservedApi(settings)
        self.readiness = Readiness(settings, self.backend.connections)
        self.desk = Desk(self.backend.connections)
        self.recent = Recent()
        """What pages read, which many may have open."""
        self.past = Past()
        """Minutes that are over, counted."""

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a connection to look at something."""
        with self.backend.connections.reading() as connection:
            yield connection

    def redaction_of(self, options: Mapping[str, Any]) -> Redaction:
        """Return what is not shown of a task with these options."""
        return Redaction((*redaction.words(self.settings.redact), *options.get("redact", ())))

    def redaction_of_run(self, run: UUID) -> Redaction:
        """Return what is not shown of what a run's tasks were given and have returned."""
        with self.reading() as connection:
            return self.redaction_of({"redact": insights.redact_of_run(connection, run)})

    def close(self) -> None:
        """Close every connection."""
        self.desk.close()
        self.readiness.close()
        self.backend.close()
        self.observed.system.close()
