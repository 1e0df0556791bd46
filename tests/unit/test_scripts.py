"""Every script starts; `.ci/run` runs the checks that README names, each once, whatever fails before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
FILES = [path for path in (REPOSITORY / "scripts").iterdir() if path.is_file()]
SCRIPTS = sorted(path.name for path in FILES if os.access(path, os.X_OK))

_TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$0 $*" in *$BROKEN*) echo "$(basename "$0") says no" && exit 1 ;; esac
"""
_PYTHON = f"""#!/bin/sh
case "$*" in
*lastfailed*) printf '%b' "$FAILED" ;;
*pytest*)
    echo "pytest servers=${{ORCHESTRATOR_SERVERS-}} $*" >>"$CALLS"
    case "$BROKEN $*" in nothing*) ;; together*tests/x.py*) ;; *) exit 1 ;; esac
    ;;
*compileall*) ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with our scripts, whose tools only record their calls."""
    for folder in ("scripts", ".ci"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    for name in ("tests", "orchestrator", "workers", "examples", "pyproject.toml"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("ruff", "mypy", "lint-imports", "mkdocs", "chromium-headless-shell", "id"):
        (tools / name).write_text("#!/bin/sh\necho 1000\n" if name == "id" else _TOOL)  # user 1000 installs nothing
    (tools / "python").write_text(_PYTHON)
    for tool in tools.iterdir():
        tool.chmod(0o755)
    for extra in ("dev", "soak"):
        installed = f"{tmp_path}\n{(REPOSITORY / 'pyproject.toml').read_text(encoding='utf-8')}"
        (tmp_path / ".venv" / f".installed-{extra}").write_text(installed, encoding="utf-8")
    (tmp_path / ".venv-lowest").symlink_to(".venv")
    return tmp_path


def call(
    checkout: Path, *command: str, broken: str = "nothing", failed: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script like CI; return the process and the tools that it called."""
    calls = checkout / "calls"
    calls.write_text("")
    environment = {
        "PATH": f"{checkout}/.venv/bin:{os.environ['PATH']}",
        "HOME": str(checkout),
        "TMPDIR": str(checkout),
        "CI": "true",
        "CALLS": str(calls),
        "BROKEN": broken,
        "FAILED": failed,
    }
    done = subprocess.run(
        command,
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, calls.read_text().splitlines()


def test_each_script_prints_its_usage(checkout: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda name: call(checkout, f"scripts/{name}", "--help")[0], SCRIPTS))

    assert len(SCRIPTS) >= 9
    assert {name: one.stderr for name, one in zip(SCRIPTS, done, strict=True) if one.returncode} == {}
    assert [name for name, one in zip(SCRIPTS, done, strict=True) if len(one.stdout) < 80] == []


STATIC = ["lint-imports ", "mkdocs build", "mypy ", "ruff check", "ruff format"]


def called(calls: list[str]) -> list[str]:
    return sorted(call for call in calls if not call.startswith("pytest"))


@pytest.mark.parametrize("command", [["scripts/check", "--static"], ["scripts/check"], [".ci/run"]], ids=" ".join)
def test_a_check_runs_each_tool_and_the_suite_once(checkout: Path, command: list[str]) -> None:
    done, calls = call(checkout, *command)

    assert done.returncode == 0, done.stderr
    assert [one.startswith(tool) for one, tool in zip(called(calls), STATIC, strict=True)] == [True] * 5
    suites = [one for one in calls if "not long" in one]
    assert len(suites) == (command[-1] != "--static")
    if command == [".ci/run"]:
        assert "servers=packages" in suites[0]
        assert [one for one in calls if "servers=system" in one and "ignore::ResourceWarning" in one]


@pytest.mark.parametrize("command", ["scripts/check", ".ci/run"])
def test_failed_checks_are_named_and_the_rest_still_runs(checkout: Path, command: str) -> None:
    done, calls = call(checkout, command, broken="ruff")

    assert done.returncode == 1
    assert "check: failed: format lint tests" in done.stderr
    assert len(called(calls)) == 5


@pytest.mark.parametrize("number", [1, 3, 4])
@pytest.mark.parametrize("broken", ["together", "always"])
def test_a_few_failed_tests_pass_if_they_succeed_twice_alone(checkout: Path, broken: str, number: int) -> None:
    ids = [f"tests/x.py::test_{one}[a b]" for one in range(number)]
    done, calls = call(checkout, "scripts/check", broken=broken, failed="\\n".join(ids))

    again = [one for one in calls if "tests/x.py" in one]
    is_mended = broken == "together" and number <= 3
    assert ("passed twice by themselves" in done.stderr, done.returncode) == ((True, 0) if is_mended else (False, 1))
    assert len(again) == (2 if is_mended else 0 if number > 3 else 1)
    assert all(id in one for id in ids for one in again)


def test_an_unknown_argument_is_rejected(checkout: Path) -> None:
    done, calls = call(checkout, "scripts/check", "--fast")

    assert (done.returncode, calls) == (1, [])
    assert done.stderr == "check: unknown argument: --fast. Usage: scripts/check [--static]\n"
