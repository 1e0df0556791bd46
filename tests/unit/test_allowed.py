"""`--allow` permits authors of workflows to name public functions that the allowed modules define, and nothing else."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import Orchestrator
from orchestrator.workers.functions import Allowed

REPORTS = """
import functools
import os as system
from subprocess import check_output
from shutil import rmtree as clean
from other import helper, elsewhere

LOUD = print


def traced(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def monthly() -> str:
    return "monthly"


@traced
def yearly() -> str:
    return "yearly"


def _inner() -> str:
    return "inner"


class Report:
    def build(self) -> None: ...


tracing = traced(check_output)
"""
OTHER = """
from orchestrator import Orchestrator

app = Orchestrator(database_url="postgresql://nowhere", redis_url="redis://nowhere")


def helper() -> str:
    return "helper"


@app.task
def elsewhere() -> str:
    return "elsewhere"
"""
FUNCTION = "def run() -> str:\n    return __file__\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project, in its folder, with a package, files, and a virtual environment."""
    folder = tmp_path / "project"
    for name, text in {
        "other.py": OTHER,
        "jobs/__init__.py": "",
        "jobs/reports.py": REPORTS,
        "jobs/deep/__init__.py": "",
        "jobs/deep/inner.py": FUNCTION,
        "plain/script.py": FUNCTION,
        "venv/pyvenv.cfg": "",
        "venv/lib/tool.py": FUNCTION,
        ".venv/lib/tool.py": FUNCTION,
        "vendor/site-packages/tool.py": FUNCTION,
        "environment/conda-meta/history": "",
        "environment/lib/tool.py": FUNCTION,
        "../outside.py": FUNCTION,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


def allowed(*allow: str) -> Allowed:
    return Allowed(Orchestrator(database_url="postgresql://nowhere", redis_url="redis://nowhere"), allow)


def call(name: str, *allow: str) -> object:
    """Return what a function returns, or None if naming it is not allowed."""
    task = allowed(*allow).find(name)
    return None if task is None else task.function()


@pytest.mark.parametrize("allow", [".", "jobs", "jobs.reports", "jobs/reports.py"])
def test_only_public_functions_that_a_module_defines_are_allowed(project: Path, allow: str) -> None:
    place = "jobs/reports.py" if allow.endswith(".py") else "jobs.reports"
    assert call(f"{place}:monthly", allow) == "monthly"
    assert call(f"{place}:yearly", allow) == "yearly"  # decorated, but defined there
    for stranger in ("check_output", "clean", "helper", "elsewhere", "system", "LOUD", "tracing"):
        assert allowed(allow).find(f"{place}:{stranger}") is None, stranger
    for private in ("_inner", "__loader__", "Report", "Report.build", "nothing", ""):
        assert allowed(allow).find(f"{place}:{private}") is None, private


@pytest.mark.parametrize(
    ("allow", "name"),
    [
        (".", "jobs.deep.inner:run"),
        ("jobs", "jobs.deep.inner:run"),
        ("jobs.deep", "jobs.deep.inner:run"),
        ("jobs/deep", "jobs.deep.inner:run"),
        (".", "jobs/deep/inner.py:run"),
        ("jobs", "deep/inner.py:run"),
        ("jobs/deep/inner.py", "inner.py:run"),
        ("jobs/deep/inner.py", "jobs/deep/inner.py:run"),
    ],
)
def test_submodules_of_an_allowed_module_are_allowed(project: Path, allow: str, name: str) -> None:
    assert call(name, allow) == str(project / "jobs/deep/inner.py")


@pytest.mark.parametrize("module", ["jobs.reports", "plain.script", "other"])
def test_an_allowed_folder_allows_nothing_outside_of_it(project: Path, module: str) -> None:
    assert allowed("jobs/deep").find(f"{module}:run") is None
    assert allowed("jobs.deep").find(f"{module}:run") is None


@pytest.mark.parametrize(
    "name",
    [
        "venv/lib/tool.py:run",
        ".venv/lib/tool.py:run",
        "vendor/site-packages/tool.py:run",
        "environment/lib/tool.py:run",
        "venv.lib.tool:run",
        "environment.lib.tool:run",
        "../outside.py:run",
        "plain/../../outside.py:run",
    ],
)
def test_installed_packages_in_an_allowed_folder_are_not_allowed(project: Path, name: str) -> None:
    assert allowed(".").find(name) is None


def test_a_virtual_environment_can_be_allowed_explicitly(project: Path) -> None:
    assert call("tool.py:run", ".venv/lib") == str(project / ".venv/lib/tool.py")


def test_a_folder_does_not_allow_a_module_of_its_name_elsewhere(project: Path) -> None:
    """`venv:create` with `clear=True` empties any directory."""
    assert allowed(".").find("venv:create") is None
    (project / "shutil").mkdir()
    assert allowed(".").find("shutil:rmtree") is None  # imported long ago, from the standard library
    assert allowed("shutil").find("shutil:rmtree") is None


def test_links_out_of_an_allowed_folder_are_not_followed(project: Path) -> None:
    (project / "plain/linked.py").symlink_to(project.parent / "outside.py")
    (project / "plain/tools").symlink_to(project / ".venv/lib")
    for name in ("plain/linked.py:run", "plain.linked:run", "plain/tools/tool.py:run", "plain.tools.tool:run"):
        assert allowed(".").find(name) is None, name


def test_a_module_that_is_not_allowed_is_not_imported(project: Path) -> None:
    (project / "bomb").mkdir()
    (project / "bomb/__init__.py").write_text("raise SystemExit('imported')")
    (project / "bomb/inner.py").write_text(FUNCTION)
    for name in ("bomb:run", "bomb.inner:run", "bomb..inner:run", ".bomb:run", "bomb.:run", "antigravity.x:run"):
        assert allowed("jobs").find(name) is None
    assert not {"bomb", "antigravity"} & set(sys.modules)


def test_a_module_replaced_in_sys_modules_is_not_allowed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    monkeypatch.setitem(sys.modules, "jobs.alias", subprocess)
    assert allowed("jobs").find("jobs.alias:check_output") is None
    (project / "jobs/late.py").write_text("import subprocess, sys\nsys.modules[__name__] = subprocess\n")
    importlib.invalidate_caches()
    assert allowed(".").find("jobs.late:check_output") is None
    assert allowed("jobs.late").find("jobs.late:check_output") is None
    odd = types.ModuleType("odd")
    odd.__spec__ = None
    monkeypatch.setitem(sys.modules, "odd", odd)
    assert allowed(".").find("odd:run") is None
