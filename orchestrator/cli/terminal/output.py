"""What commands print: JSON for programs, compact tables for people.

All output of commands goes through here, and `terminal_safe` removes what would command the terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from shutil import get_terminal_size
from typing import Any, NoReturn

import click
import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from orchestrator.domain import redaction
from orchestrator.domain.redaction import Redaction
from orchestrator.monitoring.times import counted as counted
from orchestrator.sdk.values import display
from orchestrator.sdk.values.display import as_json
from orchestrator.sealing import describe_json, legible
from orchestrator.settings import load_settings
from orchestrator.terminal_safe import (
    ascii_json,
    one_line,
    terminal_safe,
    terminal_safe_json,
    with_styles,
    without_styles,
)

_COLOURS = {
    "success": "green",
    "live": "green",
    "failed": "red",
    "lost": "red",
    "dead": "red",
    "running": "cyan",
    "dispatched": "cyan",
    "pending": "yellow",
    "draining": "yellow",
    "still": "red",
    "returned": "yellow",
    "unheard": "yellow",
    "stopped": "dim",
    "cancelled": "dim",
    "terminated": "dim",
    "skipped": "dim",
}
_GAP = 2
_READABLE = 20
_LEAST = 4
_ANY_WIDTH = 1_000_000
Cell = str | int | Text | None


def echo(text: str = "", *, err: bool = False, colour: str | None = None, nl: bool = True) -> None:
    """Print text, which may have several lines."""
    shown = without_styles(legible(text))
    click.echo(shown if colour is None else click.style(shown, fg=colour), err=err, nl=nl)


def echo_output(text: str, *, coloured: bool) -> None:
    """Print what a program wrote, with its colours or without; no line but the first begins where records begin."""
    lines = map(with_styles if coloured else without_styles, legible(text).split("\n"))
    click.echo("\n    ".join(lines), color=coloured)


def confirm(question: str, *, yes: bool, err: bool = False) -> None:
    """Ask whether to go on, unless `yes` was said before, and end the command if not."""
    if not yes:
        click.confirm(one_line(question), abort=True, err=err)


def confirm_if_asked(question: str, *, yes: bool) -> None:
    """Ask whether to go on where somebody can answer, and nothing where a script runs the command."""
    confirm(question, yes=yes or not sys.stdin.isatty(), err=True)


def json_text(document: Any) -> str:
    """Return JSON in one line; the keys of a value object are its fields, and times are ISO 8601."""
    return terminal_safe_json(describe_json(msgspec.json.encode(document)).decode())


def echo_json(document: str) -> None:
    """Print a text that is JSON; what the encoding of the output lacks is escaped."""
    shown = terminal_safe_json(document)
    try:
        shown.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        shown = ascii_json(shown)
    echo(shown)


def print_json(document: Any) -> None:
    echo_json(msgspec.json.format(describe_json(msgspec.json.encode(document))).decode())


class _Paper(Console):
    """A console on which data cannot speak to the terminal, wherever it stands."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(terminal_safe(text), style)


def text_column(template: str) -> TextColumn:
    """Return a column of a progress bar; what looks like markup in its words is text."""
    return TextColumn(template, markup=False)


def on_terminal() -> bool:
    """Say whether people read what is printed, in lines of a certain width."""
    return sys.stdout.isatty()


def counting_bar(*more: ProgressColumn) -> Progress:
    """Return a bar of how many are done of how many, with `more` columns behind the numbers."""
    numbers = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*numbers, *more, TimeElapsedColumn(), TimeRemainingColumn(), console=console())


def console() -> Console:
    """Return where people read: as wide as the terminal, or of any width where there is none."""
    width = None if on_terminal() else _ANY_WIDTH
    paper = _Paper(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False, soft_wrap=bool(width))
    if width is None and paper.is_dumb_terminal:  # which rich takes to have 80 columns, whatever it has
        paper.size = ConsoleDimensions(*get_terminal_size())
    return paper


@dataclass(frozen=True)
class _Column:
    """One column of a table."""

    name: str
    cells: Sequence[Text]
    is_number: bool
    """Its cells stand at the right, and are never cut."""
    may_shrink: bool
    """Its cells may be cut short."""
    may_go: bool
    """It may be left out."""

    @cached_property
    def width(self) -> int:
        return max(map(cell_len, (self.name, *map(str, self.cells))))

    @property
    def is_bare(self) -> bool:
        return all(cell.plain in ("", "0") for cell in self.cells)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Cell]], *, empty: str = "") -> None:
    """Print an aligned table, a line to a row, in which a terminal that is narrow has less of each.

    The end of a header says what its column is: `>` of numbers, `…` may be cut short, `?` may be left out, the last
    such first. Where nobody reads it on a terminal, all of it is there.
    """
    lines = [[_cell(value, one_line) for value in row] for row in rows]
    if not lines:
        echo(empty)
        return
    columns = [
        _Column(header.rstrip(">…?"), cells, ">" in header, "…" in header, "?" in header)
        for header, *cells in zip(headers, *lines, strict=True)
    ]
    paper = console()
    fitting, widths = _fit(columns, paper.width + _GAP)
    for cells in zip(*((Text(column.name, style="bold"), *column.cells) for column in fitting), strict=True):
        paper.print(_line(cells, fitting, widths), no_wrap=True, overflow="ellipsis")


