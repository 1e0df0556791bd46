"""What follows an attempt that failed, or whose process died: another one, or the end of the task."""

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
    """Everything that one worker reports at once."""

    worker: str
    reports: list[Report]
    turns: list[Activated] = []
    """Next turns, which follow successes among the reports."""


_RANK = {Started: 0, Returned: 1, Lost: 2, Failed: 3, Succeeded: 4, Activated: 4}


def fold(reports: Iterable[tuple[str, AttemptReport]]) -> dict[bytes, tuple[str, AttemptReport]]:
    """Reduce reports to one per task: the newest attempt's, and of that the one that says most.

    A worker that was cut off may repeat itself or be contradicted by its parent; what it finished stands.
    """
    folded: dict[bytes, tuple[str, AttemptReport]] = {}
    for pair in reports:
        report = pair[1]
        other = folded.get(report.id)
        if other is None or _weight(report) > _weight(other[1]):
            folded[report.id] = pair
    return folded


def fold_notes(notes: Iterable[Noted]) -> dict[bytes, Noted]:
    """Reduce notes to one per task: the newest attempt's last."""
    folded: dict[bytes, Noted] = {}
    for note in notes:
        other = folded.get(note.id)
        if other is None or note.attempt >= other.attempt:
            folded[note.id] = note
    return folded


def _weight(report: AttemptReport) -> tuple[int, int]:
    return report.attempt, _RANK[type(report)]


class RetryTask(msgspec.Struct, frozen=True):
    """The task goes back to pending."""

    delay: float
    failures: int = 0
    """Failures that are charged for this attempt."""
    losses: int = 0
    """Losses that are charged for this attempt."""


class FailTask(msgspec.Struct, frozen=True):
    reason: str
    failures: int = 0
    losses: int = 0


def after_failure(report: Failed, policy: RetryPolicy, failures: int, roll: float) -> RetryTask | FailTask:
    """Decide what follows a failed attempt of a task that had failed `failures` times before it."""
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
    """Return what follows an attempt of a task that had started `starts` times before it: another only if it may."""
    may_start = not (lost and options.on_loss == "fail") and starts + 1 < (options.max_starts or inf)
    if may_start or isinstance(decision, FailTask):
        return decision
    reason = LOST if lost else "started too often"
    return FailTask(reason=reason, failures=decision.failures, losses=decision.losses)


DEATHS_PER_LOSS = 10
"""Deaths of shared processes and machines that count as much as that of a process of its own."""


def after_loss(alone: bool, losses: int, deaths: int, limit: int) -> RetryTask | FailTask:
    """Decide what follows the death of a task's process, after `losses` of its own processes and `deaths` of any.

    Only the death of a process that it had to itself is held against the task: where others were, in the same worker or
    on the same machine, one of them may have been the cause. So the first loss is free, and from then on it runs in a
    process of its own, and dies with its worker free of charge. Still, one that is there whenever a worker dies is
    not tried for ever.
    """
    charged = 1 if alone else 0
    if losses + charged >= limit or deaths + 1 >= DEATHS_PER_LOSS * limit:
        return FailTask(reason=LOST, losses=charged)
    return RetryTask(delay=0.0, losses=charged)


FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0
"""Seconds before a stuck run is tried again: twice as many each time."""


def pause_after_loss(times: int) -> float:
    """Return in how many seconds a run that is stuck because its processes died is tried again, after so many times."""
    return min(FIRST_PAUSE * 2.0 ** min(times, 16), LONGEST_PAUSE)


def after_loss_of_turn(alone: bool, losses: int, deaths: int, limit: int) -> RetryTask | FailTask:
    """Decide what follows the death of the process of a turn; a failure means that its run is stuck.

    Only the deaths of processes of its own make a run stuck. One that is there whenever a worker dies is tried rarely.
    """
    decision = after_loss(alone, losses, deaths, limit)
    if isinstance(decision, FailTask) and losses + decision.losses < limit:
        return RetryTask(delay=pause_after_loss(deaths + 1 - DEATHS_PER_LOSS * limit), losses=decision.losses)
    return decision


def counts_starts(options: str | None) -> bool:
    """Say whether a task with these stored options may be started only so often."""
    return options is not None and ('"on_loss"' in options or '"max_starts"' in options)
