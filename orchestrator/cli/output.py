"""What commands print: JSON for programs, compact tables for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import click
import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def print_json(document: Any) -> None:
    """Print one JSON document; the keys of a value object are its fields, and times are ISO 8601."""
    click.echo(msgspec.json.format(msgspec.json.encode(document)).decode())


def console() -> Console:
    """Return where people read: as wide as the terminal, or of any width where there is none."""
    width = None if sys.stdout.isatty() else 10_000
    return Console(
        file=sys.stdout, width=width, markup=False, highlight=False, emoji=False, soft_wrap=width is not None
    )


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Cell]], *, empty: str = "") -> None:
    """Print an aligned table. A header that ends in `>` is of numbers, one that ends in `…` may be cut short."""
    lines = [[_cell(value) for value in row] for row in rows]
    if not lines:
        click.echo(empty)
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
            table.add_row(name, _cell(value))
    console().print(table)


def state(name: str, remark: str = "") -> Text:
    """Return a state in its colour, with a remark behind it."""
    text = Text(name, style=_COLOURS.get(name, ""))
    return text.append(f" ({remark})", style="default") if remark else text


def _cell(content: Cell) -> Text:
    if isinstance(content, Text):
        return content
    return Text("" if content is None else str(content))
