"""With every executor, a watcher may be killed at each step of the protocol: the work starts once, and it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import TaskCancelled
from tests.acceptance.executors.harness import Stage
from tests.waiting import eventually

pytestmark = pytest.mark.long

WORKER = ("--app", "stumbling:app")


def prepare(stage: Stage, folder: Path, step: str) -> Path:
    """Start a worker whose process kills itself at a step; return a file that exists until then."""
    armed = folder / "stumble"
    armed.write_text(step, encoding="utf-8")
    stage.stack.environment["STUMBLE"] = str(armed)
    stage.worker(*WORKER)
    return armed


@pytest.mark.parametrize("step", ["before submit", "after submit", "before watch", "after watch", "before release"])
def test_work_starts_once_when_its_watcher_dies_at_any_step(stage: Stage, tmp_path: Path, step: str) -> None:
    armed = prepare(stage, tmp_path, step)
    work, id = stage.enqueue("return", value=step)
    assert work.result(60) == step
    eventually(lambda: not armed.exists(), "it has died")
    other, _ = stage.enqueue("return", value=2)
    assert other.result(60) == 2, "whoever comes after it goes on"
    assert (stage.harness.started(id), stage.failures(work)) == (1, 0)


@pytest.mark.parametrize("step", ["before cancel", "after cancel"])
def test_work_is_cancelled_when_its_watcher_dies_while_cancelling(stage: Stage, tmp_path: Path, step: str) -> None:
    armed = prepare(stage, tmp_path, step)
    held, id = stage.hold()
    held.cancel()
    with pytest.raises(TaskCancelled):
        held.result(60)
    eventually(lambda: not armed.exists(), "it has died")
    eventually(lambda: not stage.harness.is_running(id), "the work is ended all the same")
    assert stage.harness.started(id) == 1
