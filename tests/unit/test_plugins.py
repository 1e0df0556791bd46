"""Plugins are found by entry points or by their folders, and loaded where they are used; the core loads none."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

from orchestrator import entry_points, executors
from orchestrator.domain.executors.registry import all_built_in, executor_names, plugin_of
from orchestrator.entry_points import EXECUTORS, own_plugins, plugins
from orchestrator.errors import ConfigurationError
from orchestrator.payloads.stores import open_store
from orchestrator.workers.executors.protocol import Setup
from orchestrator.workers.executors.registry import create, equipment
from tests.acceptance.executors.conftest import HARNESSES

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
CORE = ["cli", "api.app", "embedded", "executors", "scheduler.loop", "testing", "workers.process"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file with the entry points of an importable package."""
    information = tmp_path / "other-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield information / "entry_points.txt"
    sys.modules.pop("other_executors", None)


@pytest.mark.slow
def test_the_core_loads_no_plugin_and_no_library_of_plugins() -> None:
    code = f"""
import importlib, sys
for name in {CORE}:
    importlib.import_module(f"orchestrator.{{name}}")
print([name for name in sys.modules if name.startswith(("orchestrator.plugins", "rq.", "distributed.", "fsspec."))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("group", [group for group in PROJECT["entry-points"] if group != "pytest11"])
def test_each_plugin_folder_is_an_entry_point_of_the_project(group: str) -> None:
    assert PROJECT["entry-points"][group] == {name: point.value for name, point in own_plugins(group).items()}


def test_each_executor_has_an_extra_a_reference_entry_and_a_harness() -> None:
    assert set(own_plugins(EXECUTORS)) <= PROJECT["optional-dependencies"].keys()
    reference = (Path(__file__).parents[2] / "docs/reference.md").read_text(encoding="utf-8")
    assert {name for name, kind in all_built_in().items() if f"executors.{kind.__name__}\n" not in reference} == set()
    assert {*all_built_in()} - {harness.name for harness in HARNESSES} == set()


def test_plugins_are_found_without_installed_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [])
    entry_points._plugins.cache_clear()
    assert {*own_plugins(EXECUTORS), "http", "process", "pull"} == set(executor_names()) == set(all_built_in())
    entry_points._plugins.cache_clear()


def test_the_public_executor_names_are_those_of_the_plugins() -> None:
    kinds = {kind.__name__: kind for kind in all_built_in().values()}
    assert {name: getattr(executors, name) for name in kinds} == kinds
    with pytest.raises(AttributeError, match="has no attribute 'Rqq'"):
        _ = executors.Rqq


def test_a_package_may_declare_a_class_or_a_plugin(installed: Path) -> None:
    (installed.parents[1] / "other_executors.py").write_text(
        """
from typing import ClassVar
from orchestrator.executors import ExecutorOptions, ExecutorPlugin

class Plain(ExecutorOptions, frozen=True, kw_only=True):
    executor: ClassVar[str] = "plain"

class PlainExecutor:
    options = Plain
    def __init__(self, setup): ...

class Careful(ExecutorOptions, frozen=True, kw_only=True):
    executor: ClassVar[str] = "careful"

CAREFUL = ExecutorPlugin(
    options=Careful, driver="other_drivers:Driver", equipment=lambda environ: [f"careful {environ['SITE']}"]
)
LACKING = ExecutorPlugin(options=Careful, driver="other_drivers:Driver", needs=("no_such_package",))
"""
    )
    installed.write_text(
        "[orchestrator.executors]\nplain = other_executors:PlainExecutor\ncareful = other_executors:CAREFUL\n"
    )
    invalidate_caches()
    environ = {"SITE": "north"}
    assert equipment("plain", Setup(), environ) == ["plain"]
    assert equipment("careful", Setup(), environ) == ["careful north"], (
        "and its driver, which is not there, is not loaded"
    )
    assert type(create("plain", Setup())).__name__ == "PlainExecutor"
    installed.write_text("[orchestrator.executors]\ncareful = other_executors:LACKING\n")
    entry_points._plugins.cache_clear()
    assert equipment("careful", Setup(), environ) == []
    assert create("careful", Setup()) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:Executor", "cannot be loaded: ModuleNotFoundError"),
        ("orchestrator.plugins.executors.rq:PLUGIN", "gives its name as 'rq'"),
        ("orchestrator.settings:Settings", "has no `options`"),
    ],
)
def test_an_invalid_entry_point_is_reported_and_blocks_no_worker(installed: Path, value: str, said: str) -> None:
    installed.write_text(f"[orchestrator.executors]\nbroken = {value}\n")
    with pytest.raises(ConfigurationError, match=said):
        plugin_of("broken")
    assert equipment("broken", Setup()) == ["broken"], "so that its tasks fail with the reason"


def test_no_package_replaces_a_built_in_executor(installed: Path) -> None:
    installed.write_text("[orchestrator.executors]\nrq = orchestrator.settings:Settings\n")
    assert plugins(EXECUTORS)["rq"].value == "orchestrator.plugins.executors.rq:PLUGIN"


_STORE = """
from pathlib import Path
from urllib.parse import urlsplit
from orchestrator.payloads.stores import Folder

class MyStore(Folder):
    def __init__(self, url):
        super().__init__(Path(urlsplit(url).path))
"""


@pytest.mark.slow
def test_a_custom_payload_store_is_opened_and_tested_as_documented(installed: Path) -> None:
    folder = installed.parents[1]
    page = (Path(__file__).parents[2] / "docs" / "payloads.md").read_text().partition("### Your own store")[2]
    points, suite = re.findall(r"```(?:toml|python)\n(.*?)```", page, re.DOTALL)[:2]
    (folder / "my_package.py").write_text(_STORE)
    (folder / "test_my_store.py").write_text(suite)
    installed.write_text(re.sub(r'project.entry-points.|"', "", points))
    invalidate_caches()
    store = open_store("mine:///somewhere", "space")
    assert (type(store).__name__, store.place) == ("MyStore", "/somewhere/space")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_store.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert "8 passed" in done.stdout, done.stdout
