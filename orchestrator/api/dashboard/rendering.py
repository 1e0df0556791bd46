"""Templates made into pages for a visitor. Everything is escaped, and pages contain no scripts or styles."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, RedirectResponse, Response

from orchestrator.api.dashboard import fields, words
from orchestrator.api.endpoints import Endpoint, Routes
from orchestrator.api.problems import Problem
from orchestrator.api.recent import Recent
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.tasks.task import NewTask
from orchestrator.monitoring.trouble import Trouble
from orchestrator.sdk.backend.replica import Replica
from orchestrator.sealing import describe_json
from orchestrator.store import inbox
from orchestrator.terminal_safe import SEQUENCES, terminal_safe

HTML = "text/html"
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {
    file.name: file.read_bytes() for file in (Path(__file__).parent / "static").iterdir() if file.suffix[1:] in TYPES
}
"""Files that pages are made with."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""A form sends its origin to this server only, which checks it."""
_ADDRESSES = re.compile(
    r'(\b(?:href|src|action|formaction|data-live|data-after|data-pulse|data-name-in-path)=")(/ui\b)'
)
"""Where templates have addresses. Nothing that is only shown looks so: its quotation marks are escaped."""


@cache
def version_of(name: str) -> str:
    """Return what names the content of a file, so that a browser may keep it for ever."""
    return hashlib.sha256(FILES[name]).hexdigest()[:12]


