"""The code of the guides that needs more than the application: web frameworks, a test session."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from orchestrator import Orchestrator
from tests.acceptance.pages import REPOSITORY, files_in, run
from tests.acceptance.stack import Stack
from tests.acceptance.test_documents import folder
from tests.acceptance.test_pytest_plugin import PLUGIN
from tests.waiting import eventually

__all__ = ["folder"]

SERVERS = {
    "fast": ["uvicorn", "fast:api", "--port"],
    "shop": ["gunicorn", "--preload", "--workers", "2", "shop:web", "-b"],
}


@pytest.mark.parametrize(
    ("module", "path", "result"),
    [("fast", "users/Ann", "welcome, Ann"), ("shop", "pictures/a.png", "a.png by shop")],
)
def test_the_web_framework_examples_enqueue_tasks(
    stack: Stack, folder: Path, module: str, path: str, result: str
) -> None:
    body = files_in(REPOSITORY / "docs" / "web.md")[f"{module}.py"]
    used_before_the_fork = f"\n\nBEFORE = {'resize' if module == 'shop' else 'welcome'}.enqueue('before').id\n"
    (folder / f"{module}.py").write_text(body + used_before_the_fork)
    stack.scheduler()
    stack.worker("--app", f"{module}:tasks", folder=folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}" if module == "shop" else str(port)
    words = [sys.executable, "-m", *SERVERS[module], address]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(words, cwd=folder, env=stack.environment, stdout=log, stderr=log)
    try:
        eventually(lambda: _answers(port), f"the server answers, see {folder / 'server.log'}")
        ids = [_post(f"http://127.0.0.1:{port}/{path}") for _ in range(8)]
        with Orchestrator(stack.settings) as app:
            assert {app.handle(one).result(60) for one in ids} == {result}
    finally:
        server.terminate()
        server.wait(60)
    assert "Traceback" not in (folder / "server.log").read_text()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _post(url: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60) as answer:
        found: str = json.load(answer)["task"]
        return found


@pytest.mark.long  # test_pytest_plugin.py runs a session of its own in each build
def test_the_test_session_of_the_guide_passes(folder: Path) -> None:
    for name, body in files_in(REPOSITORY / "docs" / "testing.md").items():
        (folder / name).write_text(body)
    (folder / "pyproject.toml").write_text('[tool.orchestrator]\napp = "mail:app"\n')
    assert "7 passed" in run(folder, sys.executable, "-m", "pytest", "-q", *PLUGIN, ".")
