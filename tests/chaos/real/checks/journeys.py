"""Checks that code workflows ran every step once, received every message, and returned the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from orchestrator.domain.ids import successor_id
from tests.chaos.real.arena import Arena
from tests.chaos.real.checks.rows import shown, token_of, value_of
from tests.chaos.real.project.journeys import LEG, ROW, UNDO

_RUNS = """
SELECT r.id::text, r.status, r.stuck, t.result, t.error, coalesce(c.id::text, '') AS child
  FROM orchestrator.runs r
  LEFT JOIN orchestrator.ended_tasks t ON t.id = r.id
  LEFT JOIN orchestrator.runs c ON c.parent_run = r.id
 WHERE r.workflow = 'journey'
"""
_LEFT = """
SELECT 'timer' AS kind, run_id, id FROM orchestrator.timers
 UNION ALL SELECT 'promise', run_id, id FROM orchestrator.promises
 UNION ALL SELECT 'resolution', run_id, NULL FROM orchestrator.resolutions
"""
_ROUNDS = """
SELECT id, status, reason, parent_run IS NOT NULL AS guarded FROM orchestrator.runs
 WHERE workflow = 'rounds' AND reason IS DISTINCT FROM 'continued'
"""
_INQUIRIES = """
SELECT r.id::text, r.status, r.reason, r.stuck, t.result FROM orchestrator.runs r
  LEFT JOIN orchestrator.ended_tasks t ON t.id = r.id WHERE r.workflow = 'inquiry'
"""
_CONTINUED = ("success", "continued")
_MAX_ROUNDS = 200
"""More rounds than a run can complete within its time."""


def check_journeys(arena: Arena, ended: dict[str, Any]) -> Iterator[str]:
    """Check every journey by the records of its steps and its clients."""
    journal = arena.journal
    widths = {journey: int(width) for journey, width in journal.of_clients("journey")}
    cancelled = {task for (task,) in journal.of_clients("cancel")}
    steps: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for journey, name, task in journal.of_tasks("step"):
        steps[journey][name].add(task)
    sent = _sent_messages(arena)
    failing = {str(row["run_id"]) for row in ended.values() if row["status"] == "failed" and row["id"] != row["run_id"]}
    for row in arena.sql(_LEFT):
        yield f"left behind by a journey: {shown(row)}"
    for run in arena.sql(_RUNS):
        journey = run["id"]
        for name, tasks in steps[journey].items():
            if len(tasks) > 1:
                yield f"journey {journey} took step {name} {len(tasks)} times: {sorted(tasks)}"
        if run["status"] == "success":
            yield from _check_success(run, widths.get(journey), steps[journey], ended)
            yield from _check_received(run, sent)
        elif run["status"] == "cancelled":
            if journey not in cancelled:
                yield f"journey {journey} was cancelled, and by nobody"
            if steps[journey].keys() & {*ROW} and UNDO not in steps[journey]:
                yield f"journey {journey} was cancelled after {sorted(steps[journey])}, and nothing was undone"
        elif not failing & {journey, run["child"]}:
            yield f"journey {journey} failed, and none of its steps did: {shown(run)}"


def _sent_messages(arena: Arena) -> dict[tuple[str, str, str], list[int]]:
    """Return the numbers of messages that clients began to send (`saying`), and of acknowledged ones (`said`)."""
    sent: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for word in ("saying", "said"):
        for kind, run, number in arena.journal.of_clients(word):
            sent[word, kind, run].append(int(number))
    return sent


def _check_success(
    run: dict[str, Any], width: int | None, steps: dict[str, set[str]], ended: dict[str, Any]
) -> Iterator[str]:
    """Check that exactly the expected steps ran, and that the run returned their results."""
    result = value_of(run["result"])
    expected = {f"beside-{number}" for number in range(result["width"] if width is None else width)} | {*ROW, *LEG}
    tokens = result["tokens"]
    if tokens.keys() != expected or steps.keys() != expected:
        yield f"journey {run['id']}: expected {sorted(expected)}, it returned {sorted(tokens)}, {sorted(steps)} ran"
    for name, token in tokens.items():
        task = token.partition("/")[0]
        if task not in ended or token != token_of(ended[task]["result"]) or steps[name] != {task}:
            yield f"journey {run['id']} was told {token} of step {name}, and {sorted(steps[name])} ran"


def _check_received(run: dict[str, Any], sent: dict[tuple[str, str, str], list[int]]) -> Iterator[str]:
    """Check that a run received each message sent before its answer once and in order, and no unsent message."""
    result = value_of(run["result"])
    received = {"signal": result["heard"], "update": result["added"], "answer": [result["answer"]]}
    first_answer = min(sent["saying", "answer", run["id"]])  # may be effective although its sender got an error
    for kind, numbers in received.items():
        saying, said = sent["saying", kind, run["id"]], sent["said", kind, run["id"]]
        if kind == "signal":
            said = [number for number in said if number < first_answer]
        if len({*numbers}) != len(numbers) or not {*numbers} <= {*saying}:
            yield f"journey {run['id']} heard {kind} {numbers}, and {saying} were said"
        if [number for number in numbers if number in said] != said:
            yield f"journey {run['id']} heard {kind} {numbers}, and was certainly told {said}"


def check_rounds(arena: Arena) -> Iterator[str]:
    """Check that runs which continue forever ended for a reason: with their parent, by timeout, or by cancellation."""
    cancelled = {task for (task,) in arena.journal.of_clients("cancel")}
    successors: dict[str, str] = {}
    for run in cancelled:
        last = UUID(run).bytes
        for _ in range(_MAX_ROUNDS):
            successors[str(UUID(bytes=last))] = run
            last = successor_id(last)
    for row in arena.sql(_ROUNDS):
        in_time = row["status"] == "failed" and row["reason"] == "timed out" and not row["guarded"]
        if not in_time and not (row["status"] == "cancelled" and (row["guarded"] or str(row["id"]) in successors)):
            yield f"a run that goes on for ever ended, and nobody knows why: {shown(row)}"


def check_inquiries(arena: Arena) -> Iterator[str]:
    """Check that each inquiry, over all its continued runs, ended with an answer and received all messages."""
    sent = _sent_messages(arena)
    runs = {row["id"]: row for row in arena.sql(_INQUIRIES)}
    following = {run: str(UUID(bytes=successor_id(UUID(run).bytes))) for run in runs}
    for first in runs.keys() - {*following.values()}:
        chain = [first]
        while following[chain[-1]] in runs:
            chain.append(following[chain[-1]])
        last = runs[chain[-1]]
        unfinished = [runs[run] for run in chain[:-1] if (runs[run]["status"], runs[run]["reason"]) != _CONTINUED]
        if last["status"] != "success" or last["reason"] is not None or unfinished:
            yield f"an inquiry of {len(chain)} runs came to no answer: {[shown(run) for run in (*unfinished, last)]}"
            continue
        sent_to_chain = {
            (word, kind, last["id"]): sorted(number for run in chain for number in sent[word, kind, run])
            for word in ("saying", "said")
            for kind in ("signal", "update", "answer")
        }
        yield from _check_received(last, sent_to_chain)
