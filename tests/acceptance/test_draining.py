"""A worker that is drained by a command from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import project
import pytest
from click.testing import CliRunner

from orchestrator.cli import main
from tests.acceptance.stack import Stack
from tests.waiting import eventually

application = project.app
SETTINGS = {"heartbeat": 0.5, "worker_ttl": 60.0, "drain_timeout": 300.0}
"""Long timeouts: on a slow machine no worker counts as lost, and running tasks are awaited."""


def started(path: Path) -> int:
    """Wait until a task has begun; return its process id."""
    return int(eventually(lambda: path.read_text() if path.exists() else "", f"a start in {path.name}"))


@pytest.fixture
def go(life: Stack, tmp_path: Path) -> Iterator[Path]:
    """The file that held tasks wait for. It is created in any case, so that workers can end."""
    yield tmp_path / "go"
    (tmp_path / "go").touch()


def test_a_drained_worker_finishes_its_task_and_takes_no_more(
    life: Stack, tmp_path: Path, go: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ORCHESTRATOR_DATABASE_URL", "ORCHESTRATOR_REDIS_URL"):
        monkeypatch.setenv(name, life.environment[name])
    worker = life.worker("--concurrency", "1")
    running = project.held.enqueue(str(tmp_path / "running"), str(go))
    old = started(tmp_path / "running")
    waiting = project.held.enqueue(str(tmp_path / "waiting"), str(go))
    heavy = "SELECT id FROM orchestrator.workers WHERE pid = :pid AND least(memory, parent_memory) > 1000000"
    [[id]] = eventually(lambda: life.sql(heavy, pid=old), "the leader has heard what it weighs")
    told = CliRunner().invoke(main, ["workers", "drain", id])
    assert told.exit_code == 0, told.output
    assert "accepts no more tasks, finishes those that it runs, and exits" in told.output
    eventually(lambda: worker.logged("draining"), "it drains")
    other = life.worker("--concurrency", "1")
    new = started(tmp_path / "waiting")
    assert new != old
    assert worker.is_running(), "it finishes what it runs"
    go.touch()
    assert (running.result(60), waiting.result(60), worker.wait(60)) == (old, new, 0)
    charged = "SELECT sum(failures + losses) FROM orchestrator.ended_tasks WHERE id = ANY(CAST(:ids AS uuid[]))"
    assert life.scalar(charged, ids=[running.id, waiting.id]) == 0
    assert other.is_running(), "nobody has told this one"
    assert not other.logged("draining")