def _line(cells: Sequence[Text], columns: Sequence[_Column], widths: Sequence[int]) -> Text:
    """Return a row's cells below those of other rows, with no blanks behind the last."""
    line = Text()
    for place, (cell, column, width) in enumerate(zip(cells, columns, widths, strict=True)):
        cut = cell.copy()
        cut.truncate(width, overflow="ellipsis")
        blanks = " " * (width - cut.cell_len)
        line.append(" " * _GAP if place else "").append(blanks if column.is_number else "").append_text(cut)
        line.append("" if column.is_number else blanks)
    line.rstrip()
    return line


def _fit(columns: Sequence[_Column], room: int) -> tuple[list[_Column], list[int]]:
    """Return the columns for which there is room, and how wide they are.

    First those go that say nothing, then others are cut to a width that can be read; then others go; then all is cut.
    """
    fitting = list(columns)
    bare = [column for column in columns if column.may_go and column.is_bare]
    while bare and sum(_squeezed(fitting, room, room)) > room:
        fitting.remove(bare.pop())
    spare = [column for column in fitting if column.may_go]
    while spare and sum(_squeezed(fitting, room, _READABLE)) > room:
        fitting.remove(spare.pop())
    return fitting, [width - _GAP for width in _squeezed(fitting, room, _LEAST)]


def _squeezed(columns: Sequence[_Column], room: int, least: int) -> list[int]:
    """Return widths with what is between; those that may be cut are, the widest first, down to so many characters."""
    widths = [column.width + _GAP for column in columns]
    candidates = [place for place, column in enumerate(columns) if column.may_shrink]
    while candidates and sum(widths) > room:
        widest = max(candidates, key=lambda place: widths[place])
        if widths[widest] <= least + _GAP:
            break
        widths[widest] -= 1
    return widths


def print_fields(fields: Mapping[str, Cell]) -> None:
    """Print names and values, one to a line, without those that have none."""
    paper = console()
    said = {name: _cell(value, terminal_safe) for name, value in fields.items() if value is not None and value != ""}
    margin = max(map(len, said), default=0) + _GAP
    for name, value in said.items():
        room = max(1, paper.width - margin)
        lines = value.wrap(paper, room, overflow="fold") if on_terminal() else value.split(allow_blank=True)
        for place, line in enumerate(lines):
            whole = Text.assemble(("" if place else name, "bold")).append(" " * (margin - (0 if place else len(name))))
            whole.append_text(line).rstrip()
            paper.print(whole, no_wrap=True, overflow="ignore")


def state(name: str, remark: str = "") -> Text:
    """Return a state in its colour, with a remark behind it."""
    text = Text(name, style=_COLOURS.get(name, ""))
    return text.append(f" ({remark})", style="default") if remark else text


def _cell(content: Cell, clean: Callable[[str], str]) -> Text:
    if isinstance(content, Text):
        content.plain = clean(content.plain)  # one for one, so that the styles stay where they are
        return content
    return Text("" if content is None else clean(without_styles(legible(str(content)))))


__all__ = ["as_json", "call_of", "call_text", "data_text", "hidden", "parse_value", "short_text", "stored_value"]

_LONGEST = 1_000
"""Characters of one value, where it stands among others."""


def hidden(options: Mapping[str, Any] | None = None) -> Redaction:
    """Return what is not shown: anywhere, and of a task with these options."""
    own = (pattern for name in ("redact", "inherited") for pattern in (options or {}).get(name, ()))
    return Redaction((*redaction.words(load_settings().redact), *own))


def call_of(payload: bytes, options: Mapping[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a task, without what nobody is shown."""
    return hidden(options).call_shown(*display.call_of(payload))


def stored_value(data: bytes, options: Mapping[str, Any] | None = None) -> Any:
    """Return the value that is stored, without what nobody is shown."""
    return hidden(options).shown(display.stored_value(data))


def call_text(name: str, payload: bytes, options: Mapping[str, Any] | None = None) -> str:
    """Return an encoded call as one would write it: `resize("a.png", width=200)`."""
    arguments, keywords = call_of(payload, options)
    written: Iterable[str] = (
        *(short_text(argument) for argument in arguments),
        *(f"{keyword}={short_text(argument)}" for keyword, argument in keywords.items()),
    )
    return f"{name}({', '.join(written)})"


def data_text(plain: Any) -> str:
    """Return plain data as JSON or, where JSON has no word for it, as Python writes it."""
    if isinstance(plain, bytes):
        return repr(plain)
    try:
        return terminal_safe_json(
            json.dumps(msgspec.to_builtins(plain, str_keys=True, enc_hook=display.described_value), ensure_ascii=False)
        )
    except (TypeError, ValueError):
        return repr(plain)


def short_text(plain: Any) -> str:
    """Return plain data as a person reads it among other things: of what is long, the beginning."""
    text = data_text(plain)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}… ({len(text):,} characters; all of them: --json)"


def parse_value(word: str) -> Any:
    """Return a word of the command line as JSON if it reads as such, else as a string."""
    try:
        return json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return word


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
