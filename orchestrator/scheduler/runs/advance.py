"""Advance the runs that a tick has touched: count what moved, plan what follows, end what is complete.

An end may touch another run, the parent of a child; so this repeats until nothing is touched. A run with which it fails
is set aside, and what there is no time for waits for the next tick.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.domain.code.ends import child_outcome, run_error, task_outcome
from orchestrator.domain.code.history import Fact, Outcome
from orchestrator.domain.flow.definition import is_node
from orchestrator.domain.ids import is_derived, to_text
from orchestrator.domain.runs.changes import RunChanges, Steps, TurnTaskEnd, total
from orchestrator.domain.runs.verdict import TIMED_OUT, verdict
from orchestrator.domain.states import ENDED_TASK_STATES, RunState, run_sources_of
from orchestrator.scheduler.budget import COST, SLICE, TooSlow
from orchestrator.scheduler.code.ends import RunEnd, end_runs
from orchestrator.scheduler.code.runs import CodeRuns, append_facts
from orchestrator.scheduler.dag.plans import Dags
from orchestrator.scheduler.flow.plans import Flows
from orchestrator.scheduler.isolation import isolate
from orchestrator.scheduler.runs.backlog import Backlog
from orchestrator.scheduler.runs.kinds import RunKind, Saved
from orchestrator.scheduler.runs.triggers import Triggers
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag.plans import Version
from orchestrator.store.driver import flush
from orchestrator.store.runs import ancestry
from orchestrator.store.runs import transitions as runs
from orchestrator.store.runs.pending_changes import Waited
from orchestrator.store.runs.transitions import RunRow
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import Ended

log = get_logger("scheduler")
Deltas = dict[bytes, dict[str, int]]
Facts = dict[bytes, list[Fact]]
RunAndChanges = tuple[bytes, Sequence[RunChanges]]
"""A run, and what happened to it since it was last told."""

WAITS_FOR_ITSELF = "waits for itself: runs above it hold its limit of {} at once"


@dataclass
class Runs:
    """Tells runs what happened to them, and follows what comes of it."""

    dags: Dags
    flows: Flows
    triggers: Triggers
    code: CodeRuns
    backlog: Backlog

    @property
    def kinds(self) -> tuple[RunKind, ...]:
        return self.dags, self.flows, self.code

    def begin(self, tx: Transaction, limit: int) -> None:
        """Start runs that are new since the last tick, tree by tree; as many as there is time for, but always some."""
        pending = self.backlog.pending(tx, limit)
        steps = self.dags.sizes(
            {run.id: Version(run.workflow, run.version) for run in pending if run.workflow and run.version}
        )
        for number, slice_ in enumerate(_slices(tx, [run.id for run in pending], steps)):
            if tx.budget.is_spent and not _is_due(number, slice_):
                tx.result.wakeups.runs_to_begin = True
                break
            self._begin(tx, slice_, limit)
        self.advance(tx)

    def _begin(self, tx: Transaction, ids: Sequence[bytes], limit: int) -> None:
        begun, waiting, cancelled = runs.begin_or_park(tx.connection, tx.now, ids)
        self.follow_each(tx, cancelled, silent={row.id for row in cancelled})
        self._refuse_cycles(tx, [row.id for row in waiting if row.parent_run is not None], limit)
        tx.result.outgoing.runs += begun
        self.conclude(tx, [row for row in begun if row.workflow is None])
        planned = [row for row in begun if row.workflow is not None]
        self.backlog.release(tx, [row.id for row in planned if row.again])
        self.tell(tx, [(row.id, [_beginning(row)]) for row in planned], is_urgent=True)

    def _refuse_cycles(self, tx: Transaction, waiting: list[bytes], limit: int) -> None:
        """End child runs that wait for a limit which those hold that wait for them."""
        found = ancestry.waiting_for_themselves(tx.connection, waiting, limit) if waiting else {}
        if found:
            ends = [(run, RunState.FAILED, WAITS_FOR_ITSELF.format(number)) for run, number in found.items()]
            self.follow_each(tx, runs.end(tx.connection, ends, tx.now))

    def advance(self, tx: Transaction, *, resetting: Container[bytes] = ()) -> None:
        """Count the tasks that moved, once per run, and go on with the runs that they belong to.

        Runs that are `resetting` end because others repeat them from an earlier event.
        """
        while tx.result.tasks.moved or tx.result.runs:
            changes = _fold(tx.result)
            if changes:
                self.tell(tx, [(run, [one]) for run, one in changes.items()])
            told, turn_task_ends = tx.result.runs, tx.result.runs.turn_task_ends
            ends = [
                RunEnd(one, told.continuing.pop(one.id, None), one.id in resetting, told.unheard.pop(one.id, None))
                for one in turn_task_ends
            ]
            turn_task_ends.clear()
            isolate(
                tx,
                ends,
                self._end_code,
                lambda tx, end, error: self.backlog.set_aside(tx, end.turn_task.id, [end.changes], error),
            )

    def expand(self, tx: Transaction, limit: int) -> None:
        """Create more tasks of large fan-outs."""
        expanding = self.backlog.expanding(tx, limit)
        self.tell(tx, [(run, [RunChanges(is_expanding=True)]) for run in expanding], is_marked=True, is_urgent=True)
        self.advance(tx)

    def catch_up(self, tx: Transaction) -> None:
        """Tell runs what there was no time for, or what happened while they were stuck.

        However little time there is, the first are told: to put them into the line again would take as long.
        """
        while waited := self.backlog.next(tx, self.dags.sizes):
            isolate(
                tx,
                [one for one in waited if not self.is_refused(tx, one.run)],
                self._tell_waited,
                lambda tx, one, error: self.backlog.set_aside(tx, one.run, (), error),
            )
            self.advance(tx)
            if tx.budget.is_spent or tx.budget.has_put_off:  # which stands in this line, too
                break

    def _tell_waited(self, tx: Transaction, some: Sequence[Waited]) -> None:
        self.backlog.remove(tx, some)
        # A run that was set aside is no longer marked as one that expands.
        self._tell(tx, [(one.run, [*one.changes, RunChanges(is_expanding=True)]) for one in some])

    def tell(
        self,
        tx: Transaction,
        some: Sequence[RunAndChanges],
        *,
        is_marked: bool = False,
        is_urgent: bool = False,
    ) -> None:
        """Tell runs what happened to them, as far as there is time; what happened to those that wait, waits with them.

        What is marked in their rows need not be kept: they are found again. If it is urgent, the first are told however
        little time there is.
        """
        waiting = self.backlog.waiting(tx, [run for run, _ in some])
        late: list[RunAndChanges] = []
        if waiting:
            late = [told for told in some if told[0] in waiting]
            some = [told for told in some if told[0] not in waiting]
        some = [told for told in some if not self.is_refused(tx, *told)]
        planned = {told[0]: told for told in some if _is_for_plan(told)}
        quick = [told for told in some if told[0] not in planned]
        late += self._tell_quickly(tx, quick)
        long = [run for run, (_, changes) in planned.items() if any(one.is_for_all_steps for one in changes)]
        steps = self.dags.sizes(dags.versions(tx.connection, long) if long else {})
        for number, slice_ in enumerate(_slices(tx, list(planned), steps)):
            part = [planned[run] for run in slice_]
            if tx.budget.is_spent and not (is_urgent and _is_due(number, slice_)):
                late += part
            else:
                self._tell_some(tx, part)
        if late and not is_marked:
            self.backlog.add(tx, [(run, one) for run, changes in late for one in changes])

    def _tell_quickly(self, tx: Transaction, some: Sequence[RunAndChanges]) -> list[RunAndChanges]:
        """Tell runs of whose plans nothing is asked: all at once, or little by little after a tick that took too long.

        Return those for which there was no time then.
        """
        if tx.budget.slice == SLICE or not some:
            self._tell_some(tx, some)
            return []
        size = max(1, tx.budget.slice // COST)
        for start in range(0, len(some), size):
            if start and tx.budget.is_spent:
                return list(some[start:])
            self._tell_some(tx, some[start : start + size])
        return []

    def is_refused(self, tx: Transaction, run: bytes, changes: Sequence[RunChanges] = ()) -> bool:
        """Say whether a run takes too long to be told anything; then it is set aside."""
        if run not in tx.budget.refused:
            return False
        step = tx.budget.at_fault.get(run)
        reason = "Planning it takes longer than everybody else can wait."
        if step is not None:
            reason = f"Planning it takes longer than everybody else can wait. It was at {step}."
        self.backlog.set_aside(tx, run, changes, TooSlow(reason))
        tx.budget.met.add(run)
        return True

    def _tell_some(self, tx: Transaction, some: Sequence[RunAndChanges]) -> None:
        isolate(
            tx,
            some,
            self._tell,
            lambda tx, told, error: self.backlog.set_aside(tx, *told, error),
        )

    def _tell(self, tx: Transaction, some: Sequence[RunAndChanges]) -> None:
        """Tell runs what happened to them: count, plan, and end what is complete."""
        flush(tx.connection)  # that others have taken long is not their fault
        with tx.budget.charging(run for run, _ in some):
            self._count_and_plan(tx, some)

    def _count_and_plan(self, tx: Transaction, some: Sequence[RunAndChanges]) -> None:
        of_flows = {run: changes for run, changes in some if any(one.of_flow for one in changes)}
        of_dags = {run: changes for run, changes in some if run not in of_flows and _is_for_plan((run, changes))}
        saved = self.dags.advance(tx, of_dags).saved
        advanced = self.flows.advance(tx, of_flows)
        saved |= advanced.saved
        if advanced.late:
            self.backlog.add(tx, [(run, one) for run in advanced.late for one in of_flows[run]])
            some = [told for told in some if told[0] not in advanced.late]
        deltas: Deltas = {
            run: _delta(changes) for run, changes in some if run in saved or any(h.delta or h.facts for h in changes)
        }
        facts = {run: [f for one in changes for f in one.facts] for run, changes in some if run not in of_flows}
        self._save(tx, deltas, saved, {run: learned for run, learned in facts.items() if learned})
        if advanced.ends:
            self.follow_ends(tx, runs.end(tx.connection, advanced.ends, tx.now))
        for run, changes in some:
            for one in changes:
                if one.turn_task_end is not None:
                    tx.result.runs.turn_task_ends.append(one.turn_task_end)
                if one.continuing is not None:
                    tx.result.runs.continuing[run] = one.continuing
                if one.heard is not None:
                    tx.result.runs.unheard[run] = one.heard

    def forget(self, ids: Sequence[bytes]) -> None:
        """Remember nothing more of runs that are being cancelled. If they go on, Postgres has them."""
        for kind in self.kinds:
            kind.drop(ids)

    def conclude(self, tx: Transaction, rows: Iterable[RunRow]) -> None:
        """End the runs among these that are complete. Code and flows end their runs themselves.

        Where many end at once whose hooks are given much, some end in later ticks.
        """
        rows = list(rows)
        waiting = self.backlog.waiting(tx, [row.id for row in rows])
        complete: dict[bytes, RunState] = {}
        late: list[bytes] = []
        for row in rows:
            if row.kind in ("code", "flow") or row.id in waiting:  # what it has not been told may open it again
                continue
            state = verdict(row.counters, row.cancelling, row.reason == TIMED_OUT)
            if state is not None and row.state in run_sources_of(state):
                if row.kind is None or tx.budget.has_room_for_hooks(*self.dags.hooks(row.id, state)):
                    complete[row.id] = state
                else:
                    late.append(row.id)
        if late:
            self.backlog.add(tx, [(run, RunChanges()) for run in late])
        if complete:
            ends = [(run, state, None) for run, state in complete.items()]
            self.follow_ends(tx, runs.end(tx.connection, ends, tx.now))

    def _end_code(self, tx: Transaction, ends: Sequence[RunEnd]) -> None:
        """End runs with their turn tasks."""
        self.follow_ends(tx, end_runs(tx, ends), {end.turn_task.id: end.turn_task for end in ends})

    def follow_each(self, tx: Transaction, ended: Sequence[RunRow], *, silent: Container[bytes] = ()) -> None:
        """Follow ends of runs that were never planned; nothing but the parent is told of one with which that fails."""

        def leave_out(tx: Transaction, row: RunRow, error: Exception) -> None:
            whose = {"run_id": to_text(row.id)}
            log.error(
                "run.followers_skipped run=%s: the run has ended; its hooks and callbacks failed and are skipped",
                *whose.values(),
                exc_info=error,
                extra=whose,
            )
            self.follow_ends(tx, [row], hooks=False, silent=silent)

        isolate(tx, ended, lambda tx, some: self.follow_ends(tx, some, silent=silent), leave_out)

    def follow_ends(
        self,
        tx: Transaction,
        ended: Sequence[RunRow],
        turn_task_ends: Mapping[bytes, TurnTaskEnd] = {},
        *,
        hooks: bool = True,
        silent: Container[bytes] = (),
    ) -> None:
        """Tell parents, lanes, waiting clients and other workflows of ended runs; of the silent, not their parents.

        A run that goes on in another has not ended for anyone but the clients, who follow it.
        """
        if not ended:
            return
        over = [row for row in ended if not row.goes_on]
        tx.result.outgoing.runs.extend(ended)
        tx.result.outgoing.ended.extend(_announced(row, turn_task_ends.get(row.id)) for row in ended)
        giving: list[bytes] = []
        for row in over:
            if row.parent_run is None or row.id in silent:
                continue
            if row.parent_step is None:
                told: str | Outcome = child_outcome(row.child_id, row.status, turn_task_ends[row.id])
            else:
                told = row.parent_step
                if row.state is RunState.SUCCESS:
                    giving.append(row.id)
            tx.result.runs.children.append((row.parent_run, row.status, told))
        if giving:
            dags.save_outputs(tx.connection, self.dags.outputs(tx, giving))
        lanes = Counter(row.lane for row in ended if row.lane is not None)
        if lanes:
            runs.unpark(tx.connection, lanes)
            tx.result.wakeups.runs_to_begin = True
        if hooks and any(row.workflow is not None for row in over):
            self.triggers.runs_ended(tx, over)
        for kind in self.kinds:
            if rows := [row for row in ended if row.kind == kind.name]:
                kind.drop([row.id for row in rows])
                kind.ended(tx, rows)

    def _save(self, tx: Transaction, deltas: Deltas, saved: Mapping[bytes, Saved], facts: Facts) -> None:
        """Write counters and plans, a row per run, tell code what it waits for, and end what has nothing left open."""
        for run, plan in saved.items():
            delta = deltas[run]
            delta["total"] += plan.delta.total
            delta["opened"] += plan.delta.opened
            for name, number in plan.delta.counts.items():
                delta[name] += number
        if not deltas:
            return
        tx.result.wakeups.has_advanced = True
        tx.result.wakeups.runs_to_expand |= any(plan.expanding for plan in saved.values())
        tx.result.outgoing.counted.extend(deltas)
        # What code waits for has a derived id, and so has a step of a plan. One statement tells and counts; runs that
        # turn out to be none of code, or to have ended, are counted like all others.
        of_code = {run: some for run, some in facts.items() if run not in saved and _is_for_code(some[0])}
        told = append_facts(tx, of_code, deltas)
        rest = {run: delta for run, delta in deltas.items() if run not in told}
        if rest:
            plans = {run: (plan.state, plan.expanding) for run, plan in saved.items()}
            rows = runs.settle(tx.connection, rest, plans)
            pending_changes = facts.keys() - of_code.keys()
            append_facts(tx, {row.id: facts[row.id] for row in rows if row.code and row.id in pending_changes})
            self.conclude(tx, rows)


def _delta(changes: Sequence[RunChanges]) -> dict[str, int]:
    """Return how much each counter changes by all of these: as a rule there is one."""
    return defaultdict(int, changes[0].delta) if len(changes) == 1 else total(changes)


def _beginning(row: RunRow) -> RunChanges:
    """Return what a run is told that begins, or begins again."""
    return RunChanges(begun=not row.again, closed=row.again, is_retried=row.again, of_flow=row.flow)


def _announced(run: RunRow, turn_task: TurnTaskEnd | None) -> Ended:
    """Return what clients hear. A success without a result tells them to look, and they find where a run goes on."""
    if run.goes_on:
        return Ended(run.id, RunState.SUCCESS)
    return Ended(
        run.id, run.status, turn_task and turn_task.inline, turn_task and run_error(turn_task, run.status, run.reason)
    )


def _is_for_plan(told: RunAndChanges) -> bool:
    """Say whether a plan has to be told. All else is quickly done: as quickly as it is put off."""
    return any(one.is_for_plan for one in told[1])


def _slices(tx: Transaction, some: Sequence[bytes], steps: Callable[[bytes], int]) -> Iterator[list[bytes]]:
    """Divide runs that are to be told something into what can be done between two looks at the clock."""
    slice_: list[bytes] = []
    size = 0
    for run in some:
        if slice_ and size + COST + steps(run) > tx.budget.slice:
            yield slice_
            slice_, size = [], 0
        size += COST + steps(run)  # which may be known by now, if the slice before had another of its kind
        slice_.append(run)
    if slice_:
        yield slice_


def _is_due(number: int, slice_: Sequence[bytes]) -> bool:
    """Say whether a slice is worked on however little time there is: the first, and a run that stands alone behind it.

    Its definition may be one that has not been worked out yet. Behind those of a tree that takes all the time, tick
    after tick, it never would be.
    """
    return number == 0 or (number == 1 and len(slice_) == 1)


def _fold(tick: TickResult) -> dict[bytes, RunChanges]:
    """Sum up, by run, what moved: counters, for runs with a definition what ended or was opened again, and for those
    that may be runs of code what that learns.
    """
    found: dict[bytes, RunChanges] = {}

    def of(run: bytes) -> RunChanges:
        changes = found.get(run)
        if changes is None:
            ended: Steps = defaultdict(int)
            reopened: Steps = defaultdict(int)
            changes = found[run] = RunChanges(defaultdict(int), ended=ended, reopened=reopened, facts=[])
        return changes

    for task in tick.tasks.moved:
        if task.run_id is None:
            continue
        changes = of(task.run_id)
        if task.state in ENDED_TASK_STATES:
            changes.delta[task.state] += 1
            changes.delta["opened"] -= 1
            if task.step is not None and not is_node(task.step):
                changes.ended[task.step, task.state] += 1
            else:
                changes.of_flow |= task.step is not None
                outcome = tick.tasks.outcomes.pop(task.id, (None, None))
                changes.facts.append(task_outcome(task.id, task.state, *outcome))
        elif task.before in ENDED_TASK_STATES:
            changes.delta[task.before] -= 1
            changes.delta["opened"] += 1
            if task.step is not None:
                changes.reopened[task.step, task.before] += 1
    for run, state, told in tick.runs.children:
        changes = of(run)
        changes.delta[state] += 1
        changes.delta["opened"] -= 1
        if isinstance(told, str):
            changes.ended[told, state] += 1
        else:
            changes.facts.append(told)
    tick.tasks.moved.clear()
    tick.runs.children.clear()
    return found


def _is_for_code(fact: Fact) -> bool:
    return isinstance(fact, Outcome) and is_derived(fact.id)
