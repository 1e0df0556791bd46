"""Advance the runs that a tick has touched: count what moved, plan what follows, end what is complete.

An end may touch another run, the parent of a child; so this repeats until nothing is touched. A run with which it fails
is set aside, and what there is no time for waits for the next tick.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from orchestrator.domain.code.history import Fact, Outcome
from orchestrator.domain.ids import is_derived
from orchestrator.domain.runs.happened import Happened, OwnEnd, total
from orchestrator.domain.runs.verdict import TIMED_OUT, verdict
from orchestrator.domain.states import ENDED_TASK_STATES, RunState, run_sources_of
from orchestrator.scheduler.budget import COST, TooSlow
from orchestrator.scheduler.code.ends import end_runs, task_fact
from orchestrator.scheduler.code.runs import tell
from orchestrator.scheduler.dag.plans import Saved
from orchestrator.scheduler.isolation import isolate
from orchestrator.scheduler.tick import Tick
from orchestrator.store.dag import plans as dags
from orchestrator.store.runs import families
from orchestrator.store.runs import life as runs
from orchestrator.store.runs.life import RunRow
from orchestrator.store.runs.untold import Waited
from orchestrator.transport.codec import Ended

Deltas = dict[bytes, dict[str, int]]
Facts = dict[bytes, list[Fact]]
Told = tuple[bytes, Sequence[Happened]]
"""A run, and what happened to it since it was last told."""

WAITS_FOR_ITSELF = "waits for itself: runs above it hold its limit of {} at once"


def begin_runs(tick: Tick, limit: int) -> None:
    """Start runs that were created since the last tick, tree by tree; as many as there is time for, but always some."""
    pending = tick.backlog.pending(tick, limit)
    steps = tick.dags.sizes({run.id: (run.workflow, run.version) for run in pending if run.workflow and run.version})
    for number, slice_ in enumerate(_slices(tick, [run.id for run in pending], steps)):
        if number and tick.budget.is_spent:
            tick.runs_to_begin = True
            break
        _begin(tick, slice_, limit)
    advance_runs(tick)


def _begin(tick: Tick, ids: Sequence[bytes], limit: int) -> None:
    begun, waiting, cancelled = runs.begin_or_park(tick.connection, tick.now, ids)
    follow_ends(tick, [(row, row.state) for row in cancelled], silent={row.id for row in cancelled})
    _refuse_circles(tick, [row.id for row in waiting if row.parent_run is not None], limit)
    conclude(tick, [row for row in begun if not row.is_planned])
    planned = [row for row in begun if row.is_planned]
    tick.backlog.release(tick, [row.id for row in planned if row.again])
    again = Happened(closed=True, is_retried=True)
    tell_runs(tick, [(row.id, [again if row.again else Happened(begun=True)]) for row in planned], is_urgent=True)


def _refuse_circles(tick: Tick, waiting: list[bytes], limit: int) -> None:
    """End child runs that wait for a limit which those hold that wait for them."""
    found = families.waiting_for_themselves(tick.connection, waiting, limit) if waiting else {}
    if found:
        reasons = {run: WAITS_FOR_ITSELF.format(number) for run, number in found.items()}
        follow_ends(tick, [(row, RunState.FAILED) for row in runs.refuse(tick.connection, reasons, tick.now)])


def advance_runs(tick: Tick) -> None:
    """Count the tasks that moved, once per run, and go on with the runs that they belong to."""
    while tick.moved or tick.children or tick.told or tick.own_ends:
        happened = _fold(tick)
        if happened:
            tell_runs(tick, [(run, [one]) for run, one in happened.items()])
        if tick.own_ends:
            ends = list(tick.own_ends)
            tick.own_ends.clear()
            isolate(tick, ends, lambda some: end_runs(tick, some), lambda end, error: _keep_end(tick, end, error))


def expand_runs(tick: Tick, limit: int) -> None:
    """Create more tasks of large fan-outs."""
    expanding = tick.backlog.expanding(tick, limit)
    tell_runs(tick, [(run, [Happened(is_expanding=True)]) for run in expanding], is_marked=True, is_urgent=True)
    advance_runs(tick)


def catch_up(tick: Tick) -> None:
    """Tell runs what there was no time for, or what happened while they were stuck.

    However little time there is, the first are told: to put them into the line again would take as long.
    """
    while waited := tick.backlog.next(tick):
        isolate(
            tick,
            [one for one in waited if not is_refused(tick, one.run)],
            lambda some: _tell_waited(tick, some),
            lambda one, error: tick.backlog.set_aside(tick, one.run, (), error),
        )
        advance_runs(tick)
        if tick.budget.is_spent:
            break


def _tell_waited(tick: Tick, some: Sequence[Waited]) -> None:
    tick.backlog.remove(tick, some)
    # A run that was set aside is no longer marked as one that expands.
    _tell(tick, [(one.run, [*one.happened, Happened(is_expanding=True)]) for one in some])


def tell_runs(tick: Tick, some: Sequence[Told], *, is_marked: bool = False, is_urgent: bool = False) -> None:
    """Tell runs what happened to them, as far as there is time; what happened to those that wait, waits with them.

    What is marked in their rows need not be kept: they are found again. If it is urgent, the first are told however
    little time there is.
    """
    waiting = tick.backlog.waiting(tick, [run for run, _ in some])
    late: list[Told] = []
    if waiting:
        late = [told for told in some if told[0] in waiting]
        some = [told for told in some if told[0] not in waiting]
    some = [told for told in some if not is_refused(tick, *told)]
    _tell_some(tick, [told for told in some if not _is_for_plan(told)])
    planned = {told[0]: told for told in some if _is_for_plan(told)}
    long = [run for run, (_, happened) in planned.items() if any(one.is_for_all_steps for one in happened)]
    steps = tick.dags.sizes(dags.versions(tick.connection, long) if long else {})
    for number, slice_ in enumerate(_slices(tick, list(planned), steps)):
        part = [planned[run] for run in slice_]
        if tick.budget.is_spent and not (is_urgent and number == 0):
            late += part
        else:
            _tell_some(tick, part)
    if late and not is_marked:
        tick.backlog.add(tick, [(run, one) for run, happened in late for one in happened])


def is_refused(tick: Tick, run: bytes, happened: Sequence[Happened] = ()) -> bool:
    """Say whether a run takes too long to be told anything; then it is set aside."""
    if run not in tick.budget.refused:
        return False
    tick.backlog.set_aside(tick, run, happened, TooSlow("Planning it takes longer than everybody else can wait."))
    tick.budget.met.add(run)
    return True


def _is_for_plan(told: Told) -> bool:
    """Say whether a plan has to be told. All else is quickly done: as quickly as it is put off."""
    return any(one.is_for_plan for one in told[1])


def _tell_some(tick: Tick, some: Sequence[Told]) -> None:
    isolate(tick, some, lambda part: _tell(tick, part), lambda told, error: tick.backlog.set_aside(tick, *told, error))


def _slices(tick: Tick, some: Sequence[bytes], steps: Callable[[bytes], int]) -> Iterator[list[bytes]]:
    """Divide runs that are to be told something into what can be done between two looks at the clock."""
    slice_: list[bytes] = []
    size = 0
    for run in some:
        if slice_ and size + COST + steps(run) > tick.budget.slice:
            yield slice_
            slice_, size = [], 0
        size += COST + steps(run)  # which may be known by now, if the slice before had another of its kind
        slice_.append(run)
    if slice_:
        yield slice_


def _tell(tick: Tick, some: Sequence[Told]) -> None:
    """Tell runs what happened to them: count, plan, and end what is complete."""
    with tick.budget.charging(run for run, _ in some):
        _count_and_plan(tick, some)


def _count_and_plan(tick: Tick, some: Sequence[Told]) -> None:
    saved = tick.dags.advance(tick, dict(told for told in some if _is_for_plan(told)))
    deltas: Deltas = {
        run: total(happened) for run, happened in some if run in saved or any(h.delta or h.facts for h in happened)
    }
    facts = {run: [fact for one in happened for fact in one.facts] for run, happened in some}
    _save(tick, deltas, saved, {run: learned for run, learned in facts.items() if learned})
    for run, happened in some:
        tick.own_ends.extend(one.own_end for one in happened if one.own_end is not None)
        tick.continuing.update((run, one.continuing) for one in happened if one.continuing is not None)


def _keep_end(tick: Tick, end: OwnEnd, error: Exception) -> None:
    """Set a run aside whose own task has ended, and which cannot be ended itself."""
    tick.backlog.set_aside(tick, end.id, [Happened(own_end=end, continuing=tick.continuing.get(end.id))], error)


def conclude(tick: Tick, rows: Iterable[RunRow], *, hooks: bool = True) -> None:
    """End the runs among these that are complete, and tell their parents and lanes. Code ends its runs itself."""
    complete: dict[RunState, dict[bytes, RunRow]] = defaultdict(dict)
    rows = list(rows)
    waiting = tick.backlog.waiting(tick, [row.id for row in rows])
    for row in rows:
        if row.code or row.id in waiting:  # what it has not been told may open it again
            continue
        state = verdict(row.counters, row.cancelling, row.reason == TIMED_OUT)
        if state is not None and row.state in run_sources_of(state):
            complete[state][row.id] = row
    ended = [
        (candidates[run_id], state)
        for state, candidates in complete.items()
        for run_id in runs.end(tick.connection, state, list(candidates), tick.now)
    ]
    follow_ends(tick, ended, hooks=hooks)


def follow_ends(
    tick: Tick, ended: Sequence[tuple[RunRow, RunState]], *, hooks: bool = True, silent: Container[bytes] = ()
) -> None:
    """Tell parents, lanes, waiting clients and other workflows of runs that ended; of the silent, not their parents."""
    lanes: Counter[str] = Counter()
    workflow_ends: dict[bytes, tuple[str, str]] = {}
    giving: list[bytes] = []
    for row, state in ended:
        tick.ended.append(Ended(row.id, state))
        if row.lane is not None:
            lanes[row.lane] += 1
        if row.workflow is not None:
            workflow_ends[row.id] = row.workflow, str(state)
        if row.parent_run is not None and row.parent_step is not None and row.id not in silent:
            if state is RunState.SUCCESS:
                giving.append(row.id)
            tick.children.append((row.parent_run, row.parent_step, str(state)))
    if giving:
        dags.save_outputs(tick.connection, tick.dags.outputs(tick, giving))
    tick.dags.drop(row.id for row, _ in ended)
    if lanes:
        runs.unpark(tick.connection, lanes)
        tick.runs_to_begin = True
    if workflow_ends and hooks:
        tick.triggers.runs_ended(tick, workflow_ends)


def _fold(tick: Tick) -> dict[bytes, Happened]:
    """Sum up, by run, what moved: counters, for runs with a definition what ended or was opened again, and for those
    that may be runs of code what that learns.
    """
    found: dict[bytes, Happened] = {}

    def of(run: bytes) -> Happened:
        happened = found.get(run)
        if happened is None:
            happened = found[run] = Happened(Counter(), ended=Counter(), reopened=Counter(), facts=[])
        return happened

    for task in tick.moved:
        if task.run_id is None:
            continue
        happened = of(task.run_id)
        if task.state in ENDED_TASK_STATES:
            happened.delta[task.state] += 1
            happened.delta["opened"] -= 1
            if task.step is not None:
                happened.ended[task.step, task.state] += 1
            else:
                happened.facts.append(task_fact(task, *tick.outcomes.pop(task.id, (None, None))))
        elif task.before in ENDED_TASK_STATES:
            happened.delta[task.before] -= 1
            happened.delta["opened"] += 1
            if task.step is not None:
                happened.reopened[task.step, task.before] += 1
    for run, step, state in tick.children:
        happened = of(run)
        happened.delta[state] += 1
        happened.delta["opened"] -= 1
        happened.ended[step, state] += 1
    for run, state, fact in tick.told:
        happened = of(run)
        happened.delta[state] += 1
        happened.delta["opened"] -= 1
        happened.facts.append(fact)
    tick.moved.clear()
    tick.told.clear()
    tick.children.clear()
    return found


def _is_for_code(fact: Fact) -> bool:
    return isinstance(fact, Outcome) and is_derived(fact.id)


def _save(tick: Tick, deltas: Deltas, saved: Mapping[bytes, Saved], facts: Facts | None = None) -> None:
    """Write counters and plans, one row per run, tell code what it waits for, and end what has nothing left open."""
    for run, plan in saved.items():
        delta = deltas[run]
        delta["total"] += plan.delta.total
        delta["opened"] += plan.delta.opened
        for name, number in plan.delta.counts.items():
            delta[name] += number
    if not deltas:
        return
    tick.has_advanced = True
    facts = facts or {}
    # What code waits for has a derived id, and so has a step of a plan. One statement tells and counts; runs that turn
    # out to be none of code, or to have ended, are counted like all others.
    of_code = {run: some for run, some in facts.items() if run not in saved and _is_for_code(some[0])}
    told = tell(tick, of_code, deltas)
    rest = {run: delta for run, delta in deltas.items() if run not in told}
    if rest:
        plans = {run: (plan.state, plan.expanding) for run, plan in saved.items()}
        rows = runs.count(tick.connection, rest, plans)
        untold = facts.keys() - of_code.keys()
        tell(tick, {row.id: facts[row.id] for row in rows if row.code and row.id in untold})
        conclude(tick, rows)
