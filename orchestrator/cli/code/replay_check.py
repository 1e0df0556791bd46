"""`orchestrator workflows replay-check`, and `workflows export`, which writes histories for it."""

from __future__ import annotations

import os
import subprocess
import sys
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import click
import msgspec

from orchestrator.cli.terminal.options import app_option, json_option, moment, require_app
from orchestrator.cli.terminal.output import counted, echo, hidden, print_json
from orchestrator.cli.terminal.reading import open_calls
from orchestrator.domain.code.history import RunStarted
from orchestrator.domain.ids import to_text
from orchestrator.errors import DeterminismViolation, InvalidWorkflow, NotDeterministic, did_you_mean
from orchestrator.sdk.calls.interface import Calls
from orchestrator.sdk.code.engine import read_event, replay
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.code.workflow import CodeWorkflows
from orchestrator.settings import load_settings
from orchestrator.store.insights import CodeRun
from orchestrator.workers.functions import load_app

_since_option = click.option(
    "--since", type=moment, metavar="TIME", help="Only runs created since then: 7d (ago), or 2024-01-31."
)


@click.command("export")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--workflow", "workflows", metavar="NAME", multiple=True, help="Only this workflow. May be repeated.")
@_since_option
@click.option("--limit", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many runs of each kind.")
def export(folder: Path, workflows: tuple[str, ...], since: datetime | None, limit: int) -> None:
    """Write histories of workflows as code into a folder, one file per run, for `replay-check --histories`.

    For each workflow and version: the newest open runs, the newest ended runs, and the runs with the longest histories.
    The files contain arguments, results and signals: protect them like the database. Values that the setting `redact`
    names are hidden; code that depends on a hidden value may fail the check.

    \b
    Example:
      orchestrator workflows export histories --since 7d
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: Counter[str] = Counter()
    with open_calls() as calls:
        for run in calls.insights.sample_runs(workflows, since, limit):
            events = [read_event(event, everything=True) for event in calls.code.history(run.id).events]
            text = Recording(run.id, events).to_json(hidden(), version=run.version, pinned=run.pinned)
            name = f"{run.workflow}-{run.version}-{to_text(run.id)}.json".replace("/", "_").replace(":", "_")
            (folder / name).write_text(text, encoding="utf-8")
            written[run.workflow] += 1
    of = f"{counted(written.total(), 'run')} of {counted(len(written), 'workflow')}"
    echo(f"Wrote the histories of {of} to {folder}. They hold arguments and results: keep them safe.")


class _Exported(msgspec.Struct):
    """The fields of an exported file besides its events."""

    version: int = 0
    pinned: bool = False


@click.command("replay-check")
@app_option
@_since_option
@click.option(
    "--histories",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Check the files of `workflows export` in this folder, without a database.",
)
@click.option(
    "--in-order",
    is_flag=True,
    help=(
        "Also refuse a changed order of commands of different kinds. Live runs can continue with such code, even "
        "if they ran in a different order."
    ),
)
@click.option(
    "--elsewhere",
    metavar="WORKFLOW",
    multiple=True,
    help="A workflow of another application, whose runs are not checked. May be repeated.",
)
@json_option
@click.option("--once", is_flag=True, help="Only with the hash seed of this process.")
def replay_check(
    app: str | None,
    since: datetime | None,
    histories: Path | None,
    in_order: bool,
    elsewhere: tuple[str, ...],
    as_json: bool,
    once: bool,
) -> None:
    """Replay the histories of open runs against the code before a deploy; exit with 1 if one does not match.

    Open runs of workflows that the application lacks would be stuck, and count as mismatches. If all runs match, the
    code runs once more in a process with a different hash seed: it must not depend on the order of a set.

    \b
    Example:
      orchestrator workflows replay-check --app shop:app --since 7d
      orchestrator workflows replay-check --app shop:app --histories histories   # in CI
    """
    if histories is not None and since is not None:
        raise click.UsageError("--since selects runs in the database: pass it to `workflows export`.")
    settings = load_settings(app=app) if app else load_settings()
    check = _Check(load_app(require_app(settings)).code_workflows, elsewhere, in_order)
    if histories is not None:
        check.files(sorted(histories.glob("*.json")))
        if not (check.checked or check.waiting):
            raise click.UsageError(f"{histories} has no histories: export some with `orchestrator workflows export`.")
    else:
        with open_calls() as calls:
            check.open_runs(calls, since)
    misfits = len(check.problems) + check.extra_misfits
    if check.checked and not misfits and not once:
        arguments = ["--app", app] if app else []
        arguments += ["--since", since.isoformat()] if since is not None else []
        arguments += ["--histories", str(histories)] if histories is not None else []
        arguments += [argument for name in elsewhere for argument in ("--elsewhere", name)]
        _check_with_other_seed([*arguments, *["--in-order"] * in_order, *["--json"] * as_json])
    if as_json:
        counts = {"checked": check.checked, "misfits": misfits, "not_checked": check.waiting}
        print_json({**counts, "problems": check.problems})
        sys.exit(1 if misfits else 0)
    what = "open run" if histories is None else "run"
    if check.waiting:
        echo(
            f"Not replayed: {counted(check.waiting, what)} pinned to a version that the application does not have. "
            f"Keep workers of that version until {'this run has' if check.waiting == 1 else 'these runs have'} ended."
        )
    if not check.checked:
        echo(f"There is no {what} to replay.")
    elif misfits:
        do = "does" if misfits == 1 else "do"
        echo(f"Replayed {counted(check.checked, what)}: {misfits:,} of them {do} not match the code.")
        echo("Before you deploy it, keep both code paths with ctx.patched(…), or raise version=.")
    else:
        echo(f"Replayed {counted(check.checked, what)}. The code matches.")
    sys.exit(1 if misfits else 0)


@dataclass
class _Check:
    """Replays runs, counts them, and collects those that do not fit."""

    workflows: CodeWorkflows
    elsewhere: Sequence[str]
    in_order: bool
    checked: int = 0
    waiting: int = 0
    """Pinned runs whose version the application does not have."""
    problems: list[dict[str, str | None]] = field(default_factory=list)
    extra_misfits: int = 0
    """Misfits beyond one per problem: one problem may cover all runs of a workflow."""

    def open_runs(self, calls: Calls, since: datetime | None) -> None:
        for run in calls.insights.open_runs(sorted(self.workflows), since):
            self._run(run, calls.code.history)
        for name, count in calls.insights.count_open_others(sorted({*self.workflows, *self.elsewhere}), since).items():
            self._unknown_workflow(name, count)

    def files(self, files: Iterable[Path]) -> None:
        """Check exported histories."""
        unknown: Counter[str] = Counter()
        for file in files:
            try:
                recording = Recording.from_json(file)
                exported = msgspec.json.decode(file.read_bytes(), type=_Exported)
                (started,) = (event.what for event in recording.events[:1] if isinstance(event.what, RunStarted))
            except (InvalidWorkflow, msgspec.DecodeError, ValueError) as error:
                self.checked += 1
                self._problem(file.name, None, f"{file.name}: {error}")
                continue
            if started.workflow in self.workflows:
                version = exported.version or started.version
                read = {recording.run_id: recording}.__getitem__
                self._run(CodeRun(recording.run_id, started.workflow, version, exported.pinned), read)
            elif started.workflow not in self.elsewhere:
                unknown[started.workflow] += 1
        for name, count in unknown.items():
            self._unknown_workflow(name, count)

    def _run(self, run: CodeRun, read: Callable[[bytes], Recording]) -> None:
        if run.pinned and f"{run.workflow}@{run.version}" not in self.workflows._announced:
            self.waiting += 1
            return
        self.checked += 1
        recording = read(run.id)
        try:
            upgraded = self.workflows[run.workflow]._upgrades and not run.pinned
            workflow = self.workflows.find(run.workflow, None if upgraded else run.version)
            replay(workflow, recording, strict=True, in_order=self.in_order)
        except (Exception, SystemExit, CancelledError) as error:  # noqa: BLE001  # code may raise anything
            is_misfit = isinstance(error, (DeterminismViolation, NotDeterministic))
            problem = str(error) if is_misfit else f"{type(error).__name__}: {error}"
            self._problem(run.workflow, to_text(run.id), problem, f"{run.workflow}, run {to_text(run.id)}: {problem}")

    def _unknown_workflow(self, name: str, count: int) -> None:
        self.checked, self.extra_misfits = self.checked + count, self.extra_misfits + count - 1
        summary = f"{name}: {counted(count, 'open run')}, but the application has no workflow of this name."
        advice = f"{did_you_mean(name, self.workflows)} If another application has it, add --elsewhere {name}"
        self._problem(name, None, "The application has no workflow of this name.", summary + advice)

    def _problem(self, workflow: str, run: str | None, problem: str, message: str = "") -> None:
        self.problems.append({"workflow": workflow, "run": run, "problem": problem})
        echo(message or problem, colour="red", err=True)


def _check_with_other_seed(arguments: Sequence[str]) -> None:
    """Repeat the check in a process with a different hash seed. If a run does not match, print the output and exit."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    command = [sys.executable, "-m", "orchestrator", "workflows", "replay-check", "--once", *arguments]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False
    )
    if result.returncode:
        echo(
            f"The code matches here, but not in a process with PYTHONHASHSEED={seed}: it depends on the order of "
            "a set. Sort the set.",
            err=True,
        )
        echo(result.stderr.rstrip(), err=True)
        echo(result.stdout.rstrip())
        sys.exit(result.returncode)
