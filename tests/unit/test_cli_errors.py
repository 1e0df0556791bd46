"""Common mistakes end in a message: folders, files and outputs that cannot be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.settings import load_settings

pytestmark = pytest.mark.slow

NEXT = ("schedules", "next", "--every", "1h", "-n", "1")
"""A command that needs no services."""


def orchestrator(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", *words]
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, timeout=60, **given)


def test_dev_rejects_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".orchestrator").touch()  # like a read-only folder, also for root
    refused = CliRunner().invoke(main, ["dev"])
    assert refused.exit_code == 1
    assert "keeps its data in" in refused.stderr
    assert "which is not writable: File exists. Start it in a folder of your own" in refused.stderr
    assert "Traceback" not in refused.output


def test_a_settings_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text("[tool.orchestrator]")

    def refuse(self: Path, *_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)  # root could read any file
    refused = CliRunner().invoke(main, ["status"])
    assert refused.stderr == f"Error: {tmp_path}/pyproject.toml cannot be used: Permission denied.\n"


def test_an_inaccessible_folder_has_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)  # as for users other than root
    assert load_settings(tmp_path, environ={}).app == ""


def test_a_deleted_current_folder_is_reported(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"rmdir {gone}; exec {sys.executable} -P -m orchestrator status"
    refused = subprocess.run(["sh", "-c", script], cwd=gone, capture_output=True, text=True, timeout=60)
    assert refused.stderr == "Error: The current folder no longer exists. Change to another one.\n"


def test_a_full_or_closed_output_ends_without_a_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        refused = orchestrator(*NEXT, stdout=full)
    assert refused.stderr.startswith("Error: Cannot write output: no space left on device.\n")
    assert "Traceback" not in refused.stderr
    words = " ".join(NEXT)
    closed = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m orchestrator {words} >&- 2>&-"], capture_output=True, text=True, timeout=60
    )
    assert closed.returncode == 0


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "縮小"), ("latin-1", "??")])
def test_characters_that_the_output_lacks_are_replaced(tmp_path: Path, encoding: str, shown: str) -> None:
    """ASCII means an unknown encoding: nothing is replaced."""
    file = tmp_path / "w.yaml"
    file.write_text("name: 縮小\ntasks: {only: {task: job}}\n", encoding="utf-8")
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    text = orchestrator("workflows", "validate", str(file), env=environment)
    assert text.stdout == f"{file}: {shown}, 1 task, valid\n"
    document = orchestrator("workflows", "validate", str(file), "--json", env=environment).stdout
    assert json.loads(document)["files"][0]["name"] == "縮小"
