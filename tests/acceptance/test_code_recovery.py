"""Workflows as code whose processes are killed."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import project
import pytest

from orchestrator.domain.code.resets import allowed
from tests.acceptance.stack import Stack
from tests.waiting import eventually


@pytest.fixture
def settings() -> dict[str, float]:
    return {"worker_ttl": 3.0, "lease": 3.0}


def test_a_parallel_section_survives_the_death_of_scheduler_and_worker(stack: Stack, tmp_path: Path) -> None:
    path, go = tmp_path / "log", tmp_path / "go"
    scheduler = stack.scheduler()
    victim = stack.worker()
    handle = project.parallel.start(str(path), str(go), 6)
    in_flight = "SELECT count(*) FROM orchestrator.tasks WHERE status = 'running' AND run_id <> id"
    eventually(lambda: stack.scalar(in_flight) == 6, "six tasks run")
    scheduler.kill()
    victim.kill()
    go.touch()
    stack.worker(processes=2)
    stack.scheduler()
    assert handle.result(60) == [6, 7, 8, 9, 10, 11]
    lines = Counter(path.read_text().split())
    assert set(lines) == {str(number) for number in range(12)}
    assert all(lines[str(number)] == 1 for number in range(6, 12))
    kinds = [event.what.__struct_config__.tag for event in handle.history().events]
    assert Counter(kinds)["task_completed"] == 12
    assert kinds[-1] == "run_completed"


@pytest.mark.long
def test_a_history_of_fifty_megabytes_is_replayed_after_crashes(stack: Stack, tmp_path: Path) -> None:
    """The code kills its process, is replayed in a process of its own, and again after its worker was killed."""
    stack.scheduler()
    victim = stack.worker()
    handle = project.collect.start(50, str(tmp_path / "died"))
    eventually(lambda: stack.scalar("SELECT count(*) FROM orchestrator.promises"), "the promise is open", 90)
    assert (tmp_path / "died").exists()
    size = "SELECT sum(octet_length(data)) FROM orchestrator.histories"
    assert int(str(stack.scalar(size))) > 49_000_000
    victim.kill()
    stack.worker()
    handle.resolve("enough")
    assert handle.result(90) == 50 * 990_000


def test_runs_are_reset_once_while_schedulers_and_workers_die(stack: Stack) -> None:
    scheduler, worker = stack.scheduler(), stack.worker(processes=2)
    old = [project.steps.start(6) for _ in range(30)]
    assert {handle.result(60) for handle in old} == {6}
    to = allowed(old[0].history().events)
    with ThreadPoolExecutor(4) as pool:
        resets = [pool.submit(handle.reset, to=to[number % len(to)]) for number, handle in enumerate(old)]
        for least in (35, 45):
            eventually(partial(lambda least: runs(stack) >= least, least), f"{least - 30} are reset")
            scheduler.kill()
            worker.kill()
            scheduler, worker = stack.scheduler(), stack.worker(processes=2)
        new = [reset.result(60) for reset in resets]
    assert {handle.result(60) for handle in new} == {6}
    assert len({handle.id for handle in new}) == 30
    assert runs(stack) == 60
    assert stack.scalar("SELECT count(*) FROM orchestrator.inbox") == 0
    assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 0


def runs(stack: Stack) -> int:
    return int(str(stack.scalar("SELECT count(*) FROM orchestrator.runs")))
