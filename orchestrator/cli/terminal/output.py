"""Output of commands: JSON for programs, compact tables for people.

All output passes through this module, where `terminal_safe` removes terminal control sequences.
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
_READABLE_WIDTH = 20
_MIN_WIDTH = 4
_UNLIMITED_WIDTH = 1_000_000
Cell = str | int | Text | None


def echo(text: str = "", *, err: bool = False, colour: str | None = None, nl: bool = True) -> None:
    """Print text, which may have several lines."""
    cleaned = without_styles(legible(text))
    click.echo(cleaned if colour is None else click.style(cleaned, fg=colour), err=err, nl=nl)


def echo_output(text: str, *, coloured: bool) -> None:
    """Print a task's output, with or without its colors; indent continuation lines, so none looks like a record."""
    lines = map(with_styles if coloured else without_styles, legible(text).split("\n"))
    click.echo("\n    ".join(lines), color=coloured)


def confirm(question: str, *, yes: bool, err: bool = False) -> None:
    """Ask for confirmation unless `yes` is set; abort the command if it is denied."""
    if not yes:
        click.confirm(one_line(question), abort=True, err=err)


def confirm_if_asked(question: str, *, yes: bool) -> None:
    """Ask for confirmation if stdin is a terminal; scripts are not asked."""
    confirm(question, yes=yes or not sys.stdin.isatty(), err=True)


def json_text(document: Any) -> str:
    """Return one line of JSON. Value objects become objects of their fields, times ISO 8601."""
    return terminal_safe_json(describe_json(msgspec.json.encode(document)).decode())


def echo_json(document: str) -> None:
    """Print JSON text; characters that the output's encoding lacks are escaped."""
    text = terminal_safe_json(document)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        text = ascii_json(text)
    echo(text)


def print_json(document: Any) -> None:
    echo_json(msgspec.json.format(describe_json(msgspec.json.encode(document))).decode())


class _SafeConsole(Console):
    """A rich console that removes terminal control sequences from all data."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(terminal_safe(text), style)


def text_column(template: str) -> TextColumn:
    """Return a progress bar column that does not interpret its text as markup."""
    return TextColumn(template, markup=False)


def on_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


def counting_bar(*more: ProgressColumn) -> Progress:
    """Return a progress bar with "n/total", followed by the `more` columns."""
    numbers = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*numbers, *more, TimeElapsedColumn(), TimeRemainingColumn(), console=console())


def console() -> Console:
    """Return a console for stdout, as wide as the terminal; of unlimited width if stdout is no terminal."""
    width = None if on_terminal() else _UNLIMITED_WIDTH
    out = _SafeConsole(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False, soft_wrap=bool(width))
    if width is None and out.is_dumb_terminal:  # rich assumes 80 columns for a dumb terminal
        out.size = ConsoleDimensions(*get_terminal_size())
    return out


@dataclass(frozen=True)
class _Column:
    name: str
    cells: Sequence[Text]
    is_number: bool
    """Right-aligned, and never truncated."""
    may_shrink: bool
    """The cells may be truncated."""
    may_be_omitted: bool
    """The column may be omitted."""

    @cached_property
    def width(self) -> int:
        return max(map(cell_len, (self.name, *map(str, self.cells))))

    @property
    def is_empty(self) -> bool:
        return all(cell.plain in ("", "0") for cell in self.cells)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Cell]], *, empty: str = "") -> None:
    """Print an aligned table, one line per row; on a narrow terminal, with fewer and narrower columns.

    A header ends with the column's flags: `>` numbers, `…` may be truncated, `?` may be omitted (the last such column
    first).
    """
    lines = [[_cell(value, one_line) for value in row] for row in rows]
    if not lines:
        echo(empty)
        return
    columns = [
        _Column(header.rstrip(">…?"), cells, ">" in header, "…" in header, "?" in header)
        for header, *cells in zip(headers, *lines, strict=True)
    ]
    out = console()
    fitting, widths = _fit(columns, out.width + _GAP)
    for cells in zip(*((Text(column.name, style="bold"), *column.cells) for column in fitting), strict=True):
        out.print(_line(cells, fitting, widths), no_wrap=True, overflow="ellipsis")


def _line(cells: Sequence[Text], columns: Sequence[_Column], widths: Sequence[int]) -> Text:
    """Return one table row, with cells padded to the column widths and no trailing blanks."""
    line = Text()
    for index, (cell, column, width) in enumerate(zip(cells, columns, widths, strict=True)):
        truncated = cell.copy()
        truncated.truncate(width, overflow="ellipsis")
        blanks = " " * (width - truncated.cell_len)
        line.append(" " * _GAP if index else "").append(blanks if column.is_number else "").append_text(truncated)
        line.append("" if column.is_number else blanks)
    line.rstrip()
    return line


def _fit(columns: Sequence[_Column], room: int) -> tuple[list[_Column], list[int]]:
    """Return the columns that fit, with their widths.

    The order: omit empty optional columns, truncate to a readable width, omit other optional columns, truncate more.
    """
    fitting = list(columns)
    empty = [column for column in columns if column.may_be_omitted and column.is_empty]
    while empty and sum(_shrunk_widths(fitting, room, room)) > room:
        fitting.remove(empty.pop())
    optional = [column for column in fitting if column.may_be_omitted]
    while optional and sum(_shrunk_widths(fitting, room, _READABLE_WIDTH)) > room:
        fitting.remove(optional.pop())
    return fitting, [width - _GAP for width in _shrunk_widths(fitting, room, _MIN_WIDTH)]


def _shrunk_widths(columns: Sequence[_Column], room: int, least: int) -> list[int]:
    """Return column widths including the gap. Shrinkable columns lose width, the widest first, down to `least`."""
    widths = [column.width + _GAP for column in columns]
    candidates = [index for index, column in enumerate(columns) if column.may_shrink]
    while candidates and sum(widths) > room:
        widest = max(candidates, key=lambda index: widths[index])
        if widths[widest] <= least + _GAP:
            break
        widths[widest] -= 1
    return widths


def print_fields(fields: Mapping[str, Cell]) -> None:
    """Print names and values, one per line; empty values are omitted."""
    out = console()
    cells = {name: _cell(value, terminal_safe) for name, value in fields.items() if value is not None and value != ""}
    margin = max(map(len, cells), default=0) + _GAP
    for name, value in cells.items():
        room = max(1, out.width - margin)
        lines = value.wrap(out, room, overflow="fold") if on_terminal() else value.split(allow_blank=True)
        for index, line in enumerate(lines):
            row = Text.assemble(("" if index else name, "bold")).append(" " * (margin - (0 if index else len(name))))
            row.append_text(line).rstrip()
            out.print(row, no_wrap=True, overflow="ignore")


def state(name: str, remark: str = "") -> Text:
    """Return a state's name in its color, followed by a remark in parentheses."""
    text = Text(name, style=_COLOURS.get(name, ""))
    return text.append(f" ({remark})", style="default") if remark else text


