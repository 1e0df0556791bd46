"""The code of the guides that need more than the application: web frameworks, a test session, units and containers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.acceptance.pages import FENCE, REPOSITORY, files_in, run
from tests.acceptance.test_documents import folder

__all__ = ["folder"]

USE = """
import {module}
from starlette.testclient import TestClient

{calls}
assert {module}.tasks.handle(answer["task"]).status() == "pending", answer
"""


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        ("fast", "answer = TestClient(fast.api).post('/users/Ann').json()"),
        ("shop", "answer = shop.web.test_client().post('/pictures/a.png').json"),
    ],
)
def test_web_frameworks(database_url: str, redis_url: str, folder: Path, module: str, calls: str) -> None:
    (folder / f"{module}.py").write_text(files_in(REPOSITORY / "docs" / "web.md")[f"{module}.py"])
    urls = {"ORCHESTRATOR_DATABASE_URL": database_url, "ORCHESTRATOR_REDIS_URL": redis_url}
    run(folder, sys.executable, "-c", USE.format(module=module, calls=calls), **urls)


def test_a_test_session_runs_as_written(folder: Path) -> None:
    for name, body in files_in(REPOSITORY / "docs" / "testing.md").items():
        (folder / name).write_text(body)
    assert "6 passed" in run(folder, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".")


def test_what_is_deployed_can_be_read() -> None:
    text = (REPOSITORY / "docs" / "deployment.md").read_text()
    documents = [part for kind, body in FENCE.findall(text) if kind == "yaml" for part in yaml.safe_load_all(body)]
    assert [part.get("kind", "compose") for part in documents] == ["compose", "Deployment", "Deployment", "Job"]
    commands = [service["command"] for service in documents[0]["services"].values() if "command" in service]
    for deployed in documents[1:]:
        commands += [container["args"] for container in deployed["spec"]["template"]["spec"]["containers"]]
    assert {words[0] for words in commands} == {"db", "scheduler", "worker"}
    options = run(REPOSITORY, sys.executable, "-m", "orchestrator", "worker", "--help")
    for words in commands:
        assert all(word in options for word in words if word.startswith("--"))
