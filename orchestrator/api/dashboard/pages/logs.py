"""The log of a task: its last lines, older ones, those that fit a search, and all of it as a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response, StreamingResponse

from orchestrator.api.context import LARGEST, Api
from orchestrator.api.dashboard.rendering import page, pages
from orchestrator.api.key_scope import TASK
from orchestrator.api.routes import tasks as task_routes
from orchestrator.domain.plain import whole
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.backend.logs import read_before
from orchestrator.sdk.tasks.logs import LogEntry

routes = pages("/ui/tasks")

_LINES, _MORE_LINES = 500, 1_000
"""Lines that a page begins with, and that are added when older ones are asked for."""
_LEVELS = ("debug", "info", "warning", "error", "critical")
_DROPPED = "dropped"
_Entry = Annotated[str, Meta(pattern=whole("[0-9]{1,19}-[0-9]{1,9}"))]


class LogQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which lines: the last ones, those before an entry, or those after one."""

    attempt: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None
    before: _Entry = ""
    after: _Entry = ""
    tail: bool = False
    """Of very many after one, only the last ones."""
    text: Annotated[str, Meta(max_length=200)] = ""
    """With this in it, in any case."""
    level: Literal["", "info", "warning", "error"] = ""
    """Of this level or above."""

    @property
    def filters(self) -> bool:
        return bool(self.text or self.level)

    def fits(self, line: LogEntry) -> bool:
        if self.level and line.level in _LEVELS and _LEVELS.index(line.level) < _LEVELS.index(self.level):
            return False
        return self.text.lower() in line.text.lower()


@dataclass(frozen=True, kw_only=True)
class LogShown:
    """A part of a log."""

    query: LogQuery
    lines: list[LogEntry] | None
    """None if they cannot be read now."""
    first: str = ""
    last: str = ""
    """The last line that was looked at."""
    earlier: int = 0
    dropped: list[LogEntry] = field(default_factory=list)
    """What says that lines are missing, just before these."""


def last_lines(api: Api, id: UUID, query: LogQuery) -> LogShown:
    connections, task = api.backend.connections, id.bytes
    try:
        if query.after:
            found = api.backend.tasks.log(task, query.after, attempt=query.attempt)
            lines = [*filter(query.fits, found.lines)]
            left = lines[:-_MORE_LINES] if query.tail else []
            dropped = [line for line in left if line.source == _DROPPED]
            return LogShown(query=query, lines=lines[len(left) :], last=found.last, earlier=len(left), dropped=dropped)
        number = _MORE_LINES if query.before else _LINES
        part = read_before(connections, task, query.before, number, query.attempt, query.fits)
    except OrchestratorError:
        return LogShown(query=query, lines=None)
    return LogShown(
        query=query,
        lines=part.lines,
        first=part.first,
        last=part.last,
        earlier=part.earlier,
        dropped=[line for line in part.left_out if line.source == _DROPPED],
    )


@routes.get("/{id}/log", about=TASK)
def show_log(api: Api, id: UUID, query: LogQuery) -> Response:
    """Show the log alone; a page that has some of it adds what this one has."""
    return page("log.html", task=task_routes.shown_task(api, id).task, log=last_lines(api, id, query))


class FileQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of which attempt; of all, if none is named."""

    attempt: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None


@routes.get("/{id}/log.txt", about=TASK, is_expensive=True)
def download_log(api: Api, id: UUID, query: FileQuery) -> Response:
    """Send all lines that are kept, as the task wrote them."""
    api.backend.tasks.status(id.bytes)  # there is such a task
    name = f"attachment; filename={id}.log"
    return StreamingResponse(
        _file(api, id, query.attempt), media_type="text/plain; charset=utf-8", headers={"Content-Disposition": name}
    )


def _file(api: Api, id: UUID, attempt: int | None) -> Iterator[bytes]:
    last = ""
    while (found := api.backend.tasks.log(id.bytes, last, attempt=attempt)).lines:
        yield "".join(
            f"{line.at.isoformat(timespec='milliseconds')} {line.attempt} {line.level:<8} {line.text}\n"
            for line in found.lines
        ).encode(errors="replace")
        last = found.last
