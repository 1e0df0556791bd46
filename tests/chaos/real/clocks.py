"""Wall clocks that can be set: a preloaded library replaces the process's clock functions."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.embedded import EmbeddedRedis

_SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """The wall clock of a process and its children."""

    def __init__(self, folder: Path, name: str) -> None:
        library = folder / "clock.so"
        if not library.exists():
            _compile(library)
        self._file = folder / f"{name}.clock"
        self._file.write_bytes(struct.pack("q", 0))
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def step_to(self, seconds: int) -> None:
        """Set the clock `seconds` ahead of the true time."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))


class RedisWithClock(EmbeddedRedis):
    """A Redis with a separate wall clock."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(folder)
        self.clock = clock

    def launch(self, *args: Any, **options: Any) -> None:
        """Start Redis with its clock."""
        super().launch(*args, env={**os.environ, **self.clock.environment}, **options)


@cache
def are_possible() -> bool:
    """Return whether this system can compile the library: it needs a C compiler."""
    if shutil.which("cc") is None:
        return False
    with tempfile.TemporaryDirectory(prefix="orchestrator-clock-") as folder:
        try:
            _compile(Path(folder) / "clock.so")
        except subprocess.CalledProcessError:
            return False
        return True


def _compile(library: Path) -> None:
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(_SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