def _asset(name: str) -> str:
    return f"/ui/static/{name}?{version_of(name)}"


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("orchestrator.api.dashboard", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["asset"] = _asset
    found.globals["words"] = words
    found.filters.update(words.FILTERS, styled=styled, fields=fields.of_schema)
    return found


def page(template: str, status: int = 200, **values: Any) -> Response:
    """Return a page for the current visit. Sealed values are shown as sealed."""
    text = _environment().get_template(template).render(visit=current.get(), now=words.present(), **values)
    if before := prefix.get():
        text = _ADDRESSES.sub(lambda found: f"{found[1]}{before}{found[2]}", text)
    return HTMLResponse(describe_json(text.encode()), status, headers=_HEADERS)


@dataclass(frozen=True, kw_only=True)
class Action(Endpoint):
    """A route of the API that a form can ask for."""

    said: str = ""
    """The message when it was done."""
    needs: str = ""
    """A field that the form requires, though the route has a default for it."""

    def undone_by(self, path: str) -> str:
        """Return the path of the action that takes this one back, whose form has no fields; empty if there is none."""
        before, _, act = path.rpartition("/")
        return f"{before}/{_OPPOSITE[act]}" if act in _OPPOSITE else ""

    def outcome(self, answer: Any) -> str:
        note = getattr(answer, "note", None)
        if note is not None:
            return f"{note[0].upper()}{note[1:]}."
        if hasattr(answer, "result"):
            return f"The answer: {msgspec.json.encode(answer.result).decode()}"
        return self.said.format(answer=answer)


class Note(msgspec.Struct, frozen=True):
    """The outcome of an action that only pages have."""

    note: str
    to: str = ""
    """The page to go to; where the form was, if empty."""


def page_actions(prefix: str) -> Routes:
    return Routes("dashboard", prefix, HTML, Action)


def pages(prefix: str) -> Routes:
    return Routes("dashboard", prefix, HTML)


def go(to: str) -> Response:
    """Lead to another page of the dashboard."""
    return RedirectResponse(f"{prefix.get()}{to}", 303)


def refusal(problem: Problem, headers: dict[str, str]) -> Response:
    """Return a page that says why there is no other."""
    answer = page("problem.html", problem.status, problem=problem)
    answer.headers.update(headers)
    return answer


_OPPOSITE = {"pause": "resume", "resume": "pause", "acknowledge": "reopen", "snooze": "reopen"}
UNDOING = re.compile(r"/ui/(?:queues|schedules|failures)/[^?#\s]+/(?:pause|resume|reopen)")
"""Paths of actions that a notice offers as undo."""


class Said(NamedTuple):
    """The outcome of the last action, shown on the next page."""

    text: str
    is_error: bool = False
    undo: str = ""
    """The path of the action that takes it back."""
    is_of_filter: bool = False
    """What the address asks for does not fit; its form keeps what was given."""
    page: str = ""
    """The path of the page that says it; those in other tabs do not."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One look at a page."""

    who: str
    scope: Scope
    key_scope: KeyScope
    path: str
    """The page, as its address has it."""
    query: str
    token: str
    """The token that a form sends along."""
    said: Said | None = None
    has_key: bool = False
    """They have logged in with a key, and can log out."""
    check_tasks: Callable[[NewTask], None]
    """Refuses a task for which the quotas of the key leave no room."""
    replica: Replica | None = None
    asked: Callable[[], inbox.Waiting | None] = lambda: None
    """Returns the requests of people that wait for the leader, for somebody who has just done something."""
    outage: Callable[[], Trouble | None] = lambda: None
    """Says why nothing moves; None while something does, and where the page needs no log-in."""
    approvals: Callable[[], str] = str
    """Counts the approvals that wait for a person; nothing if none does, and likewise."""

    @property
    def told_outage(self) -> str:
        """What every page says above all else of an outage; nothing without one, and where its reason is not shown."""
        found = self.outage() if self.sees_all else None
        return "" if found is None else found.message

    @property
    def here(self) -> str:
        """The address of the page itself, to come back to."""
        return f"{self.path}?{self.query}" if self.query else self.path

    def may(self, scope: str) -> bool:
        return self.scope.includes(Scope(scope))

    @property
    def may_act_on_many(self) -> bool:
        """Say whether a list offers bulk actions: not while a filter of it cannot be read, which would leave more."""
        return self.may(Scope.OPERATE) and not (self.said is not None and self.said.is_of_filter)

    @property
    def sees_all(self) -> bool:
        """Say whether the system as a whole is shown."""
        return not self.key_scope.is_bound


current: ContextVar[Visit | None] = ContextVar("orchestrator_visit", default=None)
"""Set while a page is made."""

prefix: ContextVar[str] = ContextVar("orchestrator_prefix", default="")
"""The prefix of all pages in the visitor's browser, which a proxy removes."""


def visitor() -> Visit:
    visit = current.get()
    assert visit is not None, "a page is being made"
    return visit


_FIRST = (
    *("000000", "cd3131", "0f9d58", "b58900", "2472c8", "bc3fbc", "1197b5", "c0c0c0"),
    *("767676", "f14c4c", "23d18b", "e5c04b", "3b8eea", "d670d6", "29b8db", "ffffff"),
)
_LEVELS = (0, 95, 135, 175, 215, 255)


def rules() -> str:
    """Return the style sheet of the colours: each is a variable, which the page mixes with its own text colour."""
    cube = [f"{red:02x}{green:02x}{blue:02x}" for red in _LEVELS for green in _LEVELS for blue in _LEVELS]
    greys = [f"{8 + 10 * step:02x}" * 3 for step in range(24)]
    return "".join(f".n{number}{{--n:#{code}}}" for number, code in enumerate((*_FIRST, *cube, *greys)))


def styled(text: str, sought: str = "") -> Markup:
    """Return a line with its colours, in which a text that is sought is marked; everything is escaped."""
    if not sought and "\x1b" not in text:
        return escape(terminal_safe(text))
    parts, style, at, shown = [], _Style(), 0, 0
    hits = re.finditer(f"(?:{re.escape(sought)})+", SEQUENCES.sub("", text), re.IGNORECASE) if sought else ()
    edges = [edge for hit in hits for edge in hit.span()]
    for found in [*SEQUENCES.finditer(text), None]:
        piece = text[at : found.start() if found else None]
        inside = edges[bisect_right(edges, shown) : bisect_left(edges, shown + len(piece))]
        for start, end in pairwise([shown, *inside, shown + len(piece)]):
            part = style.around(piece[start - shown : end - shown])
            is_hit = part and bisect_right(edges, start) % 2
            parts.append(Markup("<mark>{}</mark>").format(part) if is_hit else part)
        shown += len(piece)
        if found:
            at = found.end()
            style.change(found[1])
    return Markup("").join(parts)


class _Style:
    """The colours in which the next characters are shown."""

    def __init__(self) -> None:
        self.is_bold = self.is_underlined = False
        self.text: int | None = None
        self.ground: int | None = None

    def around(self, text: str) -> Markup:
        found = escape(terminal_safe(text))
        if not text:
            return found
        if self.is_bold:
            found = Markup("<strong>{}</strong>").format(found)
        if self.is_underlined:
            found = Markup("<u>{}</u>").format(found)
        if self.text is not None:
            found = Markup('<span class="fg n{}">{}</span>').format(self.text, found)
        if self.ground is not None:
            found = Markup('<span class="bg n{}">{}</span>').format(self.ground, found)
        return found

    def change(self, codes: str | None) -> None:
        """Apply the numbers of one sequence, if it is a style; those that are not known change nothing."""
        if codes is None:
            return
        numbers = iter([int(code or 0) for code in codes.replace(":", ";").split(";")])
        for code in numbers:
            if code == 0:
                self.is_bold, self.is_underlined, self.text, self.ground = False, False, None, None
            elif code in (1, 22):
                self.is_bold = code == 1
            elif code in (4, 24):
                self.is_underlined = code == 4
            elif code in (39, 49):
                self._set(code - 9, None)
            elif code in (38, 48):
                self._set(code - 8, _extended(numbers))
            elif code % 10 < 8 and code // 10 in (3, 4):
                self._set(code, code % 10)
            elif code % 10 < 8 and code // 10 in (9, 10):
                self._set(code - 60, 8 + code % 10)

    def _set(self, code: int, colour: int | None) -> None:
        if code < 40:
            self.text = colour
        else:
            self.ground = colour


def _extended(numbers: Iterator[int]) -> int | None:
    """Return one of 256 colours; of those in red, green and blue, the nearest in the cube."""
    kind = next(numbers, 0)
    if kind == 2:
        red, green, blue = (round(5 * min(next(numbers, 0), 255) / 255) for _ in range(3))
        return 16 + 36 * red + 6 * green + blue
    return min(next(numbers, 0), 255) if kind == 5 else None


FILES["style.css"] += rules().encode()


_PART = re.compile(r'<(tr|g) ([^>]*)data-key="([^"]*)".*?</\1>', re.DOTALL)
"""Rows of tables and nodes of graphs. None has another one inside."""
_AGE = re.compile(r'(<time [^>]*>|name="since" value=")[^<"]*')
"""Texts that change with the clock, which the reader's page changes by itself; and since when it has a form, which is
when the row with it last changed."""
_KEPT = 600.0
"""Seconds for which it is known what a version of a page has; after that, a page is sent whole."""


def without_known(response: Response, known: str, sent: Recent) -> Response:
    """Return a page without the parts that its version `known` has."""
    if not isinstance(response, HTMLResponse) or response.status_code != 200:
        return response
    text = bytes(response.body).decode()
    version = f'"{_digest(text)}"'
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    headers["ETag"] = version
    if version == known:
        return Response(status_code=304, headers=headers)
    has = sent.get(known, _KEPT, frozenset[str])
    sent.get(version, _KEPT, lambda: frozenset(_digest(part[0]) for part in _PART.finditer(text)))

    def left(part: re.Match[str]) -> str:
        return f'<{part[1]} data-key="{part[3]}" data-same></{part[1]}>' if _digest(part[0]) in has else part[0]

    return HTMLResponse(_PART.sub(left, text) if has else text, headers=headers)


def _digest(text: str) -> str:
    return blake2b(_AGE.sub(r"\1", text).encode(), digest_size=12).hexdigest()
