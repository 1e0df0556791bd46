"""Renders templates for a visitor. All values are escaped, and pages contain no inline scripts or styles."""

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
"""The static files of pages."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every page. With this Referrer-Policy, forms send their origin to this server, which checks it."""
_URLS = re.compile(r'(\b(?:href|src|action|formaction|data-live|data-after|data-pulse|data-name-in-path)=")(/ui\b)')
"""Matches URLs in rendered pages. Displayed text never matches, because its quotation marks are escaped."""


@cache
def version_of(name: str) -> str:
    """Return a hash of a file's content, so that browsers may cache it forever."""
    return hashlib.sha256(FILES[name]).hexdigest()[:12]


def _asset(name: str) -> str:
    return f"/ui/static/{name}?{version_of(name)}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("orchestrator.api.dashboard", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset"] = _asset
    environment.globals["words"] = words
    environment.filters.update(words.FILTERS, styled=styled, fields=fields.of_schema)
    return environment


def page(template: str, status: int = 200, **values: Any) -> Response:
    """Render a page for the current visit. Sealed values are shown as sealed."""
    text = _environment().get_template(template).render(visit=current.get(), now=words.present(), **values)
    if path_prefix := prefix.get():
        text = _URLS.sub(lambda match: f"{match[1]}{path_prefix}{match[2]}", text)
    return HTMLResponse(describe_json(text.encode()), status, headers=_HEADERS)


@dataclass(frozen=True, kw_only=True)
class Action(Endpoint):
    """A route of the API that a form calls."""

    notice: str = ""
    needs: str = ""
    """A field that the form requires, although the route has a default for it."""

    def undo_path(self, path: str) -> str:
        """Return the path of the action that undoes this one without form fields; empty if there is none."""
        before, _, act = path.rpartition("/")
        return f"{before}/{_OPPOSITE[act]}" if act in _OPPOSITE else ""

    def outcome(self, answer: Any) -> str:
        note = getattr(answer, "note", None)
        if note is not None:
            return f"{note[0].upper()}{note[1:]}."
        if hasattr(answer, "result"):
            return f"The answer: {msgspec.json.encode(answer.result).decode()}"
        return self.notice.format(answer=answer)


class Note(msgspec.Struct, frozen=True):
    """The outcome of an action that exists only on pages."""

    note: str
    to: str = ""
    """The page to redirect to; if empty, the page with the form."""


def page_actions(prefix: str) -> Routes:
    return Routes("dashboard", prefix, HTML, Action)


def pages(prefix: str) -> Routes:
    return Routes("dashboard", prefix, HTML)


def redirect(to: str) -> Response:
    """Redirect to another page of the dashboard."""
    return RedirectResponse(f"{prefix.get()}{to}", 303)


def problem_page(problem: Problem, headers: dict[str, str]) -> Response:
    """Return an error page."""
    answer = page("problem.html", problem.status, problem=problem)
    answer.headers.update(headers)
    return answer


_OPPOSITE = {"pause": "resume", "resume": "pause", "acknowledge": "reopen", "snooze": "reopen"}
UNDOING = re.compile(r"/ui/(?:queues|schedules|failures)/[^?#\s]+/(?:pause|resume|reopen)")
"""Paths of actions that a notice may offer as undo."""


class Notice(NamedTuple):
    """The outcome of the last action, shown as a notice on the next page."""

    text: str
    is_error: bool = False
    undo: str = ""
    is_about_filter: bool = False
    """The notice is about an invalid filter in the URL; the form keeps the input."""
    page: str = ""
    """The path of the page that shows the notice, so that other tabs do not."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A request for a page."""

    who: str
    scope: Scope
    key_scope: KeyScope
    path: str
    """The path of the page, as in its URL."""
    query: str
    token: str
    """The CSRF token that forms send."""
    notice: Notice | None = None
    has_key: bool = False
    """Whether the visitor logged in with a key, and can log out."""
    check_tasks: Callable[[NewTask], None]
    """Raises if the quotas of the key have no room for a task."""
    replica: Replica | None = None
    pending_requests: Callable[[], inbox.Waiting | None] = lambda: None
    """Returns the user requests that wait for the leader, after the visitor's own action."""
    outage: Callable[[], Trouble | None] = lambda: None
    """Returns the current outage; None without one, and on pages without log-in."""
    approvals: Callable[[], str] = str
    """Returns the number of open approvals as text; empty without any, and on pages without log-in."""

    @property
    def outage_message(self) -> str:
        """The outage message at the top of every page; empty without an outage, and for bound keys."""
        trouble = self.outage() if self.sees_all else None
        return "" if trouble is None else trouble.message

    @property
    def here(self) -> str:
        """The URL of the page itself, for links back."""
        return f"{self.path}?{self.query}" if self.query else self.path

    def may(self, scope: str) -> bool:
        return self.scope.includes(Scope(scope))

    @property
    def may_act_on_many(self) -> bool:
        """Return whether a list offers bulk actions. With an invalid filter they would include more than intended."""
        return self.may(Scope.OPERATE) and not (self.notice is not None and self.notice.is_about_filter)

    @property
    def sees_all(self) -> bool:
        """Return whether the visitor sees the whole system."""
        return not self.key_scope.is_bound


current: ContextVar[Visit | None] = ContextVar("orchestrator_visit", default=None)
"""The current visit, set while a page is rendered."""

prefix: ContextVar[str] = ContextVar("orchestrator_prefix", default="")
"""The prefix of paths in the visitor's browser, which a proxy removes."""


