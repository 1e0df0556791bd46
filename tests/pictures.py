"""Draws terminal output as SVG: commands that run on a stack with the example applications."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tests.acceptance.pages import COMMAND, REPOSITORY, dev, run
from tests.waiting import eventually

COLUMNS = 100
PICTURES = {
    "status": "status",
    "tasks": "tasks list --limit 8",
    "run": "runs show {nightly}",
    "code-run": "runs show o-1",
    "schedules": "schedules list",
    "failure": "tasks show {failed}",
}
RED, GREEN, YELLOW, BLUE, PURPLE, CYAN = (
    (224, 108, 117),
    (152, 195, 121),
    (229, 192, 123),
    (97, 175, 239),
    (198, 120, 221),
    (86, 182, 194),
)
THEME = TerminalTheme(
    (24, 26, 31),
    (220, 223, 228),
    [(40, 44, 52), RED, GREEN, YELLOW, BLUE, PURPLE, CYAN, (220, 223, 228)],
    [(99, 109, 131), RED, GREEN, YELLOW, BLUE, PURPLE, CYAN, (255, 255, 255)],
)


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="orchestrator-pictures-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file in (REPOSITORY / "examples").glob("*.*"):
            shutil.copy(file, folder)
        join(folder)
        with dev(folder, "shop:app"):
            words = prepare(folder)
            for picture, command in PICTURES.items():
                draw(picture, command.format(**words), folder, target)
                print(f"{picture}.svg: orchestrator {command}")


def join(folder: Path) -> None:
    """Join two examples into one application, and add a task that fails."""
    source = [(folder / f"{name}.py").read_text().partition("\nif __name__")[0] for name in ("nightly", "approval")]
    second_source = re.sub(r"^from __future__.*$|^app = .*$", "", source[1].partition('"""\n')[2], flags=re.MULTILINE)
    failing_task = "\n\n@app.task(retries=1)\ndef invoice(customer: str) -> str:\n    return {}[customer]\n"
    (folder / "shop.py").write_text(source[0] + second_source + failing_task)
    graph = (folder / "nightly.yaml").read_text()
    (folder / "nightly.yaml").write_text(graph.replace("nightly.", "shop."))


def prepare(folder: Path) -> dict[str, str]:
    """Create tasks and runs to show; return their ids for the commands."""

    def order(*words: str) -> str:
        return run(folder, COMMAND, *words).strip()

    order("workflows", "apply", "nightly.yaml", "--app", "shop:app")
    nightly = order("runs", "start", "nightly-sales", "day=2026-01-31")
    eventually(lambda: "success" in order("runs", "show", nightly, "--json"), "the night is over")
    order("runs", "start", "shop.order", "order_id=o-1", "cents=25000", "--key", "o-1")
    eventually(lambda: "promise approval" in order("runs", "show", "o-1"), "the order waits")
    failed = order("enqueue", "shop.invoice", "acme").split()[0]
    eventually(lambda: json.loads(order("tasks", "show", failed, "--json"))["status"] == "failed", "it has failed")
    return {"nightly": nightly, "failed": failed}


def draw(picture: str, command: str, folder: Path, target: Path) -> None:
    """Run a command on a terminal and write its output as an SVG file."""
    output = terminal_output([str(COMMAND), *command.split()], folder)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.assemble(("$ ", "bold green"), (f"orchestrator {command}", "bold")))
        console.print(Text.from_ansi(output))
        svg = console.export_svg(title="", theme=THEME, unique_id=picture)
    without_foreign_fonts = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (target / f"{picture}.svg").write_text(without_foreign_fonts)


def terminal_output(command: list[str], folder: Path) -> str:
    """Return the output of a command on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
    process = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm-256color"}
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65_536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    process.wait(60)
    return b"".join(parts).decode().replace("\r\n", "\n").rstrip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
