"""`orchestrator workflows replay-check`."""

from __future__ import annotations

import os
import subprocess
import sys
from asyncio import CancelledError
from datetime import datetime

import click

from orchestrator.cli.terminal.options import app_option, json_option, moment, require_app
from orchestrator.cli.terminal.output import counted, echo, print_json
from orchestrator.cli.terminal.reading import looking
from orchestrator.domain.ids import to_text
from orchestrator.errors import DeterminismViolation, NotDeterministic, did_you_mean
from orchestrator.sdk.code.replaying import replay
from orchestrator.settings import load_settings
from orchestrator.workers.functions.loading import load_app


@click.command("replay-check")
@app_option
@click.option("--since", type=moment, metavar="TIME", help="Only runs created since then: 7d (ago), or 2024-01-31.")
@click.option(
    "--elsewhere",
    metavar="WORKFLOW",
    multiple=True,
    help="A workflow that another application has: its runs are none of this one's business. May be repeated.",
)
@json_option
@click.option("--once", is_flag=True, help="Only with the hash seed of this process.")
def replay_check(
    app: str | None, since: datetime | None, elsewhere: tuple[str, ...], as_json: bool, once: bool
) -> None:
    """Run the code of workflows against the histories of open runs, before a deploy; exit with 1 if it does not fit.

    Open runs of workflows that the application does not have would be stuck, and count as such. Where all fits, the
    code runs once more in a process with another hash seed: it must not depend on the order of a set.

    \b
    Example:
      orchestrator workflows replay-check --app shop:app --since 7d
    """
    settings = load_settings(app=app) if app else load_settings()
    known = load_app(require_app(settings)).code_workflows
    checked = misfits = waiting = 0
    problems: list[dict[str, str | None]] = []
    with looking() as calls:
        for run in calls.insights.open_runs(sorted(known), since):
            if run.pinned and f"{run.workflow}@{run.version}" not in known._announced:
                waiting += 1
                continue
            checked += 1
            recording = calls.code.history(run.id)
            try:
                replay(known.find(run.workflow, run.version), recording, strict=True)
            except (Exception, SystemExit, CancelledError) as error:  # noqa: BLE001  # code may raise anything
                fits_not = isinstance(error, (DeterminismViolation, NotDeterministic))
                problem = str(error) if fits_not else f"{type(error).__name__}: {error}"
                misfits += 1
                problems.append({"workflow": run.workflow, "run": to_text(run.id), "problem": problem})
                echo(f"{run.workflow}, run {to_text(run.id)}: {problem}", colour="red", err=True)
        gone = calls.insights.count_open_others(sorted({*known, *elsewhere}), since)
    for name, count in gone.items():
        checked, misfits = checked + count, misfits + count
        problems.append({"workflow": name, "run": None, "problem": "The application has no workflow of this name."})
        what = f"{name}: {counted(count, 'open run')}, and the application has no workflow of this name."
        echo(f"{what}{did_you_mean(name, known)} If another one has it: --elsewhere {name}", colour="red", err=True)
    if checked and not misfits and not once:
        _check_again(app, since, elsewhere, as_json)
    if as_json:
        counts = {"checked": checked, "misfits": misfits, "not_checked": waiting}
        print_json({**counts, "problems": problems})
        sys.exit(1 if misfits else 0)
    if waiting:
        echo(f"{counted(waiting, 'open run')} held to a version that the application does not have: not checked.")
    echo(f"{counted(checked, 'open run')}: the code fits {checked - misfits:,}, and does not fit {misfits:,}.")
    sys.exit(1 if misfits else 0)


def _check_again(app: str | None, since: datetime | None, elsewhere: tuple[str, ...], as_json: bool) -> None:
    """Do the same in a process with another hash seed; where something does not fit there, say what, and exit."""
    words = ["--app", app] if app else []
    words += ["--since", since.isoformat()] if since is not None else []
    words += [word for name in elsewhere for word in ("--elsewhere", name)]
    words += ["--json"] if as_json else []
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    command = [sys.executable, "-m", "orchestrator", "workflows", "replay-check", "--once", *words]
    again = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False
    )
    if again.returncode:
        echo(f"In a process with another hash seed (PYTHONHASHSEED={seed}):", err=True)
        echo(again.stderr.rstrip(), err=True)
        echo(again.stdout.rstrip())
        sys.exit(again.returncode)
