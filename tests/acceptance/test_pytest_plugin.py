"""The pytest fixtures for applications: services for a session, emptied for each test, and faults."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from tests.acceptance.pages import run
from tests.acceptance.test_documents import folder

__all__ = ["folder"]

TASKS = """
import time
from pathlib import Path

from orchestrator import Orchestrator, TaskContext

app = Orchestrator()


@app.task(retries=3, concurrency=1)
def add(a: int, b: int) -> int:
    return a + b


@app.task
def hold(ctx: TaskContext, path: str) -> int:
    Path(path).write_text(str(ctx.attempt))
    while ctx.attempt == 1:
        time.sleep(0.01)
    return ctx.attempt


@app.task
def again(path: str) -> None:
    with Path(path).open("a") as file:
        file.write("x")
    time.sleep(0.2)
    again.enqueue(path)


@app.task
def write_late(begun: str, path: str, go: str) -> None:
    Path(begun).touch()
    while not Path(go).exists():
        time.sleep(0.01)
    Path(path).touch()
"""

TESTS = """
import time
from pathlib import Path
from statistics import median

import pytest
import shop
from orchestrator import NotFound

left = []


def test_a_task_runs_and_is_forgotten(orchestrator_app):
    assert orchestrator_app is shop.app
    left.append(shop.add.enqueue(1, 2))
    assert left[0].result(timeout=30) == 3
    left.append(shop.add.options(delay=3600, unique_key="k").enqueue(1, 2))
    assert shop.app.start_many(shop.add, [(1, 2), (3, 4)]).results(timeout=30) == [3, 7]


def test_nothing_is_left_of_other_tests(orchestrator_app):
    for handle in left:
        with pytest.raises(NotFound):
            handle.status()
    assert shop.add.options(unique_key="k").enqueue(2, 2).result(timeout=30) == 4


def test_what_runs_and_waits_is_forgotten_too(orchestrator_services, tmp_path):
    shop.app.enqueue_many(shop.add, [(number, 1) for number in range(200)])
    shop.hold.enqueue(str(tmp_path / "held"))
    wait_for(tmp_path / "held")
    orchestrator_services.empty()
    started = time.monotonic()
    assert shop.add.enqueue(2, 3).result(timeout=30) == 5
    assert time.monotonic() - started < 20


def test_tasks_of_the_test_before_have_ended(orchestrator_services, tmp_path):
    chain, begun, late, go = (tmp_path / name for name in ("chain", "begun", "late", "go"))
    shop.again.enqueue(str(chain))
    shop.write_late.enqueue(str(begun), str(late), str(go))
    wait_for(chain)
    wait_for(begun)
    orchestrator_services.empty()
    links = chain.stat().st_size
    go.touch()
    for number in range(10):
        assert shop.add.options(delay=0.1).enqueue(number, 1).result(timeout=30) == number + 1
    assert (chain.stat().st_size, late.exists()) == (links, False)


def test_a_lost_worker_costs_an_attempt(orchestrator_services, tmp_path):
    handle = shop.hold.enqueue(str(tmp_path / "held"))
    wait_for(tmp_path / "held")
    orchestrator_services.lose_worker()
    assert handle.result(timeout=60) == 2


def test_redis_may_be_down(orchestrator_services):
    with orchestrator_services.redis_down():
        handle = shop.add.enqueue(3, 4)
        assert handle.status() == "pending"
    assert handle.result(timeout=60) == 7


def test_it_takes_milliseconds(orchestrator_services):
    took = []
    for number in range(30):
        assert shop.add.enqueue(number, 1).result(timeout=30) == number + 1
        started = time.perf_counter()
        orchestrator_services.empty()
        took.append(time.perf_counter() - started)
    print("median", median(took))
    Path("took").write_text(str(median(took)))


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""

PLUGIN = ("-p", "orchestrator.testing.pytest_plugin", "-p", "no:cacheprovider")


def test_services_last_a_session_and_are_emptied_for_each_test(folder: Path) -> None:
    (folder / "shop.py").write_text(TASKS)
    (folder / "test_shop.py").write_text(TESTS)
    (folder / "pyproject.toml").write_text('[tool.orchestrator]\napp = "shop:app"\n')
    with tempfile.TemporaryDirectory() as own:  # each run of pytest closes the usual folder to the user of Postgres
        Path(own).chmod(0o755)
        said = run(folder, sys.executable, "-m", "pytest", "-q", *PLUGIN, ".", PYTEST_DEBUG_TEMPROOT=own)
    assert "7 passed" in said
    assert float((folder / "took").read_text()) < 0.05  # about 3 ms on an idle machine


def test_a_missing_application_setting_is_explained(folder: Path) -> None:
    (folder / "test_shop.py").write_text("def test_it(orchestrator_app): ...\n")
    with pytest.raises(AssertionError, match=r"(?s)expected an application in the setting app.*Write app = .shop"):
        run(folder, sys.executable, "-m", "pytest", "-q", *PLUGIN, ".")
