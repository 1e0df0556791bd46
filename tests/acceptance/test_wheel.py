"""The files of a release: their content, reproducible bytes, and a wheel that works where it is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str | Path, cwd: Path, umask: int = -1) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ORCHESTRATOR_", "PYTHON"))}
    done = subprocess.run(arguments, cwd=cwd, env=clean, capture_output=True, text=True, timeout=600, umask=umask)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    run("git", "clone", "--quiet", str(REPOSITORY), str(source), cwd=folder)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source), cwd=folder)
    return next(folder.glob("*.whl"))


def test_the_wheel_contains_all_files_in_one_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"orchestrator"}
    for path in (
        "orchestrator/py.typed",
        "orchestrator/workers/parent/supervisor.py",
        "orchestrator/workers/executors/keeper.sh",
        "orchestrator/migrations/env.py",
        "orchestrator/migrations/script.py.mako",
        "orchestrator/migrations/versions/r0033_base.py",
        "orchestrator/cli/__init__.py",
        "orchestrator/plugins/executors/ray/on_cluster.py",
    ):
        assert path in names, path
    points = next(name for name in names if name.endswith("entry_points.txt"))
    assert b"rq = orchestrator.plugins.executors.rq:PLUGIN" in zipfile.ZipFile(wheel).read(points)


def test_the_wheel_works_beside_a_user_package_named_workers(wheel: Path, tmp_path: Path, database_url: str) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)  # as pip does
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").write_text("OURS = True\n")
    dependencies = sysconfig.get_paths()["purelib"]
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(site)!r}]; sys.path.append({dependencies!r})\n"
        "import workers, orchestrator, orchestrator.workers.parent.supervisor as supervisor\n"
        "from orchestrator.store.database import upgrade\n"
        f"assert workers.OURS and supervisor.__file__.startswith({str(site)!r})\n"
        f"upgrade({database_url!r})\n"
        "print('both')\n"
    )
    assert run(sys.executable, "-I", "-S", "-c", program, cwd=tmp_path).strip() == "both"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release's files."""
    folder = tmp_path_factory.mktemp("release")
    run(REPOSITORY / "scripts" / "release", folder, cwd=REPOSITORY)
    return folder


@pytest.mark.long
@pytest.mark.timeout(900)
def test_releases_of_the_same_commit_have_the_same_bytes(released: Path, tmp_path: Path) -> None:
    run(REPOSITORY / "scripts" / "release", tmp_path, cwd=REPOSITORY, umask=0o077)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".gz", ".json", ".whl"]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (released / path.name).read_bytes(), path.name


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_metadata_and_the_sbom_match_the_project(released: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wheel = zipfile.ZipFile(next(released.glob("*.whl")))
    metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.11", "Classifier: Typing :: Typed"):
        assert line in metadata.splitlines()
    with tarfile.open(next(released.glob("*.tar.gz"))) as source:
        inside = {name.split("/")[1] for name in source.getnames() if "/" in name}
    assert not inside & {"tests", "docs", "scripts", ".github"}
    bill = json.loads(next(released.glob("*.cdx.json")).read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", project["version"])
    needed = {re.split("[>=;[]", line)[0].lower() for line in project["dependencies"]}
    assert needed <= {part["name"].lower().replace("_", "-") for part in bill["components"]}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_quickstart_runs_from_the_wheel_in_a_bare_environment(released: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # Postgres may have to run as another user
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"{next(released.glob('*.whl'))}[embedded]", cwd=tmp_path)
    for name in ("quickstart.py", "tour.py"):
        (tmp_path / name).write_bytes((REPOSITORY / "examples" / name).read_bytes())
    said = run(python, "quickstart.py", cwd=tmp_path)
    assert "25,997 primes below 300,000" in said
    assert run(python, "-c", "import orchestrator; print(orchestrator.__file__)", cwd=tmp_path).startswith(
        str(tmp_path / "bare")
    )
