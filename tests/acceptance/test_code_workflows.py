"""Workflows as code on real processes."""

from __future__ import annotations

import time

import project

from tests.acceptance.stack import Stack


def test_from_start_to_result(running: Stack) -> None:
    handle = project.both.start(1, 2)
    assert handle.result(20) == [2, 3]
    assert handle.status() == "success"


def test_a_hundred_steps_in_sequence(running: Stack) -> None:
    assert project.steps.start(3).result(20) == 3
    began = time.monotonic()
    assert project.steps.start(100).result(60) == 100
    took = time.monotonic() - began
    print(f"100 steps in sequence: {took:.2f} s")
    assert took < 20


def test_a_thousand_workflows_of_ten_steps(running: Stack) -> None:
    handles = [project.steps.start(10) for _ in range(1_000)]
    assert [handle.result(120) for handle in handles] == [10] * 1_000
    tasks = running.sql("SELECT run_id, count(*) FROM orchestrator.ended_tasks WHERE run_id <> id GROUP BY run_id")
    counts = {str(run): count for run, count in tasks}
    assert all(counts[handle.id] == 10 for handle in handles)
    assert running.scalar("SELECT count(*) FROM orchestrator.tasks") == 0
