"""The executor `process`: its remote side is a program that writes marker files into a folder."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from orchestrator.domain.executors.builtin import Process
from orchestrator.domain.executors.options import ExecutorOptions
from tests.acceptance.executors.harness import AWAY, Harness

PROGRAM = """
import json, os, sys, time
input = json.load(sys.stdin)
folder, do, id = os.environ["FOLDER"], input["do"], input["id"]
with open(f"{folder}/{id}.starts", "a") as file:
    file.write(f"{os.getpid()}\\n")
if do == "return":
    print(json.dumps(input.get("value")))
elif do == "fail":
    sys.exit(input["message"])
elif do == "hold":
    while not os.path.exists(f"{folder}/{id}.go"):
        time.sleep(0.01)
    print(open(f"{folder}/{id}.go").read())
elif do == "say":
    for number in range(input["lines"]):
        print(f"line {number}", file=sys.stderr)
    print(input["lines"])
elif do == "large":
    print(json.dumps("x" * input["bytes"]))
elif do == "garbage":
    sys.stdout.buffer.write(b"\\x00\\xff no JSON at all")
"""


class ProcessHarness(Harness):
    """The executor `process`, with a program on this machine."""

    name = "process"
    without = AWAY  # commands run on this machine, which cannot go away

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._program = folder / "work.py"
        self._program.write_text(PROGRAM)

    def worker_options(self) -> list[str]:
        return ["--allow-command", sys.executable]

    def options(self) -> ExecutorOptions:
        return Process(command=[sys.executable, "-S", "-E", str(self._program)], env={"FOLDER": str(self.folder)})

    def started(self, id: str) -> int:
        return len(self._pids(id))

    def is_running(self, id: str) -> bool:
        return any(Path(f"/proc/{pid}").exists() for pid in self._pids(id))

    def let_go(self, id: str, value: Any = None) -> None:
        path = self.folder / f"{id}.tmp"
        path.write_text(json.dumps(value))
        path.rename(self.folder / f"{id}.go")

    def lose(self, id: str) -> None:
        os.killpg(os.getpgid(self._pids(id)[-1]), signal.SIGKILL)  # the supervising process, too

    def _pids(self, id: str) -> list[int]:
        path = self.folder / f"{id}.starts"
        return [int(line) for line in path.read_text().split()] if path.exists() else []
