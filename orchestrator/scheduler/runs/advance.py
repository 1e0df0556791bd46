"""Advance the runs that a tick has touched: count changes, plan what follows, end complete runs.

The end of a child run touches its parent, so this repeats until no run is touched. A run that fails to advance is set
aside as stuck. Runs are notified in slices; those without time left wait for the next tick.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.domain.code.ends import child_outcome, run_error
from orchestrator.domain.code.history import Fact, Outcome
from orchestrator.domain.dag.composed import is_composed
from orchestrator.domain.ids import is_derived, to_text
from orchestrator.domain.runs import TIMED_OUT, RunChanges, TurnTaskEnd, total, verdict
from orchestrator.domain.states import RunState, run_sources_of
from orchestrator.scheduler.budget import TooSlow
from orchestrator.scheduler.code import other_runs
from orchestrator.scheduler.code.ends import RunEnd, end_runs
from orchestrator.scheduler.code.runs import CodeRuns, append_facts
from orchestrator.scheduler.dag.plans import Dags
from orchestrator.scheduler.flow.plans import Flows
from orchestrator.scheduler.runs.backlog import Backlog, RunAndChanges
from orchestrator.scheduler.runs.kinds import RunKind, Saved
from orchestrator.scheduler.runs.triggers import Triggers
from orchestrator.scheduler.tick_result import ChangesByRun
from orchestrator.scheduler.transaction import Transaction, isolate
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag.plans import Version
from orchestrator.store.driver import flush
from orchestrator.store.runs import ancestry, stuck
from orchestrator.store.runs import transitions as runs
from orchestrator.store.runs.pending_changes import Waited
from orchestrator.store.runs.transitions import RunRow
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import Ended

log = get_logger("scheduler")
Deltas = dict[bytes, dict[str, int]]
Facts = dict[bytes, list[Fact]]

WAITS_FOR_ITSELF = "waits for itself: runs above it hold its limit of {} at once"


@dataclass
class Runs:
    """Notifies runs of changes to their tasks and children, and handles the consequences."""

    dags: Dags
    flows: Flows
    triggers: Triggers
    code: CodeRuns
    backlog: Backlog

    def __post_init__(self) -> None:
        self._workflows: tuple[RunKind, ...] = self.dags, self.flows, self.code
        self._kinds = {kind.name: kind for kind in (RunKind(), *self._workflows)}

    # -- continue runs

    def begin(self, tx: Transaction, limit: int) -> None:
        """Begin pending runs, tree by tree: as many as there is time for, and always some."""
        pending = self.backlog.pending(tx, limit)
        steps = self.dags.sizes(
            {run.id: Version(run.workflow, run.version) for run in pending if run.workflow and run.version}
        )
        for number, slice_ in enumerate(tx.budget.slices([run.id for run in pending], steps)):
            if tx.budget.is_spent and not _must_run(number, slice_):
                tx.result.wake.runs_to_begin = True
                break
            self._begin(tx, slice_, limit)
        self.advance(tx)

    def _begin(self, tx: Transaction, ids: Sequence[bytes], limit: int) -> None:
        is_shared = tx.shard is not None
        begun, waiting, cancelled = runs.begin_or_park(tx.connection, tx.now, ids, is_shared=is_shared)
        if is_shared:
            self.backlog.park(waiting)
        self.follow_each(tx, cancelled, silent={row.id for row in cancelled})
        self._refuse_cycles(tx, [row.id for row in waiting if row.parent_run is not None], limit)
        tx.result.outgoing.runs += begun
        self.conclude(tx, [row for row in begun if row.workflow is None])
        if code := [row.id for row in begun if row.code]:
            tx.result.wake.delayed |= bool(stuck.wake(tx.connection, code))  # some runs have a deadline now
        planned = [row for row in begun if row.workflow is not None and not row.code]
        self.backlog.release(tx, [row.id for row in planned if row.is_retry])
        self.notify(tx, [(row.id, [_beginning(row)]) for row in planned], is_urgent=True)

    def _refuse_cycles(self, tx: Transaction, waiting: list[bytes], limit: int) -> None:
        """Fail child runs that wait for a limit held by their own ancestors."""
        if not waiting:
            return
        if found := ancestry.deadlocked(tx.connection, waiting, limit, is_shared=tx.shard is not None):
            ends = [(run, RunState.FAILED, WAITS_FOR_ITSELF.format(number)) for run, number in found.items()]
            self.follow_each(tx, runs.end(tx.connection, ends, tx.now))

    def advance(self, tx: Transaction, *, resetting: Container[bytes] = ()) -> None:
        """Notify runs whose tasks or children changed, and end runs whose code has ended, until no run is touched.

        Runs in `resetting` end because other runs repeat them from an earlier event.
        """
        while touched := tx.result.runs:
            moved, touched.changes = touched.changes, ChangesByRun()
            self.notify(tx, [(run, [changes]) for run, changes in moved.items()])
            ends = [
                RunEnd(
                    item,
                    touched.continuing.pop(item.id, None),
                    item.id in resetting,
                    touched.last_seen.pop(item.id, None),
                )
                for item in touched.turn_task_ends
            ]
            touched.turn_task_ends.clear()
            isolate(
                tx,
                ends,
                self._end_code,
                lambda tx, end, error: self.backlog.set_aside(tx, (end.turn_task.id, [end.changes]), error),
            )

    def expand(self, tx: Transaction, limit: int) -> None:
        """Create more tasks of large fan-outs."""
        expanding = [(run, [RunChanges(is_expanding=True)]) for run in self.backlog.expanding(tx, limit)]
        self.notify(tx, expanding, is_marked=True, is_urgent=True)
        self.advance(tx)

    def catch_up(self, tx: Transaction) -> None:
        """Notify runs of pending changes that an earlier tick had no time for, or that came while the run was stuck.

        The first runs are notified even without time left: to queue them again would take as long.
        """
        while waited := self.backlog.next(tx, self.dags.sizes):
            isolate(
                tx,
                [item for item in waited if not self.is_refused(tx, item.run)],
                self._notify_waited,
                lambda tx, item, error: self.backlog.set_aside(tx, (item.run, ()), error),
            )
            self.advance(tx)
            if tx.budget.is_spent or tx.budget.has_postponed:  # a postponed run is in this queue too
                break

    def _notify_waited(self, tx: Transaction, items: Sequence[Waited]) -> None:
        self.backlog.remove(tx, items)
        # A run that was set aside is no longer marked as expanding.
        self._count_and_plan(tx, [(item.run, [*item.changes, RunChanges(is_expanding=True)]) for item in items])

    # -- notifying

    def notify(
        self, tx: Transaction, items: Sequence[RunAndChanges], *, is_marked: bool = False, is_urgent: bool = False
    ) -> None:
        """Notify runs of changes while there is time. New changes of a run wait behind its pending ones.

        `is_marked` changes need not be stored: a mark on the run's row finds them again. With `is_urgent`, the first
        runs are notified even without time left. Changes that no plan must see are as quick to apply as to postpone.
        """
        waiting = self.backlog.waiting(tx, [run for run, _ in items])
        postponed = [item for item in items if item[0] in waiting]
        free = [item for item in items if item[0] not in waiting and not self.is_refused(tx, *item)]
        planned: list[RunAndChanges] = []
        quick: list[RunAndChanges] = []
        for item in free:
            (planned if any(changes.is_for_plan for changes in item[1]) else quick).append(item)
        postponed += self._notify_slices(
            tx, tx.budget.slices(quick) if tx.budget.is_slowed else [quick], lambda n, _: n == 0
        )
        long = [run for run, changes in planned if any(item.is_for_all_steps for item in changes)]
        steps = self.dags.sizes(dags.versions(tx.connection, long) if long else {})
        slices = tx.budget.slices(planned, lambda item: steps(item[0]))
        postponed += self._notify_slices(tx, slices, _must_run if is_urgent else lambda *_: False)
        if postponed and not is_marked:
            self.backlog.add(tx, [(run, item) for run, changes in postponed for item in changes])

    def _notify_slices(
        self,
        tx: Transaction,
        slices: Iterable[Sequence[RunAndChanges]],
        must_run: Callable[[int, Sequence[RunAndChanges]], bool],
    ) -> list[RunAndChanges]:
        """Notify slices of runs while there is time, and always those that must not wait. Return the rest."""
        postponed: list[RunAndChanges] = []
        for number, slice_ in enumerate(slices):
            if tx.budget.is_spent and not must_run(number, slice_):
                postponed += slice_
            elif tx.is_bisecting:
                isolate(tx, slice_, self._count_and_plan, self.backlog.set_aside)
            elif slice_:
                self._count_and_plan(tx, slice_)
        return postponed

    def is_refused(self, tx: Transaction, run: bytes, changes: Sequence[RunChanges] = ()) -> bool:
        """Return whether a run takes too long to be notified; if so, set it aside."""
        if run not in tx.budget.refused:
            return False
        step = tx.budget.at_fault.get(run)
        where = "" if step is None else f" It was at {step}."
        error = TooSlow(f"Planning it takes too long; other runs would have to wait.{where}")
        self.backlog.set_aside(tx, (run, changes), error)
        tx.budget.resolved.add(run)
        return True

    def _count_and_plan(self, tx: Transaction, items: Sequence[RunAndChanges]) -> None:
        """Apply changes to runs: count, plan, and end the complete ones."""
        if tx.foreseen is None:
            flush(tx.connection)  # time spent on earlier statements is not these runs' fault
        with tx.budget.charging(run for run, _ in items):
            saved: dict[bytes, Saved] = {}
            ends: list[tuple[bytes, RunState, str | None]] = []
            for kind in (self.dags, self.flows):
                own = {run: changes for run, changes in items if kind.plans(changes)}
                advanced = kind.advance(tx, own)
                saved |= advanced.saved
                ends += advanced.ends
                if advanced.postponed:
                    self.backlog.add(tx, [(run, item) for run in advanced.postponed for item in own[run]])
                    items = [item for item in items if item[0] not in advanced.postponed]
            self._save(tx, items, saved)
            if ends:
                self.follow_ends(tx, runs.end(tx.connection, ends, tx.now))
            for run, changes in items:
                for item in changes:
                    if item.turn_task_end is not None:
                        tx.result.runs.turn_task_ends.append(item.turn_task_end)
                    if item.continuing is not None:
                        tx.result.runs.continuing[run] = item.continuing
                    if item.last_seen is not None:
                        tx.result.runs.last_seen[run] = item.last_seen

    def _save(self, tx: Transaction, items: Sequence[RunAndChanges], saved: Mapping[bytes, Saved]) -> None:
        """Store counters and plans, one row per run. Notify code of awaited facts, and end runs with nothing open."""
        deltas: Deltas = {
            run: _delta(changes) for run, changes in items if run in saved or any(h.delta or h.facts for h in changes)
        }
        for run, plan in saved.items():
            delta = deltas[run]
            delta["total"] += plan.delta.total
            delta["opened"] += plan.delta.opened
            for name, number in plan.delta.counts.items():
                delta[name] += number
        if not deltas:
            return
        tx.result.wake.advanced = True
        tx.result.wake.runs_to_expand |= any(plan.expanding for plan in saved.values())
        tx.result.outgoing.counted.extend(deltas)
        # Tasks and runs awaited by code have derived ids, like steps of plans. One statement notifies and counts; runs
        # without code, or that have ended, are counted with all other runs.
        facts: Facts = {
            run: found for run, changes in items if (found := [f for h in changes for f in h.facts_for_code])
        }
        of_code = {
            run: learned
            for run, learned in facts.items()
            if run not in saved and isinstance(learned[0], Outcome) and is_derived(learned[0].id)
        }
        notified = append_facts(tx, of_code, deltas) if of_code else set()
        rest = {run: delta for run, delta in deltas.items() if run not in notified}
        if rest:
            plans = {run: (plan.state, plan.expanding) for run, plan in saved.items()}
            is_gathered = tx.gathers(len(rest), sum(len(plan.state) for plan in saved.values()))
            is_gathered &= all(run in saved and saved[run].is_open for run in rest)
            rows = runs.settle(tx.connection, rest, plans, is_gathered=is_gathered)
            others = facts.keys() - of_code.keys()
            append_facts(tx, {row.id: facts[row.id] for row in rows if row.code and row.id in others})
            self.conclude(tx, rows)

    def forget(self, ids: Sequence[bytes]) -> None:
        """Drop cached plans of runs being cancelled. If they continue, they are read from Postgres."""
        for kind in self._workflows:
            kind.drop(ids)

    # -- ends

    def conclude(self, tx: Transaction, rows: Iterable[RunRow]) -> None:
        """End the complete runs among these rows, unless their kind ends itself.

        When many runs with large hook inputs end at once, some end in later ticks.
        """
        rows = [row for row in rows if not self._kinds[row.kind].ends_itself]
        waiting = self.backlog.waiting(tx, [row.id for row in rows])
        complete: list[tuple[bytes, RunState, str | None]] = []
        postponed: list[tuple[bytes, RunChanges]] = []
        for row in rows:
            state = verdict(row.counters, row.cancelling, row.reason == TIMED_OUT)
            if state is None or row.state not in run_sources_of(state) or row.id in waiting:
                continue  # a pending change may reopen the run
            kind = self._kinds[row.kind]
            if not kind.has_hooks or tx.budget.has_room_for_hooks(*kind.hooks(row.id, state)):
                complete.append((row.id, state, None))
            else:
                postponed.append((row.id, RunChanges()))
        if postponed:
            self.backlog.add(tx, postponed)
        if complete:
            self.follow_ends(tx, runs.end(tx.connection, complete, tx.now))

    def _end_code(self, tx: Transaction, ends: Sequence[RunEnd]) -> None:
        self.follow_ends(tx, end_runs(tx, ends), {end.turn_task.id: end.turn_task for end in ends})

    def follow_each(self, tx: Transaction, ended: Sequence[RunRow], *, silent: Container[bytes] = ()) -> None:
        """Follow the ends of runs that were never planned. After an error, skip a run's hooks."""
        isolate(tx, ended, partial(self.follow_ends, silent=silent), partial(self._leave_out_hooks, silent=silent))

    def _leave_out_hooks(self, tx: Transaction, row: RunRow, error: Exception, *, silent: Container[bytes]) -> None:
        ids = {"run_id": to_text(row.id)}
        log.error(
            "run.followers_skipped run=%s: the run has ended; its hooks and callbacks failed and are skipped",
            *ids.values(),
            exc_info=error,
            extra=ids,
        )
        self.follow_ends(tx, [row], hooks=False, silent=silent)

    def follow_ends(
        self,
        tx: Transaction,
        ended: Sequence[RunRow],
        turn_task_ends: Mapping[bytes, TurnTaskEnd] = {},
        *,
        hooks: bool = True,
        silent: Container[bytes] = (),
    ) -> None:
        """Notify parents (except of `silent` runs), lanes, waiting clients and other workflows of ended runs.

        A run that continues as new has ended only for clients, which follow the next run.
        """
        if not ended:
            return
        finished = [row for row in ended if not row.has_successor]
        if self.code.has_waits:
            other_runs.ended(tx, [row.id for row in ended])
        tx.result.outgoing.runs.extend(ended)
        tx.result.outgoing.ended.extend(_announced(row, turn_task_ends.get(row.id)) for row in ended)
        with_outputs: list[bytes] = []
        for row in finished:
            if row.parent_run is None or row.id in silent:
                continue
            if row.parent_step is None:
                outcome = child_outcome(row.child_id, row.status, turn_task_ends[row.id])
                tx.result.runs.child_ended(row.parent_run, row.status, outcome)
            else:
                tx.result.runs.child_ended(row.parent_run, row.status, row.parent_step)
                if row.state is RunState.SUCCESS:
                    with_outputs.append(row.id)
        if with_outputs:
            dags.save_outputs(tx.connection, self.dags.outputs(tx, with_outputs))
        lanes = Counter(row.lane for row in finished if row.lane is not None)
        if lanes:
            if tx.shard is None:
                runs.unpark(tx.connection, lanes)
            else:
                ancestry.unpark(tx.connection, lanes)
            tx.result.wake.runs_to_begin = True
        # Compositions have no hooks, and no other workflow can wait for their ends.
        announced = [(self._kinds[row.kind], row) for row in finished if row.workflow and not is_composed(row.workflow)]
        if hooks and announced:
            self.triggers.runs_ended(tx, announced)
        for kind in self._workflows:
            if rows := [row for row in ended if row.kind == kind.name]:
                kind.drop([row.id for row in rows])
                kind.ended(tx, rows)


def _delta(changes: Sequence[RunChanges]) -> dict[str, int]:
    """Return the combined counter changes. Usually there is a single set of changes."""
    return defaultdict(int, changes[0].delta) if len(changes) == 1 else total(changes)


def _beginning(row: RunRow) -> RunChanges:
    """Return the changes that tell a run's plan that the run begins, or begins again."""
    return RunChanges(begun=not row.is_retry, closed=row.is_retry, is_retried=row.is_retry, of_flow=row.flow)


def _announced(run: RunRow, turn_task: TurnTaskEnd | None) -> Ended:
    """Return the end as published to clients. A success without a result makes clients look up the next run."""
    if run.has_successor:
        return Ended(run.id, RunState.SUCCESS)
    return Ended(
        run.id, run.status, turn_task and turn_task.inline, turn_task and run_error(turn_task, run.status, run.reason)
    )


def _must_run(number: int, slice_: Sequence[object]) -> bool:
    """Return whether a slice must run even without time left: the first, or a single run right behind it.

    The single run may have a definition that is not compiled yet. Otherwise a busy tree might block it forever.
    """
    return number == 0 or (number == 1 and len(slice_) == 1)
