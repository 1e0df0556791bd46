"""The decision after a failed or lost attempt: another attempt, or the end of the task."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import msgspec

from orchestrator.domain.code.activation import Activated
from orchestrator.domain.tasks.retry import RetryPolicy, backoff_delay, has_tries_left
from orchestrator.domain.tasks.task import (
    LOST,
    Enqueued,
    Failed,
    Lost,
    Noted,
    Recalled,
    Returned,
    Started,
    Succeeded,
    TaskOptions,
)

Report = Started | Succeeded | Failed | Returned | Lost | Enqueued | Noted | Activated | Recalled
AttemptReport = Started | Succeeded | Failed | Returned | Lost | Activated


class Flush(msgspec.Struct, frozen=True, array_like=True):
    """A batch of reports from one worker."""

    worker: str
    reports: list[Report]
    turns: list[Activated] = []
    """The turns that follow successes among the reports."""


_RANK = {Started: 0, Returned: 1, Lost: 2, Failed: 3, Succeeded: 4, Activated: 4}


def fold(reports: Iterable[tuple[str, AttemptReport]]) -> dict[bytes, tuple[str, AttemptReport]]:
    """Reduce reports to one per task: the newest attempt's, and among these the most conclusive.

    A worker that was cut off may repeat itself, and its parent may contradict it. A finished attempt stands.
    """
    folded: dict[bytes, tuple[str, AttemptReport]] = {}
    for pair in reports:
        report = pair[1]
        previous = folded.get(report.id)
        if previous is None or _precedence(report) > _precedence(previous[1]):
            folded[report.id] = pair
    return folded


def fold_notes(notes: Iterable[Noted]) -> dict[bytes, Noted]:
    """Reduce notes to one per task: the last note of the newest attempt."""
    folded: dict[bytes, Noted] = {}
    for note in notes:
        previous = folded.get(note.id)
        if previous is None or note.attempt >= previous.attempt:
            folded[note.id] = note
    return folded


def _precedence(report: AttemptReport) -> tuple[int, int]:
    return report.attempt, _RANK[type(report)]


class RetryTask(msgspec.Struct, frozen=True):
    """Put the task back to pending."""

    delay: float
    failures: int = 0
    """Failures to add to the task's count."""
    losses: int = 0
    """Losses to add to the task's count."""


class FailTask(msgspec.Struct, frozen=True):
    reason: str
    failures: int = 0
    losses: int = 0


def after_failure(report: Failed, policy: RetryPolicy, failures: int, roll: float) -> RetryTask | FailTask:
    """Decide what follows a failed attempt of a task that had failed `failures` times before."""
    if not report.charged:
        return RetryTask(delay=report.delay or 0.0)
    failures += 1
    if report.retryable and has_tries_left(policy, failures):
        delay = backoff_delay(policy, failures, roll) if report.delay is None else report.delay
        return RetryTask(delay=delay, failures=1)
    return FailTask(reason=report.error.kind, failures=1)


def within_starts(
    decision: RetryTask | FailTask, options: TaskOptions, starts: int, *, lost: bool
) -> RetryTask | FailTask:
    """Replace a retry with a failure if the task, started `starts` times before this attempt, may not start again."""
    may_start = not (lost and options.on_loss == "fail") and starts + 1 < (options.max_starts or inf)
    if may_start or isinstance(decision, FailTask):
        return decision
    reason = LOST if lost else "started too often"
    return FailTask(reason=reason, failures=decision.failures, losses=decision.losses)


DEATHS_PER_LOSS = 10
"""How many deaths of shared processes or machines count as much as one death of a process of the task's own."""


def after_loss(alone: bool, losses: int, deaths: int, limit: int) -> RetryTask | FailTask:
    """Decide what follows the death of a task's process, after `losses` of processes of its own and `deaths` of any.

    Only the death of a process that the task had to itself is charged: a shared process may have died from another
    task. So the first loss is free, and all later attempts run in a process of their own, where the death of their
    worker is free. A task that is present in many deaths is not retried for ever, either: see `DEATHS_PER_LOSS`.
    """
    charged = 1 if alone else 0
    if losses + charged >= limit or deaths + 1 >= DEATHS_PER_LOSS * limit:
        return FailTask(reason=LOST, losses=charged)
    return RetryTask(delay=0.0, losses=charged)


FIRST_PAUSE, MAX_PAUSE = 60.0, 3600.0
"""Seconds before a stuck run is retried, doubled each time."""


def pause_after_loss(times: int) -> float:
    """Return the seconds before a stuck run is retried. `times`: the deaths of its processes beyond the limit."""
    return min(FIRST_PAUSE * 2.0 ** min(times, 16), MAX_PAUSE)


def after_loss_of_turn(alone: bool, losses: int, deaths: int, limit: int) -> RetryTask | FailTask:
    """Decide what follows the death of a turn's process. A FailTask means that the run is stuck.

    Only deaths of processes of its own make a run stuck. With too many shared deaths, it is retried rarely.
    """
    decision = after_loss(alone, losses, deaths, limit)
    if isinstance(decision, FailTask) and losses + decision.losses < limit:
        return RetryTask(delay=pause_after_loss(deaths + 1 - DEATHS_PER_LOSS * limit), losses=decision.losses)
    return decision


def counts_starts(options: str | None) -> bool:
    """Return whether stored options limit the number of starts."""
    return options is not None and ('"on_loss"' in options or '"max_starts"' in options)
