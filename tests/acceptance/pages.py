"""Runs the commands of the documentation's pages, in an environment with only the packages that the pages install."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tests.acceptance.stack import Process
from tests.forking import FORKING, Forking
from tests.waiting import eventually

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
ENVIRONMENT = REPOSITORY / ".venv-documents"
COMMAND = Path(sys.executable).parent / "orchestrator"
"""The `orchestrator` command of the tests' environment."""
_PYTHONS = {"python": Forking(ENVIRONMENT / "bin" / "python"), sys.executable: FORKING}
"""How to fork each Python: that of the pages' environment, and that of the tests."""
EXECUTED = re.compile(r"python |orchestrator (enqueue |status|runs (start|show|resolve) (?!.*nightly|ID))")
"""The documented commands that tests run: programs, and commands that need nothing from earlier commands."""

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")


@dataclass
class Command:
    """A line after `$`, without its comment, and the output that the page shows for it."""

    line: str
    expected_output: list[str] = field(default_factory=list)


def steps(page: Path) -> Iterator[Command | tuple[str, str]]:
    """Yield the commands and the files (name, body) of a page, in order."""
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "console":
            yield from _commands(body)
        elif language in ("python", "yaml") and (named := _FILE.match(body)):
            yield named[1], body


def files_in(page: Path) -> dict[str, str]:
    """Return the files that a page shows, by name."""
    return dict(step for step in steps(page) if not isinstance(step, Command))


def commands(page: Path) -> list[Command]:
    """Return all commands of a page."""
    return [step for step in steps(page) if isinstance(step, Command)]


def _commands(body: str) -> list[Command]:
    found: list[Command] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append(Command(re.sub(r"\s+# .*", "", line.removeprefix("$ "))))
        elif found:
            found[-1].expected_output.append(line)
    return found


def run_page(page: Path, folder: Path) -> int:
    """Run the commands of a page in a folder; check the output that the page shows. Return how many programs were run.

    In a folder with servers, start the processes of `orchestrator dev` instead of the command itself.
    """
    ran = 0
    with ExitStack() as running:
        for step in steps(page):
            if not isinstance(step, Command):
                write(folder, *step)
            elif step.line.startswith("orchestrator dev "):
                running.close()  # as Ctrl-C does
                app = step.line.removeprefix("orchestrator dev --app ")
                reader_command = ENVIRONMENT / "bin" / "orchestrator"
                running.enter_context(working(folder, app) if has_servers(folder) else dev(folder, app, reader_command))
            elif EXECUTED.match(step.line):
                printed = run_command(folder, *shlex.split(step.line))
                missing = [line for line in step.expected_output if line not in printed]
                assert not missing, f"{page.name}: $ {step.line}: not printed: {missing}\n{printed}"
                ran += 1
    return ran


def write(folder: Path, name: str, body: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(body, encoding="utf-8")


def run(folder: Path, *arguments: str | Path, **environment: str) -> str:
    """Run a command with the programs of the pages' environment first on PATH; return its output."""
    program, *rest = map(str, arguments)
    variables = _clean() | environment
    if program in _PYTHONS:
        result = _PYTHONS[program].run(*rest, environment=variables, folder=folder)
    else:
        result = subprocess.run(
            arguments, cwd=folder, env=variables, capture_output=True, text=True, timeout=120, check=False
        )
    assert result.returncode == 0, f"$ {' '.join(map(str, arguments))}\n{result.stdout}{result.stderr}"
    return result.stdout


def run_command(folder: Path, *arguments: str) -> str:
    """Run a command of a page; in a folder with servers, run `orchestrator` commands in a fork of the tests' Python."""
    if arguments[0] != "orchestrator" or not has_servers(folder):
        return run(folder, *arguments)
    process = _start(folder, *arguments[1:])
    code, output = process.wait(120), process.log.read_text()
    process.log.unlink()
    assert code == 0, f"$ {' '.join(arguments)}\n{output}"
    return output


def has_servers(folder: Path) -> bool:
    """Return whether the settings of a folder name servers."""
    return (folder / "pyproject.toml").exists()


@contextmanager
def working(folder: Path, app: str) -> Iterator[None]:
    """Start the processes of `orchestrator dev` on existing servers."""
    urls = [line for line in (folder / "pyproject.toml").read_text().splitlines() if not line.startswith("app = ")]
    (folder / "pyproject.toml").write_text("\n".join([*urls, f'app = "{app}"\n']))
    with ExitStack() as stack:
        options = ("--app", app, "--processes", "1", "--queues", "*", "--allow", ".", "--database")
        for arguments, ready in ((["scheduler"], "scheduler.leading"), (["worker", *options], "process.ready")):
            process = _start(folder, *arguments)
            stack.callback(process.stop)
            eventually(partial(process.logged, ready), f"{arguments[0]} is ready, see {process.log}")
        run_command(folder, "orchestrator", "schedules", "apply", "--app", app)
        yield


def _start(folder: Path, *arguments: str) -> Process:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
    return Process([*arguments], kept, folder / f"{arguments[0]}.log", folder)


@contextmanager
def dev(folder: Path, app: str, command: Path = COMMAND) -> Iterator[None]:
    """Run `orchestrator dev` in a folder within the block."""
    log = folder / "dev.log"
    arguments: list[str | Path] = [command, "dev", "--app", app]
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, cwd=folder, stdout=output, stderr=output, env=_clean())
    try:
        eventually(lambda: "process.ready" in log.read_text() or process.poll() is not None, "dev is ready", 120)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, log.read_text()


def _clean() -> dict[str, str]:
    """Return the environment variables without those of the orchestrator and of the tests' Python environment."""
    ours = ("ORCHESTRATOR_", "PYTHON", "VIRTUAL_ENV", "PYTEST")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"PATH": os.pathsep.join([str(ENVIRONMENT / "bin"), os.environ["PATH"]])}


def install() -> None:
    """Install the newest packages that the pages name into an environment, kept until the requirements change.

    The orchestrator is installed editable, to avoid a build for every change; test_wheel.py builds the package.
    """
    install_commands = [
        command.line for page in PAGES for command in commands(page) if command.line.startswith("pip install ")
    ]
    stamp = hashlib.sha256(
        "\n".join([sys.version, (REPOSITORY / "pyproject.toml").read_text(), *install_commands]).encode()
    )
    stamp_file = ENVIRONMENT / stamp.hexdigest()
    if stamp_file.exists():
        return
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    has_uv = find_spec("uv") is not None
    subprocess.run([sys.executable, "-m", "venv", *(["--without-pip"] if has_uv else []), ENVIRONMENT], check=True)
    packages = [word for line in dict.fromkeys(install_commands) for word in shlex.split(line)[2:]]
    python = ENVIRONMENT / "bin" / "python"
    program: list[str | Path] = (
        [sys.executable, "-m", "uv", "pip", "install", "--python", python]
        if has_uv
        else [python, "-m", "pip", "install", "--no-compile"]  # most modules are never imported
    )
    program += ["--quiet", "--editable", *packages]
    result = subprocess.run(program, cwd=REPOSITORY, env=_clean(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    stamp_file.touch()