def visitor() -> Visit:
    visit = current.get()
    assert visit is not None, "a page is being made"
    return visit


_BASE_COLORS = (
    *("000000", "cd3131", "0f9d58", "b58900", "2472c8", "bc3fbc", "1197b5", "c0c0c0"),
    *("767676", "f14c4c", "23d18b", "e5c04b", "3b8eea", "d670d6", "29b8db", "ffffff"),
)
_LEVELS = (0, 95, 135, 175, 215, 255)


def rules() -> str:
    """Return the style sheet of terminal colors. Each is a variable, which the page mixes with its text color."""
    cube = [f"{red:02x}{green:02x}{blue:02x}" for red in _LEVELS for green in _LEVELS for blue in _LEVELS]
    greys = [f"{8 + 10 * step:02x}" * 3 for step in range(24)]
    return "".join(f".n{number}{{--n:#{code}}}" for number, code in enumerate((*_BASE_COLORS, *cube, *greys)))


def styled(text: str, search: str = "") -> Markup:
    """Return an escaped line of terminal output with its colors, and with matches of a search marked."""
    if not search and "\x1b" not in text:
        return escape(terminal_safe(text))
    parts, style, at, visible = [], _Style(), 0, 0
    hits = re.finditer(f"(?:{re.escape(search)})+", SEQUENCES.sub("", text), re.IGNORECASE) if search else ()
    edges = [edge for hit in hits for edge in hit.span()]
    for sequence in [*SEQUENCES.finditer(text), None]:
        piece = text[at : sequence.start() if sequence else None]
        inside = edges[bisect_right(edges, visible) : bisect_left(edges, visible + len(piece))]
        for start, end in pairwise([visible, *inside, visible + len(piece)]):
            part = style.around(piece[start - visible : end - visible])
            is_hit = part and bisect_right(edges, start) % 2
            parts.append(Markup("<mark>{}</mark>").format(part) if is_hit else part)
        visible += len(piece)
        if sequence:
            at = sequence.end()
            style.change(sequence[1])
    return Markup("").join(parts)


class _Style:
    """The terminal style of the next characters."""

    def __init__(self) -> None:
        self.is_bold = self.is_underlined = False
        self.text: int | None = None
        self.ground: int | None = None

    def around(self, text: str) -> Markup:
        markup = escape(terminal_safe(text))
        if not text:
            return markup
        if self.is_bold:
            markup = Markup("<strong>{}</strong>").format(markup)
        if self.is_underlined:
            markup = Markup("<u>{}</u>").format(markup)
        if self.text is not None:
            markup = Markup('<span class="fg n{}">{}</span>').format(self.text, markup)
        if self.ground is not None:
            markup = Markup('<span class="bg n{}">{}</span>').format(self.ground, markup)
        return markup

    def change(self, codes: str | None) -> None:
        """Apply the codes of one style sequence; unknown codes are ignored."""
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
                self._set(code - 8, _extended_color(numbers))
            elif code % 10 < 8 and code // 10 in (3, 4):
                self._set(code, code % 10)
            elif code % 10 < 8 and code // 10 in (9, 10):
                self._set(code - 60, 8 + code % 10)

    def _set(self, code: int, color: int | None) -> None:
        if code < 40:
            self.text = color
        else:
            self.ground = color


def _extended_color(numbers: Iterator[int]) -> int | None:
    """Return the index of an extended color; an RGB color is mapped to the nearest of the color cube."""
    kind = next(numbers, 0)
    if kind == 2:
        red, green, blue = (round(5 * min(next(numbers, 0), 255) / 255) for _ in range(3))
        return 16 + 36 * red + 6 * green + blue
    return min(next(numbers, 0), 255) if kind == 5 else None


FILES["style.css"] += rules().encode()


_REUSABLE_PART = re.compile(r'<(tr|g) ([^>]*)data-key="([^"]*)".*?</\1>', re.DOTALL)
"""Matches rows of tables and nodes of graphs, which are never nested."""
_CLOCK_TEXT = re.compile(r'(<time [^>]*>|name="since" value=")[^<"]*')
"""Matches texts that change with the clock, which the page's script updates itself, and the time of a form, which is
updated when its row changes."""
_KNOWN_TTL = 600.0
"""Seconds for which the parts of a sent version are remembered; after that, pages are sent in full."""


def without_known_parts(response: Response, known: str, sent: Recent) -> Response:
    """Return a page without the parts that the client's version `known` has."""
    if not isinstance(response, HTMLResponse) or response.status_code != 200:
        return response
    text = bytes(response.body).decode()
    version = f'"{_digest(text)}"'
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    headers["ETag"] = version
    if version == known:
        return Response(status_code=304, headers=headers)
    known_parts = sent.get(known, _KNOWN_TTL, frozenset[str])
    sent.get(version, _KNOWN_TTL, lambda: frozenset(_digest(part[0]) for part in _REUSABLE_PART.finditer(text)))

    def shortened(part: re.Match[str]) -> str:
        return f'<{part[1]} data-key="{part[3]}" data-same></{part[1]}>' if _digest(part[0]) in known_parts else part[0]

    return HTMLResponse(_REUSABLE_PART.sub(shortened, text) if known_parts else text, headers=headers)


def _digest(text: str) -> str:
    return blake2b(_CLOCK_TEXT.sub(r"\1", text).encode(), digest_size=12).hexdigest()
