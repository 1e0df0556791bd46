"""The jobs of the suite as remote processes run them. Marker files in a folder record each start and end."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = "DOING"
"""The environment variable with the path of the folder."""


def work(do: str, id: str, **more: Any) -> Any:
    """Run a job: `do` names the behavior."""
    folder = Path(os.environ[FOLDER])
    with (folder / f"begun-{id}").open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    try:
        return _do(folder, do, id, more)
    finally:
        with (folder / f"over-{id}").open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")


def _do(folder: Path, do: str, id: str, more: dict[str, Any]) -> Any:
    if do == "fail":
        raise RuntimeError(more["message"])
    if do == "hold":
        go = folder / f"go-{id}"
        while not go.exists():
            time.sleep(0.02)
        return json.loads(go.read_text(encoding="utf-8"))
    if do == "say":
        for number in range(more["lines"]):
            print(f"line {number}", flush=True)
        return more["lines"]
    if do == "garbage":
        return Path("/")
    return "x" * more["bytes"] if do == "large" else more.get("value")


class Marks:
    """Reads the marker files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pids(self, id: str, marker: str = "begun") -> list[int]:
        path = self.folder / f"{marker}-{id}"
        return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []

    def is_running(self, id: str) -> bool:
        return any(_is_alive(pid) for pid in self.pids(id))

    def let_go(self, id: str, value: Any) -> None:
        path = self.folder / f"go-{id}"
        path.with_suffix(".new").write_text(json.dumps(value), encoding="utf-8")
        path.with_suffix(".new").rename(path)


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


if __name__ == "__main__":
    try:
        print(json.dumps(work(**json.loads(os.environ["TASK_SPEC"])["input"])))
    except RuntimeError as error:
        print(error)
        sys.exit(3)
