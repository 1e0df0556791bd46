"""A copy of the repository, in which one file at a time is changed and restored."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.mutations.mutation import Mutation

REPOSITORY = Path(__file__).parents[3]
_LISTED = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")


class Copy:
    """A copy of the repository in a folder. Commands in it import the product from the copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(_LISTED, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            source, target = REPOSITORY / name, folder / name
            if source.is_symlink() or source.exists():  # otherwise deleted, but still in git's index
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        self.environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
        self._check()

    def _check(self) -> None:
        """Check that Python imports the product from the copy."""
        command = [sys.executable, "-c", "import orchestrator, orchestrator.workers as w; print(w.__file__)"]
        found = subprocess.run(
            command, cwd="/", env=self.environment, check=True, capture_output=True, text=True
        ).stdout
        if not Path(found.strip()).resolve().is_relative_to(self.folder.resolve()):
            raise RuntimeError(f"What runs in the copy {self.folder} would import {found.strip()}.")

    @contextmanager
    def broken(self, mutation: Mutation) -> Iterator[None]:
        """Apply a mutation to the copy within the block."""
        path = self.folder / mutation.file
        original, mutated = path.read_text(encoding="utf-8"), mutation.mutated(self.folder)
        compile(mutated, mutation.file, "exec")  # every test would find a syntax error
        try:
            self._write(path, mutated)
            yield
        finally:
            self._write(path, original)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()  # its size and modification second may match those of the mutated file
