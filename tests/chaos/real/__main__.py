"""The command `scripts/chaos`."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click

from tests.chaos.real.faults import left_out
from tests.chaos.real.loads import LOADS
from tests.chaos.real.plan import chosen
from tests.chaos.real.run import Experiment, Outcome, Progress, run

_LOG_INTERVAL = 5
"""Seconds between two progress lines without a terminal."""


@click.command(context_settings={"show_default": True})
@click.option("--seconds", type=click.FloatRange(2), default=60.0, help="How long faults are injected.")
@click.option("--seed", type=int, default=1, help="Decides the load and the faults.")
@click.option("--seeds", type=click.IntRange(1), default=1, help="Run this many seeds, from --seed upwards.")
@click.option(
    "--faults",
    default="",
    show_default="all",
    metavar="A,B",
    help="Only these kinds or groups of faults: kill, redis-full.",
)
@click.option(
    "--loads",
    default="",
    show_default="all",
    metavar="A,B",
    help="Only these kinds of work: journey, dag. Schedules and messages to runs are added.",
)
@click.option("--schedulers", type=click.IntRange(1), default=2, help="One leads, and the others stand by.")
@click.option("--workers", type=click.IntRange(1), default=3, help="Each with two processes of five slots.")
@click.option(
    "--every", type=click.FloatRange(0.1), default=2.0, help="Seconds from one fault to the next, on average."
)
@click.option("--rate", type=click.FloatRange(0.1), default=25.0, help="Submissions a second.")
@click.option("--keep", is_flag=True, help="Keep the logs even if all is well.")
@click.option("--json", "as_json", is_flag=True, help="Print what came of it as JSON, one object per seed.")
def main(
    seconds: float,
    seed: int,
    seeds: int,
    faults: str,
    loads: str,
    schedulers: int,
    workers: int,
    every: float,
    rate: float,
    keep: bool,
    as_json: bool,
) -> None:
    """Run a load on real schedulers and workers, break everything around them, and check that nothing is lost.

    The same seed means the same load and the same plan of faults. Their effects depend on timing, so that a failing
    seed may need several runs to fail again.
    """
    without = left_out()
    groups = tuple(name.strip() for name in faults.split(",") if name.strip())
    work = tuple(name.strip() for name in loads.split(",") if name.strip())
    if unknown := [name for name in work if name not in LOADS]:
        known = ", ".join(LOADS)
        raise click.BadParameter(f"No work is called {unknown[0]!r}. There is: {known}.", param_hint="--loads")
    try:
        kinds = chosen(groups, without=without)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--faults") from None
    if not kinds:
        raise click.BadParameter("none of these faults is possible on this system.", param_hint="--faults")
    for kind, reason in without.items():
        click.echo(f"Left out: {kind}. {reason}", err=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are stopped
    failed = False
    for number in range(seed, seed + seeds):
        experiment = Experiment(
            seed=number,
            seconds=seconds,
            schedulers=schedulers,
            workers=workers,
            faults=groups,
            loads=work,
            every=every,
            rate=rate,
        )
        folder = Path(tempfile.mkdtemp(prefix="orchestrator-chaos-"))
        folder.chmod(0o755)  # Postgres may run as another user
        outcome = run(experiment, folder, _ProgressLine())
        click.echo(json.dumps(outcome.as_data()) if as_json else _summary(outcome))
        failed = failed or bool(outcome.violations)
        if outcome.violations or keep:
            click.echo(f"The logs are in {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if failed else 0)


class _ProgressLine:
    """Shows progress on stderr: one changing line on a terminal, otherwise one line every few seconds."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, progress: Progress) -> None:
        text = (
            f"{progress.seconds:6.1f} s  {progress.phase:8}  {progress.faults:3} faults  {progress.done:6} done  "
            f"{progress.open:5} open  {', '.join(progress.active)}"
        )
        if sys.stderr.isatty():
            click.echo(f"\r\033[K{text:.{shutil.get_terminal_size().columns}}", nl=False, err=True)
        elif int(progress.seconds) // _LOG_INTERVAL != self._last or progress.phase != "chaos":
            self._last = int(progress.seconds) // _LOG_INTERVAL
            click.echo(text.rstrip(), err=True)


def _summary(outcome: Outcome) -> str:
    experiment = outcome.experiment
    lines = [
        f"\r\033[K{_headline(outcome)}" if sys.stderr.isatty() else _headline(outcome),
        f"  faults: {_counts(outcome.faults)}",
        f"  submitted: {_counts(outcome.submitted)}",
    ]
    if outcome.violations:
        lines += [
            *(f"  VIOLATION {violation}" for violation in outcome.violations[:30]),
            *([f"  and {len(outcome.violations) - 30} more"] if len(outcome.violations) > 30 else ()),
            "What was done:",
            *(f"  {line}" for line in outcome.history),
            "The same load and the same faults again (real time cannot be repeated exactly):",
            f"  {experiment.command()}",
        ]
    return "\n".join(lines)


def _headline(outcome: Outcome) -> str:
    verdict = f"{len(outcome.violations)} VIOLATIONS" if outcome.violations else "every promise kept"
    return (
        f"seed {outcome.experiment.seed}: {verdict}; {sum(outcome.faults.values())} faults, "
        f"{sum(outcome.tasks.values())} tasks ({_counts(outcome.tasks)}), {sum(outcome.runs.values())} runs, "
        f"{outcome.executions} executions, {outcome.losses} attempts lost and run again, {outcome.overlaps} of them "
        f"beside one that could not be heard; "
        f"at rest {outcome.seconds_to_rest:.1f} s after healing"
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in Counter(counts).most_common())


if __name__ == "__main__":
    main(prog_name="scripts/chaos")
