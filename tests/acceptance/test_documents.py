"""The code in the README and the guides runs as written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from orchestrator.settings import Settings
from tests.waiting import eventually

REPOSITORY = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = Path(sys.executable).parent / "orchestrator"


def files_in(document: Path) -> dict[str, str]:
    """Return the Python and YAML blocks of a document by the file name in their first line."""
    blocks = [body for language, body in FENCE.findall(document.read_text()) if language in ("python", "yaml")]
    named = {body.splitlines()[0].removeprefix("# "): body for body in blocks}
    return {name: body for name, body in named.items() if name.endswith((".py", ".yaml"))}


def commands(document: Path) -> list[str]:
    """Return what a document tells people to type."""
    blocks = [body for language, body in FENCE.findall(document.read_text()) if language == "console"]
    lines = [line for body in blocks for line in body.splitlines() if line.startswith("$ ")]
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in lines]


@contextmanager
def dev(folder: Path, app: str) -> Iterator[None]:
    """Run `orchestrator dev` in a folder, as the README says."""
    log = folder / "dev.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [COMMAND, "dev", "--app", app], cwd=folder, stdout=output, stderr=output, env=environment
        )
    try:
        eventually(lambda: "ready:" in log.read_text() or process.poll() is not None, "dev is ready", 60)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()


def run(folder: Path, *arguments: str | Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
    done = subprocess.run(arguments, cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that Postgres's own user can reach too, whatever pytest does to its temporary folders."""
    with tempfile.TemporaryDirectory(prefix="orchestrator-docs-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(
    ("document", "app", "scripts"),
    [
        ("README.md", "tasks:app", {"use.py": "a.png at 200px", "transactional.py": "g.png at 100px"}),
        ("docs/tasks.md", "app:app", {"use.py": "order 1: 9.90 charged", "aio.py": "2 success"}),
        ("docs/tasks.md", "shop.app:app", {"letters.py": "invoice 7\nletter 7"}),
        ("docs/limits.md", "app:app", {"use.py": "welcome to globex\n20\nTrue 90\nTrue"}),
        ("docs/tasks.md", "imports:app", {"watch.py": "imported 3"}),
        ("docs/exactly-once.md", "bank:app", {"use.py": "Bob has 30"}),
        ("docs/workflows.md", "etl:app", {"use.py": "success published"}),
        ("docs/schedules.md", "jobs:app", {"use.py": "7 of 7 days, 0 failed"}),
    ],
)
def test_the_code_runs_as_written(document: str, app: str, scripts: dict[str, str], folder: Path) -> None:
    files = files_in(REPOSITORY / document)
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body)
    assert {*scripts, f"{app.partition(':')[0].replace('.', '/')}.py"} <= set(files)
    with dev(folder, app):
        services = json.loads((folder / ".orchestrator" / "services.json").read_text())
        database = services["database_url"].replace("postgresql:", "postgresql+psycopg2:")
        for name, expected in scripts.items():
            assert expected in run(folder, sys.executable, name, DATABASE_URL=database)
        for command in commands(REPOSITORY / document):
            if command.startswith(("orchestrator enqueue", "orchestrator status")):
                run(folder, COMMAND, *command.split()[1:])


def test_the_tests_of_code_workflows_run_as_written(folder: Path) -> None:
    for name, body in files_in(REPOSITORY / "docs" / "code-workflows.md").items():
        (folder / name).write_text(body)
    printed = run(folder, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".")
    assert "5 passed" in printed


def test_every_command_of_the_readme_exists() -> None:
    for command in commands(REPOSITORY / "README.md"):
        program = command.split()[0]
        if program.startswith("./"):
            assert os.access(REPOSITORY / program, os.X_OK), program
        elif program == "orchestrator":
            run(REPOSITORY, COMMAND, command.split()[1], "--help")


def test_every_link_leads_somewhere() -> None:
    for document in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_table_of_settings_is_complete() -> None:
    text = (REPOSITORY / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", text.partition("<!-- settings -->")[2], re.MULTILINE)
    source = (REPOSITORY / "orchestrator" / "settings.py").read_text()
    for field in fields(Settings):
        assert (field.name, str(field.default)) in {(name, default.strip()) for name, default, _ in rows}
    for name, _, description in rows:
        assert f'"""{description}"""' in source, name
