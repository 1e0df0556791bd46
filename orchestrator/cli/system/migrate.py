"""`orchestrator migrate`."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.terminal.options import json_option
from orchestrator.cli.terminal.output import counted, echo, print_json, print_table
from orchestrator.compat.coverage import Verdict
from orchestrator.compat.reading import Findings, read_project


@click.group("migrate")
def command() -> None:
    """Move programs that use Celery, RQ or Dramatiq.

    \b
    Example:
      orchestrator migrate check .
    """


@command.command("check")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--diff", is_flag=True, help="Print the change of imports and settings, for `patch -p1`.")
@json_option
def check(path: Path, diff: bool, as_json: bool) -> None:
    """Say line by line what of a project moves, what changes its meaning, and what does not move.

    The project is read, and neither imported nor run.

    \b
    Example:
      orchestrator migrate check .
      orchestrator migrate check . --diff | patch -p1
    """
    found = read_project(path)
    if as_json:
        print_json(_document(found))
    elif diff:
        echo("".join(found.diffs), nl=False)
    else:
        _tell(found)
    for name, reason in found.unread.items():
        echo(f"Not read: {name}: {reason}.", err=True)
    if found.unread:
        raise SystemExit(1)


def _document(found: Findings) -> dict[str, object]:
    return {
        "files": found.files,
        "score": found.score,
        **{verdict.value: found.count(verdict) for verdict in Verdict},
        "uses": [use._asdict() for use in found.uses],
        "unread": found.unread,
    }


def _tell(found: Findings) -> None:
    if found.score is None:
        echo(f"{counted(found.files, 'file')} read{_unread(found)}; Celery, RQ and Dramatiq are not used.")
        return
    rows = [(f"{use.file}:{use.line}", use.verdict.value, use.what, use.note) for use in found.uses]
    print_table(["where", "", "what", "what to know"], rows)
    counts = ", ".join(f"{found.count(verdict)} {verdict.value}" for verdict in Verdict)
    where = f"{counted(len(found.uses), 'use')} in {counted(found.files, 'file')}"
    echo(f"\n{found.score} % of {where} move: {counts}{_unread(found)}.")


def _unread(found: Findings) -> str:
    return f"; {counted(len(found.unread), 'file')} could not be read" if found.unread else ""
