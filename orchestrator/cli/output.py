"""What commands print: JSON for programs, compact tables for people.

The one door to the terminal: whatever commands show goes through here, and `harmless` takes out what would command it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import click
import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from orchestrator.harmless import harmless, harmless_json, one_line

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
    "unheard": "yellow",
    "stopped": "dim",
    "cancelled": "dim",
    "skipped": "dim",
}
_GAP = 2
_NARROW = 8
Cell = str | int | Text | None


def echo(text: str = "", *, err: bool = False, colour: str | None = None, nl: bool = True) -> None:
    """Print text, which may have several lines."""
    shown = harmless(text)
    click.echo(shown if colour is None else click.style(shown, fg=colour), err=err, nl=nl)


def confirm(question: str, *, err: bool = False) -> None:
    """Ask whether to go on, and end the command if not."""
    click.confirm(one_line(question), abort=True, err=err)


def json_text(document: Any) -> str:
    """Return JSON in one line; the keys of a value object are its fields, and times are ISO 8601."""
    return harmless_json(msgspec.json.encode(document).decode())


def print_json(document: Any) -> None:
    """Print one JSON document for people and programs."""
    echo(harmless_json(msgspec.json.format(msgspec.json.encode(document)).decode()))


class _Paper(Console):
    """A console on which data cannot speak to the terminal, wherever it stands."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(harmless(text), style)


def text_column(template: str) -> TextColumn:
    """Return a column of a progress bar; what looks like markup in its words is text."""
    return TextColumn(template, markup=False)


def console() -> Console:
    """Return where people read: as wide as the terminal, or of any width where there is none."""
    width = None if sys.stdout.isatty() else 10_000
    return _Paper(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False, soft_wrap=width is not None)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Cell]], *, empty: str = "") -> None:
    """Print an aligned table. A header that ends in `>` is of numbers, one that ends in `…` may be cut short."""
    lines = [[_cell(value, one_line) for value in row] for row in rows]
    if not lines:
        echo(empty)
        return
    names = [header.rstrip(">…") for header in headers]
    widths = [max(map(cell_len, (name, *map(str, column)))) for name, *column in zip(names, *lines, strict=True)]
    paper = console()
    _squeeze(widths, [header.endswith("…") for header in headers], paper.width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name, header, width in zip(names, headers, widths, strict=True):
        justify: Literal["left", "right"] = "right" if header.endswith(">") else "left"
        table.add_column(name, justify=justify, width=width, no_wrap=True, overflow="ellipsis")
    for line in lines:
        table.add_row(*line)
    paper.width = max(paper.width, sum(widths) + _GAP * len(widths))  # then the terminal wraps, and nothing is lost
    paper.print(table)


def _squeeze(widths: list[int], flexible: Sequence[bool], width: int) -> None:
    """Make columns that may be cut short narrower, the widest first, until the table fits or they are very narrow."""
    candidates = [place for place, may_shrink in enumerate(flexible) if may_shrink]
    while candidates and sum(widths) + _GAP * (len(widths) - 1) > width:
        widest = max(candidates, key=lambda place: widths[place])
        if widths[widest] <= _NARROW:
            return
        widths[widest] -= 1


def print_fields(fields: Mapping[str, Cell]) -> None:
    """Print names and values, one to a line, without those that have none."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if value is not None and value != "":
            table.add_row(name, _cell(value, harmless))
    console().print(table)


def state(name: str, remark: str = "") -> Text:
    """Return a state in its colour, with a remark behind it."""
    text = Text(name, style=_COLOURS.get(name, ""))
    return text.append(f" ({remark})", style="default") if remark else text


def _cell(content: Cell, clean: Callable[[str], str]) -> Text:
    if isinstance(content, Text):
        content.plain = clean(content.plain)  # one for one, so that the styles stay where they are
        return content
    return Text("" if content is None else clean(str(content)))
