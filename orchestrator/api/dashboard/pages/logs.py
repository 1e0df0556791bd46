"""The log of a task or run: the last lines, older lines, search results, and a download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response, StreamingResponse

from orchestrator.api.context import MAX_INT, Api
from orchestrator.api.dashboard.rendering import page, pages
from orchestrator.api.key_scope import RUN, TASK
from orchestrator.api.routes import runs as run_routes
from orchestrator.api.routes import tasks as task_routes
from orchestrator.domain.plain import anchored
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.backend.logs import read_before
from orchestrator.sdk.tasks.logs import LogEntry, LogPage
from orchestrator.terminal_safe import without_styles

routes = pages("/ui")

_LINES, _MORE_LINES = 500, 1_000
"""Lines that a page begins with, and older lines that are loaded at once."""
_LEVELS = ("debug", "info", "warning", "error", "critical")
_DROPPED = "dropped"
_Entry = Annotated[str, Meta(pattern=anchored("[0-9]{1,19}-[0-9]{1,9}"))]


class LogQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which lines to show: the last ones, those before an entry, or those after one."""

    attempt: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    before: _Entry = ""
    after: _Entry = ""
    tail: bool = False
    """If very many lines follow the entry, show only the last ones."""
    text: Annotated[str, Meta(max_length=200)] = ""
    """Show lines that contain this text, ignoring case."""
    level: Literal["", "info", "warning", "error"] = ""
    """Show lines of this level or above."""

    @property
    def filters(self) -> bool:
        return bool(self.text or self.level)

    def matches(self, line: LogEntry) -> bool:
        if self.level and line.level in _LEVELS and _LEVELS.index(line.level) < _LEVELS.index(self.level):
            return False
        return self.text.lower() in without_styles(line.text).lower()


@dataclass(frozen=True, kw_only=True)
class LogShown:
    """A part of a log, for a template."""

    query: LogQuery
    path: str
    """The path of the page of the whole log."""
    is_run: bool
    """Whether the lines are those of all tasks of a run."""
    lines: list[LogEntry] | None
    """The lines; None if they cannot be read now."""
    first: str = ""
    last: str = ""
    """The last entry that was read."""
    earlier: int = 0
    dropped: list[LogEntry] = field(default_factory=list)
    """Entries just before these lines that report dropped lines."""


def last_lines(api: Api, id: UUID, query: LogQuery, *, is_run: bool = False) -> LogShown:
    """Return the lines of a log for a page. Lines of a run are sorted by time."""
    log_part = partial(LogShown, query=query, path=f"/ui/{'runs' if is_run else 'tasks'}/{id}/log", is_run=is_run)
    try:
        if query.after:
            log_page = _reader(api, id, query.attempt, is_run)(query.after)
            lines = [*filter(query.matches, log_page.lines)]
            skipped = lines[:-_MORE_LINES] if query.tail else []
            lines, first, last, earlier = lines[len(skipped) :], "", log_page.last, len(skipped)
        else:
            number = _MORE_LINES if query.before else _LINES
            result = read_before(
                api.backend.connections, id.bytes, query.before, number, query.attempt, query.matches, is_run=is_run
            )
            lines, first, last, earlier, skipped = result
    except OrchestratorError:
        return log_part(lines=None)
    if is_run:
        lines.sort(key=lambda line: line.said_at)
    dropped = [line for line in skipped if line.source == _DROPPED]
    return log_part(lines=lines, first=first, last=last, earlier=earlier, dropped=dropped)


def _reader(api: Api, id: UUID, attempt: int | None, is_run: bool) -> Callable[[str], LogPage]:
    """Return a function that reads a page of a log after an entry."""
    if is_run:
        return partial(api.backend.runs.log, id.bytes)
    return partial(api.backend.tasks.log, id.bytes, attempt=attempt)


@routes.get("/tasks/{id}/log", about=TASK)
def show_log(api: Api, id: UUID, query: LogQuery) -> Response:
    """Show the page of a log. Other pages load lines from it."""
    return page("log.html", task=task_routes.task_answer(api, id).task, run=None, log=last_lines(api, id, query))


@routes.get("/runs/{id}/log", about=RUN)
def show_run_log(api: Api, id: UUID, query: LogQuery) -> Response:
    """Show the log of all tasks of a run."""
    return page("log.html", run=run_routes.find(api, id).run, log=last_lines(api, id, query, is_run=True))


class FileQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The attempt; all attempts by default."""

    attempt: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None


@routes.get("/tasks/{id}/log.txt", about=TASK, is_expensive=True)
def download_log(api: Api, id: UUID, query: FileQuery) -> Response:
    """Download all stored lines as the task wrote them."""
    api.backend.tasks.status(id.bytes)  # raises NotFound if there is no such task
    return _file(id, _reader(api, id, query.attempt, False), "{0.attempt}")


@routes.get("/runs/{id}/log.txt", about=RUN, is_expensive=True)
def download_run_log(api: Api, id: UUID) -> Response:
    """Download all stored lines of all tasks of a run, in the order in which they were stored."""
    api.backend.runs.progress(id.bytes)  # raises NotFound if there is no such run
    return _file(id, _reader(api, id, None, True), "{0.step} {0.task} {0.attempt}")


def _file(id: UUID, read: Callable[[str], LogPage], origin: str) -> Response:
    name = f"attachment; filename={id}.log"
    return StreamingResponse(
        _lines(read, origin), media_type="text/plain; charset=utf-8", headers={"Content-Disposition": name}
    )


def _lines(read: Callable[[str], LogPage], origin: str) -> Iterator[bytes]:
    last = ""
    while (log_page := read(last)).lines:
        yield "".join(
            f"{line.at.isoformat(timespec='milliseconds')} {origin.format(line)} {line.level:<8} {line.text}\n"
            for line in log_page.lines
        ).encode(errors="replace")
        last = log_page.last
