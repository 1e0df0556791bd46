"""Print the log lines of one task, or of all tasks of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from zlib import crc32

import click

from orchestrator.cli.terminal.output import echo, echo_json, echo_output, json_text, print_json
from orchestrator.sdk.tasks.logs import LogEntry, LogPage, all_lines
from orchestrator.terminal_safe import one_line

Read = Callable[[str, float], LogPage]
"""Returns the lines after a cursor, waiting up to that many seconds for the first one."""

_WAIT = 1.0
"""Seconds that one read waits for new lines. The last read waits too, for lines written at the very end."""
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
_MAX_STEP_WIDTH = 24
"""Columns reserved for a step's name, at most; longer names push the line to the right."""
_NO_LINES = (
    "No log lines are stored. If the setting capture_logs is on, the lines that tasks print, log or write with "
    "ctx.log are stored. They appear after a moment, while a scheduler runs, and are kept as long as the setting "
    "retention_logs says."
)


def print_logs(
    read: Read,
    has_ended: Callable[[], bool],
    *,
    follow: bool,
    as_json: bool,
    last: int | None,
    with_steps: bool = False,
    with_attempts: bool = False,
    colour: str = "auto",
) -> None:
    """Print the stored lines, or the last ones; with `follow`, also new lines until the end.

    With attempts, each has a heading, unless there is only the first. A terminal gets the colors that tasks printed.
    """
    coloured = {"always": True, "never": False}.get(colour, sys.stdout.isatty())
    lines: Iterable[LogEntry]
    attempt = 1
    if follow:
        lines = _follow(read, has_ended, last)
    else:
        stored = all_lines(lambda after: read(after, 0.0))
        if with_attempts:  # late lines of an attempt may be stored after the first lines of the next one
            stored.sort(key=lambda line: line.attempt)
            attempt = 0 if len({line.attempt for line in stored}) > 1 else 1
        lines = _last_lines(stored, last)
        if as_json:
            print_json({"lines": [_document(line) for line in lines]})
            return
    width, is_empty = 0, True
    for line in lines:
        is_empty = False
        if as_json:
            echo_json(json_text(_document(line)))
            continue
        if with_attempts and line.attempt != attempt:
            attempt = line.attempt
            echo(f"— attempt {attempt} —")
        echo(f"{line.at:%H:%M:%S} ", nl=False)
        if with_steps:
            step = one_line(line.step)
            width = max(width, min(len(step), _MAX_STEP_WIDTH))
            echo(f"{step:<{width}} ", nl=False, colour=_colour(line.step))
        echo(f"{one_line(line.level):<8} ", nl=False)
        echo_output(line.text, coloured=coloured)
    if is_empty:
        echo(_NO_LINES, err=True)


color_option = click.option(
    "--color",
    "colour",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Keep the colors that tasks print; auto: on a terminal only.",
)


def _last_lines(lines: list[LogEntry], last: int | None) -> list[LogEntry]:
    return lines if last is None else lines[max(0, len(lines) - last) :]


def _follow(read: Read, has_ended: Callable[[], bool], last: int | None) -> Iterator[LogEntry]:
    """Yield the stored lines, or the last ones, then new lines until the end."""
    tail: list[LogEntry] = []
    cursor = ""
    while last is not None and (page := read(cursor, 0.0)).lines:
        tail = _last_lines(tail + page.lines, last)
        cursor = page.last
    yield from tail
    while True:
        is_over = has_ended()
        lines, cursor = read(cursor, _WAIT)
        yield from lines
        if is_over and not lines:
            return


def _colour(step: str) -> str:
    """Return the color of a step: stable, and the same for all tasks of its fan-out."""
    return _COLOURS[crc32(step.partition("[")[0].encode(errors="replace")) % len(_COLOURS)]


def _document(line: LogEntry) -> dict[str, object]:
    return {
        "at": line.at,
        "task": line.task,
        "step": line.step,
        "attempt": line.attempt,
        "level": line.level,
        "source": line.source,
        "text": line.text,
    }
