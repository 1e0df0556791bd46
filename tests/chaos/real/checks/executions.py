"""Checks that every end of a task belongs to an execution, and that executions of a task do not overlap."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from orchestrator.domain.executors.registry import task_name
from tests.chaos.real.arena import Arena
from tests.chaos.real.checks.rows import shown, token_of
from tests.chaos.real.journal import Execution
from tests.chaos.real.project import callbacks, tasks
from tests.chaos.real.project.pulls import pulled

RETRIES = {tasks.work_unluckily.name: tasks.RETRIES, callbacks.work_and_be_followed.name: callbacks.RETRIES}
"""How many failures a task survives, by name."""


def check_ends(arena: Arena, ended: dict[str, Any]) -> Iterator[str]:
    """Check that every committed task and run exists, and that no task is both open and ended."""
    for task in arena.journal.committed_tasks() - ended.keys():
        yield f"task {task} was enqueued and has no end"
    runs = {str(row["id"]) for row in arena.sql("SELECT id FROM orchestrator.runs")}
    for run in arena.journal.committed_runs() - runs:
        yield f"run {run} was started and is gone"
    for row in arena.sql("SELECT id FROM orchestrator.ended_tasks JOIN orchestrator.tasks USING (id)"):
        yield f"task {row['id']} has ended and is open"


def check_executions(ended: dict[str, Any], executions: list[Execution]) -> Iterator[str]:
    """Check that every success was executed and has that execution's result, and that every failure has a reason."""
    by_attempt = {(execution.task, execution.attempt): execution for execution in executions}
    for (task, attempt), number in Counter((item.task, item.attempt) for item in executions).items():
        if number > 1:
            yield f"attempt {attempt} of task {task} ran {number} times"
    failures = Counter(execution.task for execution in executions if execution.outcome == "failed")
    began = {
        item.task for item in executions if item.outcome != "cut short"
    }  # the start of an interrupted execution may be unknown to the leader
    for task, row in ended.items():
        if row["id"] == row["run_id"] or row["name"] in (pulled.name, task_name("pull")):
            continue  # turns, pulled tasks and their ends are checked in journeys.py and pulls.py
        if row["status"] == "success":
            execution = by_attempt.get((task, row["attempt"]))
            if execution is None or execution.outcome != "success":
                yield f"task {task} succeeded in attempt {row['attempt']}, and the log says {execution}"
            elif token_of(row["result"]) != f"{task}/{execution.attempt}/{execution.pid}":
                yield f"task {task} has the result {token_of(row['result'])}, not that of {execution}"
        elif row["status"] == "failed":
            unlucky = row["failures"] > RETRIES.get(row["name"], 0) and failures[task] >= row["failures"]
            kind = (row["error"] or {}).get("kind")
            expired = kind == "TaskExpired" and task not in began
            if not (unlucky or expired or kind == "WorkerLost"):
                yield f"task {task} failed without a reason: {shown(row)}"
        if row["failures"] > failures[task]:
            yield f"task {task} is charged {row['failures']} failures, and the log has {failures[task]}"


def overlaps(arena: Arena, executions: list[Execution]) -> Iterator[tuple[Execution, Execution, bool]]:
    """Yield overlapping attempts of a task, and whether the overlap is allowed.

    It is allowed if the first worker could not be heard for so long that the leader had to consider it dead.
    """
    journal = arena.journal
    heartbeat_gap = arena.settings.worker_ttl - arena.settings.heartbeat
    by_task = defaultdict(list)
    for execution in executions:
        by_task[execution.task].append(execution)
    for attempts in by_task.values():
        for first, second in combinations(sorted(attempts, key=lambda item: item.began), 2):
            if second.began < journal.end_of(first):
                yield first, second, journal.was_unheard(first.worker, first.began, second.began, heartbeat_gap)


def check_overlaps(arena: Arena, executions: list[Execution]) -> Iterator[str]:
    """Check that no two attempts overlap while the first worker is alive and can be heard."""
    for first, second, excused in overlaps(arena, executions):
        if not excused:
            yield (
                f"task {first.task}: attempt {second.attempt} began {second.began - first.began:.2f} s after attempt "
                f"{first.attempt}, which went on for {arena.journal.end_of(first) - second.began:.2f} s more, and "
                f"whose worker was alive and could be heard: {first}, {second}"
            )
