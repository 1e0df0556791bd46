"""Apply the reports of workers to tasks."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from orchestrator.domain.code.activation import Activated, Violation
from orchestrator.domain.ids import to_text
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.obstacles import hold_for_key
from orchestrator.domain.tasks.outcomes import (
    DEATHS_PER_LOSS,
    AttemptReport,
    FailTask,
    RetryTask,
    after_failure,
    after_loss,
    after_loss_of_turn,
    counts_starts,
    fold,
    fold_notes,
    pause_after_loss,
    within_starts,
)
from orchestrator.domain.tasks.task import (
    Enqueued,
    Failed,
    KnownTask,
    Lost,
    NewTask,
    Noted,
    Recalled,
    Returned,
    Started,
    Succeeded,
    TaskError,
    TaskOptions,
    executor_of,
    parse_options,
)
from orchestrator.scheduler.code.batches import apply_activations
from orchestrator.scheduler.code.next_turns import apply_last_turns, apply_steps, steps_of
from orchestrator.scheduler.code.runs import CodeRuns, mark_stuck
from orchestrator.scheduler.tasks.creation import create_enqueued, log_failed
from orchestrator.scheduler.tasks.locked import BEYOND_COMPLETION, LockedTasks, Reported
from orchestrator.scheduler.transaction import Transaction, isolate
from orchestrator.store.postgres_errors import error_line
from orchestrator.store.tasks import details, transitions, unique, waiting
from orchestrator.store.tasks.transitions import Adoption, AttemptEnd, AttemptStart, Moved, Requeue, Success
from orchestrator.store.tasks.waiting import EarlierAttempts, Policy
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import Malformed, decode_flush, encode
from orchestrator.transport.leader.streams import Inbound
from orchestrator.transport.quarantine import Refused
from orchestrator.transport.signing import Signing

log = get_logger("scheduler")


class Decoded(NamedTuple):
    """The decoded entries of one read of the events stream."""

    reports: list[Reported]
    refused: list[Refused]
    turns: list[tuple[str, Activated]]
    """Workers and their reported turns."""

    def are_plain_successes(self) -> bool:
        """Return whether all reports are successes that enqueue nothing."""
        return (
            bool(self.reports)
            and not self.turns
            and all(isinstance(report, Succeeded) and not report.children for _, _, report in self.reports)
        )


@dataclass
class Reports:
    """Applies the reports of a tick together."""

    code: CodeRuns
    loss_limit: int
    inline_result: int
    signing: Signing
    unknown_timeout: float
    """Seconds for which a task waits for a worker with its data key."""
    locked: LockedTasks

    def decode(self, inbound: Inbound) -> Decoded:
        """Decode entries of the events stream. Quarantine malformed and unsigned ones."""
        decoded = Decoded([], [], [])
        for entry, body in inbound.entries:
            try:
                flush = decode_flush(self.signing.body(inbound.stream, body))
            except Malformed as error:
                decoded.refused.append(Refused(entry, body, str(error)))
            else:
                decoded.reports.extend((entry, flush.worker, report) for report in flush.reports)
                decoded.turns.extend((flush.worker, turn) for turn in flush.turns)
        return decoded

    def apply(self, tx: Transaction, decoded: Decoded) -> None:
        tx.result.outgoing.set_aside += decoded.refused
        tx.result.counts.reports += len(decoded.reports)
        reports, turns = decoded.reports, () if tx.is_bisecting else decoded.turns
        if turns and (steps := steps_of(tx, self.code, (report for _, _, report in reports), turns)):
            apply_steps(tx, self.code, steps.values(), self.inline_result)
            ended = {id(step.success) for step in steps.values()}
            reports = [item for item in reports if id(item[2]) not in ended]
        self.apply_reports(tx, reports)
        if turns:
            apply_last_turns(tx, self.code, turns, self.inline_result)

    def apply_reports(self, tx: Transaction, reports: Sequence[Reported]) -> None:
        """Apply reports. A bisecting tick quarantines a bad report, and fails its attempt."""
        if tx.is_bisecting:
            isolate(tx, reports, self._apply, self._refuse)
        elif reports:
            self._apply(tx, reports)

    def _refuse(self, tx: Transaction, reported: Reported, error: Exception) -> None:
        entry, worker, report = reported
        if isinstance(report, Failed) and report.duration < 0:
            return  # even its failure cannot be stored, and the report is quarantined already
        tx.result.outgoing.set_aside.append(Refused(entry, encode(report), f"{worker}: {error_line(error)}"))
        if isinstance(report, (Succeeded, Failed, Activated)):
            self.apply_reports(tx, [(entry, worker, _refused(report, error))])

    def _apply(self, tx: Transaction, reports: Sequence[Reported]) -> None:
        """Move tasks to the states that their current attempts report, unless others have locked their rows."""
        if tx.is_bisecting or any(isinstance(report, BEYOND_COMPLETION) for _, _, report in reports):
            reports = self.locked.keep(tx, reports)
        attempts: list[tuple[str, AttemptReport]] = []
        children: list[NewTask] = []
        notes: list[Noted] = []
        recalled: list[KnownTask] = []
        for _, worker, report in reports:
            if isinstance(report, Enqueued):
                children.extend(report.tasks)
            elif isinstance(report, Noted):
                notes.append(report)
            elif isinstance(report, Recalled):
                recalled.extend(report.tasks)
            else:
                attempts.append((worker, report))
        started: list[AttemptStart] = []
        succeeded: list[tuple[str, Succeeded]] = []
        activated: list[tuple[str, Activated]] = []
        unhappy: list[tuple[str, Failed | Lost]] = []
        retried: list[Requeue] = []
        adopted: list[Adoption] = []
        returned: list[tuple[str, Returned]] = []
        for worker, report in fold(attempts).values():
            if isinstance(report, Succeeded):
                succeeded.append((worker, report))
            elif isinstance(report, Activated):
                activated.append((worker, report))
            elif isinstance(report, Started):
                started.append(AttemptStart(report.id, report.attempt, report.age, worker))
            elif isinstance(report, Returned):
                returned.append((worker, report))
            else:
                unhappy.append((worker, report))
        if returned:
            self._take_back(tx, returned, retried, adopted, unhappy)
        if children:
            create_enqueued(tx, children)
        if recalled:
            tx.result.outgoing.set_aside += find_gone(tx, recalled)
        if notes:  # while their attempts are current and may write notes
            details.save(tx.connection, fold_notes(notes).values())
        if succeeded:
            rows = [Success(r.id, r.attempt, r.result, r.duration, worker) for worker, r in succeeded]
            moved = [] if tx.succeed_and_commit is None else tx.succeed_and_commit(rows)
            moved = moved or transitions.succeed(tx.connection, rows, tx.now, tx.foreseen)
            enqueued = tx.result.note_successes(moved, [report for _, report in succeeded], self.inline_result)
            if enqueued:
                create_enqueued(tx, enqueued)
        if started:
            tx.result.capacity.begun += [(start.id, start.attempt) for start in started]
            tx.result.outgoing.moved += transitions.start(tx.connection, started, tx.now, notify=tx.is_watched)
        if activated:
            apply_activations(tx, self.code, activated, self.inline_result)
        endings = _decide(tx, unhappy, retried, self.loss_limit) if unhappy else []
        if unhappy and self.code.has_sent_queries:
            self.code.lost(tx, [report for _, report in unhappy if isinstance(report, Lost)])
        lingering = {report.id for _, report in unhappy if isinstance(report, Failed) and report.lingering}
        if adopted:
            transitions.adopt_executors(tx.connection, adopted)
        if retried:
            tx.result.wake.delayed |= any(row.delay > 0 for row in retried)
            tx.result.wake.handed_back |= any(row.outcome is None for row in retried)
            requeued = transitions.requeue(tx.connection, retried, tx.now)
            tx.result.note(requeued, lingering=lingering)
            tx.result.counts.time(requeued, retried)
            outcomes = {row.id: row.outcome for row in retried}  # returned attempts have none
            tx.result.counts.retried += [task.queue for task in requeued if outcomes[task.id] not in (None, "lost")]
            tx.result.counts.lost += [task.queue for task in requeued if outcomes[task.id] == "lost"]
            _log_lost(unhappy, requeued)
        if endings:
            errors = {ending.id: error for ending, error in endings}
            moved = transitions.end(tx.connection, TaskState.FAILED, [ending for ending, _ in endings], tx.now)
            tx.result.note(moved, errors=errors, by_worker=True, lingering=lingering)
            lost = {report.id for _, report in unhappy if isinstance(report, Lost)}
            tx.result.counts.lost += [task.queue for task in moved if task.id in lost]
            tx.result.counts.time(moved, [ending for ending, _ in endings])
            log_failed(tx, {task.id: errors[task.id] for task in moved if task.id in lost})

    def _take_back(
        self,
        tx: Transaction,
        returned: Sequence[tuple[str, Returned]],
        retried: list[Requeue],
        adopted: list[Adoption],
        unhappy: list[tuple[str, Failed | Lost]],
    ) -> None:
        """Sort returned attempts. One that may have begun counts as lost if its task limits its starts."""
        begun = [report.id for _, report in returned if report.begun]
        policies = waiting.policies(tx.connection, begun) if begun else {}
        for worker, report in returned:
            policy = policies.get(report.id)
            if policy is not None and counts_starts(policy.options):
                unhappy.append((worker, Lost(report.id, report.attempt, alone=False, reason=report.reason)))
            elif report.data_key:
                hold = hold_for_key(report.data_key)
                retried.append(Requeue(report.id, report.attempt, self.unknown_timeout, hold=hold))
                tx.result.capacity.resource_holds.append(hold)
            elif report.executor is not None:
                adopted.append(Adoption(report.id, report.attempt, msgspec.json.encode(report.executor).decode()))
                retried.append(Requeue(report.id, report.attempt))
            else:
                retried.append(Requeue(report.id, report.attempt, report.delay))
                self.code.queries.requeue(tx.result, [(report.id, report.attempt)])
                if report.unknown:
                    tx.result.capacity.denied.append((worker, report.unknown))


def _decide(
    tx: Transaction,
    unhappy: Sequence[tuple[str, Failed | Lost]],
    retried: list[Requeue],
    loss_limit: int,
) -> list[tuple[AttemptEnd, TaskError]]:
    """Decide for failed and lost attempts whether to retry them or to end their tasks."""
    endings: list[tuple[AttemptEnd, TaskError]] = []
    stuck: list[tuple[bytes, int, Violation]] = []
    retry_at: dict[bytes, float] = {}
    policies = waiting.policies(tx.connection, [report.id for _, report in unhappy])
    need_history = [
        report.id
        for _, report in unhappy
        if isinstance(report, Lost) or (report.id in policies and counts_starts(policies[report.id].options))
    ]
    earlier_attempts = waiting.earlier_attempts(tx.connection, need_history) if need_history else {}
    executions = {task for task, policy in policies.items() if executor_of(policy.options) is not None}
    for worker, report in unhappy:
        policy = policies.get(report.id)
        if policy is None:
            continue  # it has already ended
        if isinstance(report, Failed):
            outcome = "failed" if report.charged else "postponed"
            error, duration = report.error, max(0.0, report.duration)
            options = parse_options(policy.options)
            decision = after_failure(report, options.retry, policy.failures, random.random())
            if counts_starts(policy.options):
                decision = within_starts(decision, options, earlier_attempts[report.id].starts, lost=False)
        elif report.id in executions:  # only its watcher died; another one takes over, and no loss is charged
            outcome, error, duration = "lost", watcher_lost(report), None
            decision = RetryTask(delay=0.0)
        else:
            before, options = earlier_attempts[report.id], parse_options(policy.options)
            outcome, duration = "lost", None
            error = lost_error(report, policy, before, loss_limit, options)
            after = after_loss_of_turn if policy.is_turn_task else after_loss
            decision = after(report.alone, policy.losses, before.deaths, loss_limit)
            decision = within_starts(decision, options, before.starts, lost=True)
        text = error.to_json()
        if isinstance(decision, RetryTask):
            retried.append(
                Requeue(
                    report.id,
                    report.attempt,
                    decision.delay,
                    decision.failures,
                    decision.losses,
                    alone=isinstance(report, Lost) and report.id not in executions,
                    outcome=outcome,
                    error=text,
                    worker=worker,
                    duration=duration,
                )
            )
        elif policy.is_turn_task:  # a failure of workflow code never fails its run
            stuck.append((report.id, report.attempt, Violation(0, error.kind, error.message, error.traceback)))
            if isinstance(report, Lost):
                pause = pause_after_loss(policy.losses + 1 - loss_limit)
                retry_at[report.id] = tx.now.timestamp() + pause
        else:
            assert isinstance(decision, FailTask)
            ending = AttemptEnd(
                report.id,
                report.attempt,
                decision.reason,
                text,
                decision.failures,
                decision.losses,
                worker,
                duration,
            )
            endings.append((ending, error))
    if stuck:
        mark_stuck(tx, stuck, retry_at)
    return endings


def watcher_lost(report: Lost) -> TaskError:
    """Describe the loss of a worker that watched an execution."""
    reason = f"was not heard from for {report.unheard:.1f} s" if report.unheard else f"died: {_died_of(report)}"
    return TaskError("WorkerLost", f"The worker that watched this execution {reason}. Another worker watches it now.")


def lost_error(report: Lost, policy: Policy, before: EarlierAttempts, limit: int, options: TaskOptions) -> TaskError:
    """Describe the loss of an attempt, given the earlier losses and attempts of its task."""
    if report.unheard:
        cause = (
            f"The worker that had this attempt was not heard from for {report.unheard:.1f} s: "
            f"it was stopped or cut off, or it died with its parent or its machine"
        )
    else:
        cause = f"The process that ran this attempt died: {_died_of(report)}"
    if options.on_loss == "fail":
        consequence = "It is not started again (on_loss='fail'); it may have done all, some or none of its work"
    elif options.max_starts is not None:
        consequence = (
            f"It is started at most {options.max_starts} times (max_starts); this was start {before.starts + 1}"
        )
    elif report.alone:
        what_follows = "The run is stuck" if policy.is_turn_task else "The task fails"
        time = policy.losses + 1
        consequence = (
            f"The process ran only this task. {what_follows} when that has happened {limit} times; so far: {time}"
        )
    elif policy.is_turn_task:
        consequence = "The run may not have caused it: its next turn gets a process of its own"
    else:
        death_limit, time = DEATHS_PER_LOSS * limit, before.deaths + 1
        consequence = f"The task may not have caused it: it fails after {death_limit} such deaths; so far: {time}"
    return TaskError("WorkerLost", f"{cause}. {consequence}.")


def _died_of(report: Lost) -> str:
    return report.reason or "killed, out of memory, or crashed"


def _log_lost(unhappy: Sequence[tuple[str, Failed | Lost]], requeued: Sequence[Moved]) -> None:
    """Log which workers lost attempts that will be retried, one line for each worker."""
    lost = {report.id: (worker, report) for worker, report in unhappy if isinstance(report, Lost) and not report.alone}
    counts: Counter[tuple[str, str]] = Counter()
    for worker, report in (lost[task.id] for task in requeued if task.id in lost):
        reason = f"its parent reports that its process died: {_died_of(report)}"
        counts[worker, f"not heard from for {report.unheard:.1f} s" if report.unheard else reason] += 1
    for (worker, why), count in counts.items():
        log.warning("worker.lost worker=%s reason=%r attempts=%d: its attempts run again", worker, why, count)


def _refused(report: Succeeded | Failed | Activated, error: Exception) -> Failed:
    """Return a failure in place of a report that cannot be stored. Without one, the task would be retried forever."""
    why = TaskError("ReportRefused", f"The attempt ended, but its report could not be stored: {type(error).__name__}.")
    return Failed(report.id, report.attempt, -1.0, why, retryable=False)


_MAX_IDS = 200
"""Ids in one message: the quarantine keeps no more."""


def find_gone(tx: Transaction, tasks: Sequence[KnownTask]) -> Iterator[Refused]:
    """Yield the tasks among these that Postgres does not know, by name and last state, for the quarantine."""
    existing = unique.existing(tx.connection, [task.id for task in tasks])
    gone: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for task in tasks:
        if task.id not in existing:
            gone[task.name, task.state].append(to_text(task.id))
    for (name, state), ids in gone.items():
        for start in range(0, len(ids), _MAX_IDS):
            batch = ids[start : start + _MAX_IDS]
            yield Refused("lost commits", encode(batch), f"Postgres has lost tasks: {len(batch)} of {name} ({state})")
