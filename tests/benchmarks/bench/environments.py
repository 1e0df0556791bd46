"""A virtual environment for each peer, in the repository's `.venv-bench/`. Remove that folder for newer releases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.bench.programs import Failed
from tests.benchmarks.bench.services import REPOSITORY
from tests.benchmarks.peers.contestants import Contestant

FOLDER = REPOSITORY / ".venv-bench"


def with_environment(contestant: Contestant) -> Contestant:
    """Return the contestant with an interpreter that has what it requires; make it if it is not there yet."""
    if not contestant.requirements:
        return contestant
    folder = FOLDER / contestant.name
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = "\n".join((str(folder), *contestant.requirements))
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *contestant.requirements])
        stamp.write_text(wanted, encoding="utf-8")
    return contestant.installed_in(python)


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"Making a peer's environment failed.\n{done.stderr[-3000:]}")