def _cell(content: Cell, clean: Callable[[str], str]) -> Text:
    if isinstance(content, Text):
        content.plain = clean(content.plain)  # `clean` keeps the length, so the style ranges stay valid
        return content
    return Text("" if content is None else clean(without_styles(legible(str(content)))))


__all__ = ["as_json", "call_of", "call_text", "data_text", "hidden", "parse_value", "short_text", "stored_value"]

_MAX_VALUE_LENGTH = 1_000
"""Characters printed of one value in a list, at most."""


def hidden(options: Mapping[str, Any] | None = None) -> Redaction:
    """Return the redaction of the settings, plus that of a task with these options."""
    own = (pattern for name in ("redact", "inherited") for pattern in (options or {}).get(name, ()))
    return Redaction((*redaction.split_patterns(load_settings().redact), *own))


def call_of(payload: bytes, options: Mapping[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a task, redacted."""
    return hidden(options).redacted_call(*display.call_of(payload))


def stored_value(data: bytes, options: Mapping[str, Any] | None = None) -> Any:
    """Return a stored value, redacted."""
    return hidden(options).redacted(display.stored_value(data))


def call_text(name: str, payload: bytes, options: Mapping[str, Any] | None = None) -> str:
    """Return an encoded call as Python code, redacted: `resize("a.png", width=200)`."""
    arguments, keywords = call_of(payload, options)
    written: Iterable[str] = (
        *(short_text(argument) for argument in arguments),
        *(f"{keyword}={short_text(argument)}" for keyword, argument in keywords.items()),
    )
    return f"{name}({', '.join(written)})"


def data_text(plain: Any) -> str:
    """Return plain data as JSON, or as its Python `repr` if JSON cannot express it."""
    if isinstance(plain, bytes):
        return repr(plain)
    try:
        return terminal_safe_json(
            json.dumps(msgspec.to_builtins(plain, str_keys=True, enc_hook=display.described_value), ensure_ascii=False)
        )
    except (TypeError, ValueError):
        return repr(plain)


def short_text(plain: Any) -> str:
    """Return plain data as text, truncated to `_MAX_VALUE_LENGTH` characters."""
    text = data_text(plain)
    if len(text) <= _MAX_VALUE_LENGTH:
        return text
    return f"{text[:_MAX_VALUE_LENGTH]}… ({len(text):,} characters; all of them: --json)"


def parse_value(word: str) -> Any:
    """Parse a command-line argument as JSON; return it as a string if it is not JSON."""
    try:
        return json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return word


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
