"""Deployment files match their schemas, and name commands, options and metrics that exist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from orchestrator.cli import main
from orchestrator.monitoring.system import WANTED

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "docs" / "deploy"
COMPOSE = FOLDER / "compose.yaml"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))
RESOURCES = yaml.safe_load((FOLDER / "kubernetes" / "kustomization.yaml").read_text())["resources"]
TOOLS = Path(sys.executable).parent


def accept(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def pods() -> Iterator[dict[str, Any]]:
    for name in RESOURCES:
        for document in yaml.safe_load_all((FOLDER / "kubernetes" / name).read_text()):
            if document["kind"] in ("Deployment", "Job"):
                yield document["spec"]["template"]["spec"]


def commands() -> Iterator[list[str]]:
    """Yield the arguments of `orchestrator` in all files."""
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        if "build" in service:
            yield service["command"]
    for pod in pods():
        yield pod["containers"][0]["args"]
    for unit in UNITS:
        yield unit.read_text().split("bin/orchestrator ")[1].splitlines()[0].split()


@pytest.mark.long
@pytest.mark.parametrize(
    ("schema", "path"),
    [("compose-spec", COMPOSE), ("github-workflows", REPOSITORY / ".github" / "workflows" / "release.yml")],
)
def test_compose_and_github_files_match_their_schemas(schema: str, path: Path) -> None:
    accept(TOOLS / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", path)


@pytest.mark.long
def test_kubernetes_resources_match_their_schemas() -> None:
    paths = sorted(path for path in (FOLDER / "kubernetes").iterdir() if path.name != "kustomization.yaml")
    assert sorted(RESOURCES) == [path.name for path in paths]
    said = accept(TOOLS / "kubernetes-validate", "--strict", *paths)
    assert said.count("passed for resource") == 8  # all but KEDA's


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/srv/shop/.venv/bin/orchestrator", "/bin/true"))
    assert accept("systemd-analyze", "verify", *tmp_path.iterdir()) == ""


def test_commands_and_options_exist() -> None:
    seen = set()
    for words in commands():
        command: click.Command | None = main
        for word in words:
            if isinstance(command, click.Group):
                command = command.get_command(click.Context(command), word)
                assert command is not None, words
            elif word.startswith("--"):
                assert command is not None
                assert any(word in option.opts for option in command.params), words
        seen.add(words[0])
    assert seen == {"db", "scheduler", "worker", "api"}


def test_services_run_without_root_on_a_read_only_file_system() -> None:
    assert "\nUSER 65534:65534\n" in (FOLDER / "Dockerfile").read_text()
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        assert "build" not in service or (service["read_only"] and service["tmpfs"] == ["/tmp"])
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    assert all("\nUser=shop\n" in unit.read_text() for unit in UNITS)


def test_autoscaling_names_an_existing_deployment_and_metric() -> None:
    scaled = yaml.safe_load((FOLDER / "kubernetes" / "autoscale.yaml").read_text())
    worker = next(yaml.safe_load_all((FOLDER / "kubernetes" / "worker.yaml").read_text()))
    assert scaled["spec"]["scaleTargetRef"]["name"] == worker["metadata"]["name"]
    assert "replicas" not in worker["spec"]  # or each deploy would undo the scaling
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert WANTED in query
