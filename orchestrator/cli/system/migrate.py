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
    """Report each use of Celery, RQ or Dramatiq in a project: whether it moves, changes its meaning or does not move.

    The project's files are read; nothing is imported or run.

    \b
    Example:
      orchestrator migrate check .
      orchestrator migrate check . --diff | patch -p1
    """
    findings = read_project(path)
    if as_json:
        print_json(_document(findings))
    elif diff:
        echo("".join(findings.diffs), nl=False)
    else:
        _print_findings(findings)
    for name, reason in findings.unread.items():
        echo(f"Not read: {name}: {reason}.", err=True)
    if findings.unread:
        raise SystemExit(1)


def _document(findings: Findings) -> dict[str, object]:
    return {
        "files": findings.files,
        "score": findings.score,
        **{verdict.value: findings.count(verdict) for verdict in Verdict},
        "uses": [use._asdict() for use in findings.uses],
        "unread": findings.unread,
    }


def _print_findings(findings: Findings) -> None:
    if findings.score is None:
        echo(f"{counted(findings.files, 'file')} read{_unread(findings)}; Celery, RQ and Dramatiq are not used.")
        return
    rows = [(f"{use.file}:{use.line}", use.verdict.value, use.what, use.note) for use in findings.uses]
    print_table(["where", "", "what", "what to know"], rows)
    counts = ", ".join(f"{findings.count(verdict)} {verdict.value}" for verdict in Verdict)
    where = f"{counted(len(findings.uses), 'use')} in {counted(findings.files, 'file')}"
    echo(f"\n{findings.score} % of {where} move: {counts}{_unread(findings)}.")


def _unread(findings: Findings) -> str:
    return f"; {counted(len(findings.unread), 'file')} could not be read" if findings.unread else ""
