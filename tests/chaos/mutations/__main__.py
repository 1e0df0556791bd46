"""The command `scripts/mutations`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import click

from tests.chaos.mutations.copies import Copy
from tests.chaos.mutations.mutation import Finder, Mutation, NotThere
from tests.chaos.mutations.table import MUTATIONS

_LIMIT = 900.0
"""Timeout of one command in seconds."""
_STOP_TIMEOUT = 60.0
_MAX_LINE = 200


class Verdict(NamedTuple):
    """The result of one command."""

    word: str
    seconds: float
    told: str


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "only_list", is_flag=True, help="List the mutations, and the commands that find them.")
@click.option("--unbroken", is_flag=True, help="Run the commands on the unchanged product: none may fail.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each command.")
def main(names: Sequence[str], only_list: bool, unbroken: bool, as_json: bool) -> None:
    """Break the product on purpose in a copy, and check that tests find it: all mutations, or the named ones.

    The exit code is 1 if a command has not found its mutation.
    """
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := [name for name in names if name not in by_name]:
        raise click.BadParameter(f"No mutation is called {unknown[0]!r}. There are: {', '.join(by_name)}.")
    selected = [by_name[name] for name in names] or list(MUTATIONS)
    if only_list:
        for mutation in selected:
            click.echo(f"{mutation.name}: {mutation.what}\n  {mutation.file}")
            for finder in mutation.finders:
                click.echo(f"  {finder.command}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are stopped
    failed = False
    with tempfile.TemporaryDirectory(prefix="orchestrator-mutations-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # Postgres may run as another user
        copy = Copy(Path(folder))
        for mutation in selected:
            try:
                with nullcontext() if unbroken else copy.broken(mutation):
                    for finder in mutation.finders:
                        failed |= not _try(copy, mutation, finder, unbroken=unbroken, as_json=as_json)
            except NotThere as error:
                raise click.ClickException(str(error)) from None
    sys.exit(1 if failed else 0)


def _try(copy: Copy, mutation: Mutation, finder: Finder, *, unbroken: bool, as_json: bool) -> bool:
    """Run a command, with its allowed number of tries; return whether the result is the expected one."""
    expected = "passes" if unbroken else "found"
    verdict = Verdict("", 0.0, "")
    for _ in range(1 if unbroken else finder.tries):
        verdict = _run(copy, finder)
        if verdict.word == expected:
            break
    if as_json:
        click.echo(json.dumps({"mutation": mutation.name, "command": finder.command, **verdict._asdict()}))
    else:
        word = verdict.word if verdict.word == expected else verdict.word.upper()
        click.echo(f"{mutation.name}: {word} in {verdict.seconds:.0f} s by {finder.command}\n    {verdict.told}")
    return verdict.word == expected


def _run(copy: Copy, finder: Finder) -> Verdict:
    began = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        subprocess.Popen(
            [sys.executable, *finder.arguments],
            cwd=copy.folder,
            env=copy.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            code = process.wait(_LIMIT)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = -1
        output.seek(0)
        text = output.read()
    seconds = time.monotonic() - began
    if code == -1:
        return Verdict("not ended", seconds, f"It had not ended after {_LIMIT:g} s.")
    matching_line = next((line.strip() for line in text.splitlines() if re.search(finder.says, line)), None)
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    if code == 0:
        return Verdict("passes", seconds, last[:_MAX_LINE])
    if matching_line is None:
        return Verdict(
            "fails otherwise", seconds, f"exit code {code}, and nobody said {finder.says!r}: {last}"[:_MAX_LINE]
        )
    return Verdict("found", seconds, matching_line[:_MAX_LINE])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a command with all its processes; kill it only if it does not end."""
    process.send_signal(signal.SIGINT if "pytest" in str(process.args) else signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    main(prog_name="scripts/mutations")
