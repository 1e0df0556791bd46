"""The clients in `clients/`: built with their toolchains, used against the real API, and checked for conformance."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.testing.pull_conformance import CHECKS
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Stack
from tests.acceptance.test_pull_clients import conformance

CLIENTS = Path(__file__).parents[2] / "clients"
Programs = tuple[list[str], list[str]]
"""Two commands: a program that uses the client, and the client's worker for the conformance suite."""


def built_with_typescript(folder: Path) -> Programs:
    source = CLIENTS / "typescript"
    compiler = source / "node_modules" / ".bin" / "tsc"
    if shutil.which("node") is None or not compiler.exists():
        pytest.skip("needs node, and `npm install` in clients/typescript")
    subprocess.run([compiler, "--outDir", folder], cwd=source, check=True, timeout=300)
    (folder / "package.json").write_text('{"type": "module"}')
    return ["node", str(folder / "test" / "check.js")], ["node", str(folder / "test" / "worker.js")]


def built_with_go(folder: Path) -> Programs:
    if shutil.which("go") is None:
        pytest.skip("needs go")
    source = CLIENTS / "go"
    subprocess.run(["go", "vet", "./..."], cwd=source, check=True, timeout=300)
    for name in ("check", "conformance"):
        subprocess.run(["go", "build", "-o", folder / name, f"./{name}"], cwd=source, check=True, timeout=300)
    return [str(folder / "check")], [str(folder / "conformance")]


@pytest.fixture(scope="module", params=[built_with_typescript, built_with_go], ids=["typescript", "go"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    found: Programs = request.param(tmp_path_factory.mktemp("built"))
    return found


@pytest.fixture(scope="module")
def stack(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        stack.scheduler()
        stack.worker(processes=1)
        yield stack


@pytest.mark.long
def test_a_client_enqueues_starts_and_waits(programs: Programs, stack: Stack) -> None:
    environment = {**stack.environment, "ORCHESTRATOR_API_URL": stack.api(), "ORCHESTRATOR_API_KEY": ""}
    done = subprocess.run(programs[0], env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.timeout(1_000)
def test_the_worker_of_a_client_passes_the_conformance_suite(programs: Programs) -> None:
    done = conformance(programs[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok   ") == len(CHECKS)


@pytest.mark.parametrize(("language", "files"), [("typescript", "src/*.ts"), ("go", "*.go")])
def test_a_client_is_small_and_has_no_dependencies(language: str, files: str) -> None:
    lines = [line for file in (CLIENTS / language).glob(files) for line in file.read_text().splitlines()]
    assert 0 < len(lines) < 600
    imports = re.findall(
        r'from "([^"]+)"' if language == "typescript" else r'^\t"([^"]+\.[^"]+)"$', "\n".join(lines), re.M
    )
    assert [name for name in imports if not name.startswith("./")] == []


def test_clients_are_not_in_the_wheel() -> None:
    project = tomllib.loads((CLIENTS.parent / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["orchestrator*"]
