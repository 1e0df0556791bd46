"""The wheel, installed where a user has a package of their own called `workers`."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str | Path, cwd: Path) -> str:
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    run("git", "clone", "--quiet", str(REPOSITORY), str(source), cwd=folder)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source), cwd=folder)
    return next(folder.glob("*.whl"))


def test_it_ships_everything_and_nothing_at_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"orchestrator"}
    for path in (
        "orchestrator/py.typed",
        "orchestrator/workers/parent/supervisor.py",
        "orchestrator/workers/executors/keeper.sh",
        "orchestrator/migrations/env.py",
        "orchestrator/migrations/script.py.mako",
        "orchestrator/migrations/versions/r0001_trunk.py",
        "orchestrator/cli/__init__.py",
        "orchestrator/plugins/executors/ray/on_cluster.py",
    ):
        assert path in names, path
    points = next(name for name in names if name.endswith("entry_points.txt"))
    assert b"rq = orchestrator.plugins.executors.rq:PLUGIN" in zipfile.ZipFile(wheel).read(points)


def test_it_works_beside_a_users_own_workers_package(wheel: Path, tmp_path: Path, database_url: str) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel), cwd=tmp_path)
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
