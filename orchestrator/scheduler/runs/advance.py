"""Advance the runs that a tick has touched: count what moved, plan what follows, end what is complete.

An end may touch another run, the parent of a child; so this repeats until nothing is touched. A run with which it fails
is set aside. Runs are notified in slices, and what there is no time for waits for the next tick.
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
    """Notifies runs of what happened to them, and follows what comes of it."""

    dags: Dags
    flows: Flows
    triggers: Triggers
    code: CodeRuns
    backlog: Backlog

    def __post_init__(self) -> None:
        self._workflows: tuple[RunKind, ...] = self.dags, self.flows, self.code
        self._kinds = {kind.name: kind for kind in (RunKind(), *self._workflows)}

    # -- what makes runs go on

    def begin(self, tx: Transaction, limit: int) -> None:
        """Start runs that are new since the last tick, tree by tree; as many as there is time for, but always some."""
        pending = self.backlog.pending(tx, limit)
        steps = self.dags.sizes(
            {run.id: Version(run.workflow, run.version) for run in pending if run.workflow and run.version}
        )
        for number, slice_ in enumerate(tx.budget.slices([run.id for run in pending], steps)):
            if tx.budget.is_spent and not _is_due(number, slice_):
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
            tx.result.wake.delayed |= bool(stuck.wake(tx.connection, code))  # some have a deadline now
        planned = [row for row in begun if row.workflow is not None and not row.code]
        self.backlog.release(tx, [row.id for row in planned if row.again])
        self.notify(tx, [(row.id, [_beginning(row)]) for row in planned], is_urgent=True)

    def _refuse_cycles(self, tx: Transaction, waiting: list[bytes], limit: int) -> None:
        """End child runs that wait for a limit which those hold that wait for them."""
        if not waiting:
            return
        if found := ancestry.waiting_for_themselves(tx.connection, waiting, limit, is_shared=tx.shard is not None):
            ends = [(run, RunState.FAILED, WAITS_FOR_ITSELF.format(number)) for run, number in found.items()]
            self.follow_each(tx, runs.end(tx.connection, ends, tx.now))

    def advance(self, tx: Transaction, *, resetting: Container[bytes] = ()) -> None:
        """Notify the runs whose tasks and children moved, once each, and end those whose code has ended.

        Runs that are `resetting` end because others repeat them from an earlier event.
        """
        while touched := tx.result.runs:
            moved, touched.changes = touched.changes, ChangesByRun()
            self.notify(tx, [(run, [changes]) for run, changes in moved.items()])
            ends = [
                RunEnd(
                    one, touched.continuing.pop(one.id, None), one.id in resetting, touched.unheard.pop(one.id, None)
                )
                for one in touched.turn_task_ends
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
        """Notify runs of what there was no time for, or what happened while they were stuck.

        However little time there is, the first are notified: to put them into the line again would take as long.
        """
        while waited := self.backlog.next(tx, self.dags.sizes):
            isolate(
                tx,
                [one for one in waited if not self.is_refused(tx, one.run)],
                self._notify_waited,
                lambda tx, one, error: self.backlog.set_aside(tx, (one.run, ()), error),
            )
            self.advance(tx)
            if tx.budget.is_spent or tx.budget.has_put_off:  # which stands in this line, too
                break

    def _notify_waited(self, tx: Transaction, some: Sequence[Waited]) -> None:
        self.backlog.remove(tx, some)
        # A run that was set aside is no longer marked as one that expands.
        self._count_and_plan(tx, [(one.run, [*one.changes, RunChanges(is_expanding=True)]) for one in some])

    # -- notifying

    def notify(
        self, tx: Transaction, some: Sequence[RunAndChanges], *, is_marked: bool = False, is_urgent: bool = False
    ) -> None:
        """Notify runs of what happened to them, as far as there is time; behind older changes of a run, new ones wait.

        What is marked in their rows need not be kept: they are found again. If it is urgent, the first are notified
        however little time there is. What no plan has to hear of is quickly done: as quickly as it is put off.
        """
        waiting = self.backlog.waiting(tx, [run for run, _ in some])
        late = [one for one in some if one[0] in waiting]
        free = [one for one in some if one[0] not in waiting and not self.is_refused(tx, *one)]
        planned: list[RunAndChanges] = []
        quick: list[RunAndChanges] = []
        for one in free:
            (planned if any(changes.is_for_plan for changes in one[1]) else quick).append(one)
        late += self._notify_slices(
            tx, tx.budget.slices(quick) if tx.budget.is_slowed else [quick], lambda n, _: n == 0
        )
        long = [run for run, changes in planned if any(one.is_for_all_steps for one in changes)]
        steps = self.dags.sizes(dags.versions(tx.connection, long) if long else {})
        slices = tx.budget.slices(planned, lambda one: steps(one[0]))
        late += self._notify_slices(tx, slices, _is_due if is_urgent else lambda *_: False)
        if late and not is_marked:
            self.backlog.add(tx, [(run, one) for run, changes in late for one in changes])

    def _notify_slices(
        self,
        tx: Transaction,
        slices: Iterable[Sequence[RunAndChanges]],
        has_to: Callable[[int, Sequence[RunAndChanges]], bool],
    ) -> list[RunAndChanges]:
        """Notify runs as long as there is time, and in slices that have to be whatever the time; return the rest."""
        late: list[RunAndChanges] = []
        for number, slice_ in enumerate(slices):
            if tx.budget.is_spent and not has_to(number, slice_):
                late += slice_
            elif tx.is_bisecting:
                isolate(tx, slice_, self._count_and_plan, self.backlog.set_aside)
            elif slice_:
                self._count_and_plan(tx, slice_)
        return late

    def is_refused(self, tx: Transaction, run: bytes, changes: Sequence[RunChanges] = ()) -> bool:
        """Say whether a run takes too long to be notified of anything; then it is set aside."""
        if run not in tx.budget.refused:
            return False
        step = tx.budget.at_fault.get(run)
        where = "" if step is None else f" It was at {step}."
        error = TooSlow(f"Planning it takes longer than everybody else can wait.{where}")
        self.backlog.set_aside(tx, (run, changes), error)
        tx.budget.met.add(run)
        return True

    def _count_and_plan(self, tx: Transaction, some: Sequence[RunAndChanges]) -> None:
        """Notify runs of what happened to them: count, plan, and end what is complete."""
        if tx.foreseen is None:
            flush(tx.connection)  # that others have taken long is not their fault
        with tx.budget.charging(run for run, _ in some):
            saved: dict[bytes, Saved] = {}
            ends: list[tuple[bytes, RunState, str | None]] = []
            for kind in (self.dags, self.flows):
                own = {run: changes for run, changes in some if kind.plans(changes)}
                advanced = kind.advance(tx, own)
                saved |= advanced.saved
                ends += advanced.ends
                if advanced.late:
                    self.backlog.add(tx, [(run, one) for run in advanced.late for one in own[run]])
                    some = [one for one in some if one[0] not in advanced.late]
            self._save(tx, some, saved)
            if ends:
                self.follow_ends(tx, runs.end(tx.connection, ends, tx.now))
            for run, changes in some:
                for one in changes:
                    if one.turn_task_end is not None:
                        tx.result.runs.turn_task_ends.append(one.turn_task_end)
                    if one.continuing is not None:
                        tx.result.runs.continuing[run] = one.continuing
                    if one.heard is not None:
                        tx.result.runs.unheard[run] = one.heard

    def _save(self, tx: Transaction, some: Sequence[RunAndChanges], saved: Mapping[bytes, Saved]) -> None:
        """Write counters and plans, a row per run, notify code of what it waits for, and end what has nothing open."""
        deltas: Deltas = {
            run: _delta(changes) for run, changes in some if run in saved or any(h.delta or h.facts for h in changes)
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
        # What code waits for has a derived id, and so has a step of a plan. One statement notifies and counts; runs
        # that turn out to be none of code, or to have ended, are counted like all others.
        facts: Facts = {
            run: found for run, changes in some if (found := [f for h in changes for f in h.facts_for_code])
        }
        of_code = {
            run: learned
            for run, learned in facts.items()
            if run not in saved and isinstance(learned[0], Outcome) and is_derived(learned[0].id)
        }
        heard = append_facts(tx, of_code, deltas) if of_code else set()
        rest = {run: delta for run, delta in deltas.items() if run not in heard}
        if rest:
            plans = {run: (plan.state, plan.expanding) for run, plan in saved.items()}
            is_gathered = tx.gathers(len(rest), sum(len(plan.state) for plan in saved.values()))
            is_gathered &= all(run in saved and saved[run].is_open for run in rest)
            rows = runs.settle(tx.connection, rest, plans, is_gathered=is_gathered)
            others = facts.keys() - of_code.keys()
            append_facts(tx, {row.id: facts[row.id] for row in rows if row.code and row.id in others})
            self.conclude(tx, rows)

    def forget(self, ids: Sequence[bytes]) -> None:
        """Remember nothing more of runs that are being cancelled. If they go on, Postgres has them."""
        for kind in self._workflows:
            kind.drop(ids)

    # -- ends

    def conclude(self, tx: Transaction, rows: Iterable[RunRow]) -> None:
        """End the runs among these that are complete, unless their kind does that itself.

        Where many end at once whose hooks are given much, some end in later ticks.
        """
        rows = [row for row in rows if not self._kinds[row.kind].ends_itself]
        waiting = self.backlog.waiting(tx, [row.id for row in rows])
        complete: list[tuple[bytes, RunState, str | None]] = []
        late: list[tuple[bytes, RunChanges]] = []
        for row in rows:
            state = verdict(row.counters, row.cancelling, row.reason == TIMED_OUT)
            if state is None or row.state not in run_sources_of(state) or row.id in waiting:
                continue  # a change that waits may open it again
            kind = self._kinds[row.kind]
            if not kind.has_hooks or tx.budget.has_room_for_hooks(*kind.hooks(row.id, state)):
                complete.append((row.id, state, None))
            else:
                late.append((row.id, RunChanges()))
        if late:
            self.backlog.add(tx, late)
        if complete:
            self.follow_ends(tx, runs.end(tx.connection, complete, tx.now))

    def _end_code(self, tx: Transaction, ends: Sequence[RunEnd]) -> None:
        """End runs with their turn tasks."""
        self.follow_ends(tx, end_runs(tx, ends), {end.turn_task.id: end.turn_task for end in ends})

    def follow_each(self, tx: Transaction, ended: Sequence[RunRow], *, silent: Container[bytes] = ()) -> None:
        """Follow ends of runs that were never planned; of one with which that fails, only the parent is notified."""
        isolate(tx, ended, partial(self.follow_ends, silent=silent), partial(self._leave_out_hooks, silent=silent))

    def _leave_out_hooks(self, tx: Transaction, row: RunRow, error: Exception, *, silent: Container[bytes]) -> None:
        whose = {"run_id": to_text(row.id)}
        log.error(
            "run.followers_skipped run=%s: the run has ended; its hooks and callbacks failed and are skipped",
            *whose.values(),
            exc_info=error,
            extra=whose,
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
        """Notify parents, lanes, waiting clients and other workflows of ended runs; of the silent, not their parents.

        A run that goes on in another has ended only for clients, which follow it.
        """
        if not ended:
            return
        over = [row for row in ended if not row.goes_on]
        if self.code.has_waits:
            other_runs.ended(tx, [row.id for row in ended])
        tx.result.outgoing.runs.extend(ended)
        tx.result.outgoing.ended.extend(_announced(row, turn_task_ends.get(row.id)) for row in ended)
        giving: list[bytes] = []
        for row in over:
            if row.parent_run is None or row.id in silent:
                continue
            if row.parent_step is None:
                outcome = child_outcome(row.child_id, row.status, turn_task_ends[row.id])
                tx.result.runs.child_ended(row.parent_run, row.status, outcome)
            else:
                tx.result.runs.child_ended(row.parent_run, row.status, row.parent_step)
                if row.state is RunState.SUCCESS:
                    giving.append(row.id)
        if giving:
            dags.save_outputs(tx.connection, self.dags.outputs(tx, giving))
        lanes = Counter(row.lane for row in over if row.lane is not None)
        if lanes:
            if tx.shard is None:
                runs.unpark(tx.connection, lanes)
            else:
                ancestry.unpark(tx.connection, lanes)
            tx.result.wake.runs_to_begin = True
        # Compositions have no hooks, and no other workflow can wait for their ends.
        heard = [(self._kinds[row.kind], row) for row in over if row.workflow and not is_composed(row.workflow)]
        if hooks and heard:
            self.triggers.runs_ended(tx, heard)
        for kind in self._workflows:
            if rows := [row for row in ended if row.kind == kind.name]:
                kind.drop([row.id for row in rows])
                kind.ended(tx, rows)


def _delta(changes: Sequence[RunChanges]) -> dict[str, int]:
    """Return how much each counter changes by all of these: as a rule there is one."""
    return defaultdict(int, changes[0].delta) if len(changes) == 1 else total(changes)


def _beginning(row: RunRow) -> RunChanges:
    """Return what a run is notified of that begins, or begins again."""
    return RunChanges(begun=not row.again, closed=row.again, is_retried=row.again, of_flow=row.flow)


def _announced(run: RunRow, turn_task: TurnTaskEnd | None) -> Ended:
    """Return the end that clients hear. A success without a result makes them look where a run goes on."""
    if run.goes_on:
        return Ended(run.id, RunState.SUCCESS)
    return Ended(
        run.id, run.status, turn_task and turn_task.inline, turn_task and run_error(turn_task, run.status, run.reason)
    )


def _is_due(number: int, slice_: Sequence[object]) -> bool:
    """Say whether a slice is done however little time there is: the first, and a run that stands alone behind it.

    Its definition may be one that has not been worked out yet. Behind those of a tree that takes all the time, tick
    after tick, it never would be.
    """
    return number == 0 or (number == 1 and len(slice_) == 1)
