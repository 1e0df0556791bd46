"""The programs under examples/ run as their first lines say."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

from tests.acceptance.pages import REPOSITORY, run, run_command, working
from tests.acceptance.test_documents import folder, served_folder
from tests.waiting import eventually

__all__ = ["folder", "served_folder"]
EXAMPLES = REPOSITORY / "examples"
SHOWN = {"agent", "approval", "branches", "nightly", "order", "per_customer", "services", "thumbnails", "web"}


@pytest.fixture
def example(served_folder: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with one of the examples."""
    for file in EXAMPLES.glob(f"{request.param}.*"):
        (served_folder / file.name).write_bytes(file.read_bytes())
    return served_folder


def test_each_example_is_tested_and_in_the_index() -> None:
    there = {file.stem for file in EXAMPLES.glob("*.py")} - {"quickstart", "tour", "test_hot_folder"}
    assert there == SHOWN
    index = (EXAMPLES / "README.md").read_text()
    for name in sorted(there):
        assert f"[{name}.py]({name}.py)" in index, name


@pytest.mark.parametrize("example", ["thumbnails"], indirect=True)
def test_thumbnails(example: Path) -> None:
    pictures = example / "pictures"
    pictures.mkdir()
    for number in range(3):
        Image.new("RGB", (400, 200), (number, 0, 0)).save(pictures / f"{number}.png")
    (pictures / "broken.jpg").write_text("no picture")
    with working(example, "thumbnails:app"):
        assert "failed: 3 thumbnails, 1 failed" in run(example, sys.executable, "thumbnails.py", "pictures")
    with Image.open(pictures / "thumbnails" / "2.jpg") as small:
        assert small.size == (128, 64)


@pytest.mark.parametrize("example", ["nightly"], indirect=True)
def test_nightly(example: Path) -> None:
    with working(example, "nightly:app"):
        assert "success {'day': '2026-01-31', 'total': " in run(example, sys.executable, "nightly.py", "2026-01-31")
        days = ("--from", "2026-01-01", "--to", "2026-01-04")
        run_command(example, "orchestrator", "schedules", "backfill", "nightly-sales", *days, "--watch")
        runs = json.loads(run_command(example, "orchestrator", "runs", "list", "--workflow", "nightly-sales", "--json"))
        assert [row["status"] for row in runs["runs"]] == ["success"] * 4


@pytest.mark.parametrize("example", ["approval"], indirect=True)
def test_approval(example: Path) -> None:
    def run_details(order: str) -> str:
        return run_command(example, "orchestrator", "runs", "show", order)

    with working(example, "approval:app"):
        for order, approved in (("o-1", True), ("o-2", False)):
            assert "on its way" in run(example, sys.executable, "approval.py", order)
            eventually(lambda order=order: "promise approval" in run_details(order), "it waits for its approval")  # type: ignore[misc]
            decision = json.dumps({"approved": approved, "by": "Ann"})
            run_command(example, "orchestrator", "runs", "resolve", order, "approval", decision)
        eventually(lambda: "parcel-of-o-1" in run_details("o-1"), "it is shipped")
        eventually(lambda: "turned down by Ann" in run_details("o-2"), "it is turned down")
        refunds = run_command(example, "orchestrator", "tasks", "list", "--name", "approval.refund", "--json")
        assert [task["status"] for task in json.loads(refunds)["tasks"]] == ["success"]


@pytest.mark.parametrize("example", ["order"], indirect=True)
def test_order(example: Path) -> None:
    with working(example, "order:app"):
        assert run(example, sys.executable, "order.py").splitlines() == [
            "['pen is on its way']",
            "['pen is on its way', 'desk is on its way']",
            "not sold for 45650",
        ]
        assert "▶ ask" in run_command(example, "orchestrator", "flows", "show", "order").replace(
            "└─ ask ─▶ ask", "▶ ask"
        )
        runs = json.loads(run_command(example, "orchestrator", "flows", "runs", "order", "--json"))
        assert [row["status"] for row in runs["runs"]] == ["success"] * 3


@pytest.mark.parametrize("example", ["agent"], indirect=True)
def test_agent(example: Path) -> None:
    with working(example, "agent:app"):
        assert run(example, sys.executable, "agent.py").splitlines() == [
            "Painted for 200.",
            "['price of paint: 120', 200, 'bought paint']",
            "Out of budget after 1 steps.",
        ]


@pytest.mark.parametrize("example", ["per_customer"], indirect=True)
def test_per_customer(example: Path) -> None:
    with working(example, "per_customer:app"):
        globex, acme = run(example, sys.executable, "per_customer.py").splitlines()
    assert globex.startswith("globex 0 at ")
    seconds = float(acme.removeprefix("15 of acme after ").removesuffix(" s"))
    assert seconds >= 14 / 5 - 0.2  # five a second, the first at once


@pytest.mark.parametrize("example", ["web"], indirect=True)
def test_web(example: Path) -> None:
    door = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{door.getsockname()[1]}/reports"

    def ask(path: str, method: str) -> dict[str, object] | None:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{address}/{path}", method=method), timeout=30
            ) as answer:
                return json.load(answer)
        except OSError:
            return None

    with door, working(example, "web:tasks"):
        given = str(door.fileno())
        words = [sys.executable, "-m", "uvicorn", "web:api", "--fd", given]
        server = subprocess.Popen(words, cwd=example, pass_fds=[door.fileno()])
        try:
            ordered = eventually(lambda: ask("7", "POST"), "a report is ordered")
            assert ordered is not None
            done = eventually(lambda: _report(ask(str(ordered["id"]), "GET")), "the report is there")
            assert done == {"customer": 7, "pages": 3}
        finally:
            server.terminate()
            server.wait(60)


def _report(answer: dict[str, object] | None) -> object:
    return answer.get("report") if answer else None
