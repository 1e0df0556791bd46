"""Compositions whose workers and schedulers are killed: each callback runs once, with the results before it."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path

import project
import pytest

from orchestrator import chain, chord, group
from tests.acceptance.stack import Stack
from tests.waiting import eventually

CALLBACKS = """
SELECT count(*), count(DISTINCT run_id), count(*) FILTER (WHERE status = 'success')
  FROM orchestrator.ended_tasks WHERE name = 'project.total'
"""


@pytest.fixture
def settings() -> dict[str, float]:
    """Short timeouts, so that the tests take little time."""
    return {"worker_ttl": 2.0, "heartbeat": 0.5, "lease": 2.0}


def have_ended(stack: Stack, number: int) -> bool:
    ended = "SELECT count(*) FROM orchestrator.runs WHERE ended_at IS NOT NULL AND parent_run IS NULL"
    return int(stack.scalar(ended)) >= number


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "kills"), [pytest.param(60, 3, id="some"), pytest.param(1_000, 30, id="many", marks=pytest.mark.long)]
)
def test_every_callback_succeeds_once_although_workers_and_leaders_die(
    stack: Stack, tmp_path: Path, count: int, kills: int
) -> None:
    for _ in range(2):
        stack.scheduler()
    workers = [stack.worker(processes=2) for _ in range(2)]
    path, chance = str(tmp_path / "log"), random.Random(count)
    runs = []
    for number in range(count):
        header = group(project.add.s(number, other) for other in range(5))
        if number % 5 == 0:
            header = group(chain(project.add.s(number, other), project.add.s(1)) for other in range(3))
        runs.append(chord(header, project.total.s(path, str(number))).start())
    for kill in range(kills):
        done = count * kill // kills
        eventually(partial(have_ended, stack, done), f"{done} runs have ended", 120)
        if chance.random() < 0.2:
            stack.leader().kill()
            stack.scheduler()
        else:
            workers.pop(chance.randrange(len(workers))).kill()
            workers.append(stack.worker(processes=2))
    for number, run in enumerate(runs):
        chained = number % 5 == 0
        expected = 3 * number + 3 + 3 if chained else 5 * number + 10
        assert run.result(timeout=120) == expected, number

    assert stack.sql(CALLBACKS) == [(count, count, count)]
    ran = Counter((tmp_path / "log").read_text().split())
    attempts = "SELECT run_id, attempt FROM orchestrator.ended_tasks WHERE name = 'project.total'"
    tried = {str(run): attempt for run, attempt in stack.sql(attempts)}
    assert [number for number, run in enumerate(runs) if not 1 <= ran[str(number)] <= tried[run.id]] == []


@pytest.mark.parametrize("on_success", [True, False])
def test_a_composition_starts_once_per_attempt_or_only_on_success(
    stack: Stack, tmp_path: Path, on_success: bool
) -> None:
    stack.scheduler()
    stack.worker(processes=2)
    handle = project.compose.enqueue(str(tmp_path / "log"), on_success=on_success)
    run = project.app.run(handle.result(timeout=60))
    assert run.result(timeout=60) == 15
    assert run.parent() == handle
    assert len(handle.children()) == stack.scalar("SELECT count(*) FROM orchestrator.runs") == (1 if on_success else 2)
    assert run.id in [child.id for child in handle.children()]
