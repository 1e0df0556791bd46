"""A virtual environment for each peer in `.venv-bench/`. Remove that folder to get newer releases."""

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
    """Return the contestant with an interpreter that has its requirements, created if missing."""
    if not contestant.requirements:
        return contestant
    folder = FOLDER / contestant.name
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    requirements = "\n".join((str(folder), *contestant.requirements))
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != requirements:
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *contestant.requirements])
        stamp.write_text(requirements, encoding="utf-8")
    return contestant.installed_in(python)


def _run(command: Sequence[str | Path]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise Failed(f"Making a peer's environment failed.\n{result.stderr[-3000:]}")
