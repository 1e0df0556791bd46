"""Advance runs of DAGs: the planner says what starts, this creates the tasks and the child runs.

Plans are kept between ticks, because only the leader changes them; they are forgotten whenever a tick fails, and
rebuilt from what Postgres has.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from itertools import islice
from typing import Any

import msgspec

from orchestrator.domain.checks import MOST_STEPS
from orchestrator.domain.dag import STATE_OF_TASK, DagState, Delta, Graph, Plan, step_output
from orchestrator.domain.definition import Definition, check_size, resolve_params
from orchestrator.domain.happened import Happened
from orchestrator.domain.ids import derived_id, to_text
from orchestrator.domain.placement import Origin, of_step
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.scope import Budget, Scope
from orchestrator.domain.steps import FanOut, Skip, StepProgram
from orchestrator.domain.task import NewTask
from orchestrator.errors import InvalidWorkflow
from orchestrator.scheduler.plan_retries import reopen_held, retry_plan
from orchestrator.scheduler.tasks import adopt
from orchestrator.scheduler.tick import Tick
from orchestrator.store import dags, run_retries, workflows
from orchestrator.store.dags import Key, NewRun
from orchestrator.store.workflows import Stored

_CACHE = 500
"""Plans that are kept in memory."""
_FANS = 5
"""Fan-outs of which a full slice is created at once, or as many single steps: the rest waits for the next tick."""
_MOST_OUTPUTS = 200_000
"""Values that the steps of a run may read at once."""
_ENOUGH_DATA = 8_000_000
"""Bytes of input after which a fan-out goes on in the next tick."""
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode


class Compiled:
    """A definition with everything that can be worked out once."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.graph = Graph(definition)
        self.programs = [StepProgram(self.graph, place) for place in range(len(self.graph.steps))]
        self.placements = [of_step(step, definition.queue) for step in self.graph.steps]


@dataclass
class DagRun:
    """One run in flight."""

    id: bytes
    compiled: Compiled
    params: dict[str, Any]
    info: dict[str, Any]
    plan: Plan


@dataclass(frozen=True)
class Saved:
    """What a run's row is to remember."""

    delta: Delta
    state: bytes
    expanding: bool


class Dags:
    """All DAG runs that the leader has to do with."""

    def __init__(self, max_payload: int, slice_size: int) -> None:
        self._max_payload = max_payload
        self._slice = slice_size
        self._compiled: dict[tuple[str, int], Compiled] = {}
        self._runs: OrderedDict[bytes, DagRun] = OrderedDict()
        self._latest: dict[str, Stored | None] = {}
        """Workflows of which child runs are being created."""

    def forget(self) -> None:
        """A tick failed: what was planned in it did not happen."""
        self._runs.clear()

    # -- events

    def advance(
        self,
        tick: Tick,
        happened: Mapping[bytes, Sequence[Happened]],
    ) -> dict[bytes, Saved]:
        """Bring runs up to date with what happened to them; return what the rows of those with a plan remember."""
        runs = self._load(tick, happened) if happened else []
        unfinished: set[bytes] = set()
        for run in runs:
            for one in happened[run.id]:
                _tell(run, one)
                if one.is_retried and not retry_plan(tick, run.id, run.plan, 10 * self._slice):
                    tick.backlog.add(tick, [(run.id, Happened(is_retried=True))])
                    unfinished.add(run.id)
        self._settle(tick, runs)
        return {run.id: self._save(run) for run in runs if run.id not in unfinished}

    def sizes(self, tick: Tick, ids: Sequence[bytes]) -> dict[bytes, int]:
        """Return how many steps runs have that are planned; more than any has where that is still to be worked out."""
        unknown = [run for run in ids if run not in self._runs]
        found = dags.versions(tick.connection, unknown) if unknown else {}
        sizes = {run: len(self._runs[run].compiled.graph.steps) for run in ids if run in self._runs}
        for run, version in found.items():
            compiled = self._compiled.get(version)
            sizes[run] = len(compiled.graph.steps) if compiled is not None else MOST_STEPS
        return sizes

    def definition(self, tick: Tick, name: str, version: int) -> Definition:
        """Return a version of a workflow."""
        return self._compile(tick, name, version).definition

    def outputs(self, tick: Tick, ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return what runs give to their parents: the outputs of the steps that nothing depends on."""
        runs = self._load(tick, ids)
        names = self._names(tick, [(run, place) for run in runs for place in run.compiled.graph.leaves])
        leaves = {run.id: [run.compiled.graph.steps[place].name for place in run.compiled.graph.leaves] for run in runs}
        return {run: _encode({step: names[run].get(step) for step in steps}) for run, steps in leaves.items()}

    # -- loading and saving

    def _load(self, tick: Tick, ids: Iterable[bytes]) -> list[DagRun]:
        wanted = list(dict.fromkeys(ids))
        missing = [run_id for run_id in wanted if run_id not in self._runs]
        for row in dags.load(tick.connection, missing) if missing else ():
            compiled = self._compile(tick, row.workflow, row.version)
            state = msgspec.msgpack.decode(row.state, type=DagState) if row.state is not None else None
            fire_time = row.fire_time.astimezone(UTC).isoformat()
            info = {"id": to_text(row.id), "workflow": row.workflow, "version": row.version, "fire_time": fire_time}
            self._runs[row.id] = DagRun(row.id, compiled, row.params, info, Plan(compiled.graph, state))
        found = [self._runs[run_id] for run_id in wanted if run_id in self._runs]
        for run in found:
            self._runs.move_to_end(run.id)
        while len(self._runs) > max(_CACHE, len(found)):
            self._runs.popitem(last=False)
        return found

    def _compile(self, tick: Tick, name: str, version: int) -> Compiled:
        key = (name, version)
        if key not in self._compiled:
            stored = workflows.read(tick.connection, name, version)
            assert stored is not None, f"the definition of {name} version {version} is gone"
            self._compiled[key] = Compiled(stored.definition)
        return self._compiled[key]

    @staticmethod
    def _save(run: DagRun) -> Saved:
        delta, run.plan.delta = run.plan.delta, Delta()
        return Saved(delta, _encode(run.plan.state()), run.plan.has_more)

    # -- starting steps

    def _settle(self, tick: Tick, runs: list[DagRun]) -> None:
        """Evaluate candidates, all runs together, as far as there is room; then create what they become."""
        singles: list[tuple[DagRun, int]] = []
        room = _FANS * self._slice
        while candidates := list(islice(((run, place) for run in runs for place in _drain(run.plan)), room)):
            room -= len(candidates)
            names = self._names(tick, candidates, lambda program: program.decision_needs)
            for run, place in candidates:
                if self._open(run, place, names[run.id]):
                    singles.append((run, place))
        fans = [(run, place) for run in runs for place in list(run.plan.fans_with_room)]
        if singles or fans:
            self._create(tick, singles, fans, max(room, self._slice))

    def _open(self, run: DagRun, place: int, names: Scope) -> bool:
        """Decide what a candidate becomes; True if that is a single task."""
        try:
            decision = run.compiled.programs[place].decide(names)
        except InvalidWorkflow as error:
            run.plan.fail(place, str(error))
            return False
        if isinstance(decision, Skip):
            run.plan.skip(place, decision.reason)
        elif isinstance(decision, FanOut):
            run.plan.open_fan(place, decision.total)
        else:
            run.plan.open_single(place)
            return True
        return False

    def _create(self, tick: Tick, singles: list[tuple[DagRun, int]], fans: list[tuple[DagRun, int]], room: int) -> None:
        names = self._names(tick, [*singles, *fans], lambda program: program.needs)
        self._latest.clear()
        tasks: list[NewTask] = []
        children: list[NewRun] = []
        failed: list[tuple[DagRun, int, int, str]] = []
        for run, place in singles:
            self._instantiate(tick, run, place, range(1), None, names[run.id], tasks, children, failed)
        for run, place in fans:
            room -= reopen_held(tick, run.id, run.plan, place, min(self._slice, room))
            positions = run.plan.create(place, min(self._slice, room))
            room -= len(positions)
            fan = run.plan.fan(place)
            assert fan is not None
            if positions:
                self._instantiate(tick, run, place, positions, fan.total, names[run.id], tasks, children, failed)
        if tasks:
            retried = {run.id for run, _ in [*singles, *fans] if run.plan.retried}
            before = [task.id for task in tasks if task.run_id in retried] if retried else []
            adopt(tick, tasks, run_retries.past_attempts(tick.connection, before) if before else {})
        if children:
            dags.start(tick.connection, children)
            tick.runs_to_begin = True
        for run, place, number, reason in failed:
            run.plan.abandon(place, number, reason)
        if failed:
            self._settle(tick, [run for run, _, _, _ in failed])

    def _instantiate(
        self,
        tick: Tick,
        run: DagRun,
        place: int,
        positions: range,
        count: int | None,
        names: Scope,
        tasks: list[NewTask],
        children: list[NewRun],
        failed: list[tuple[DagRun, int, int, str]],
    ) -> None:
        step = run.compiled.graph.steps[place]
        new_tasks: list[NewTask] = []
        new_runs: list[NewRun] = []
        size = 0
        try:
            instances = run.compiled.programs[place].instances(names, positions, count)
            for position, (given, key) in zip(positions, instances, strict=False):
                if step.workflow is not None:
                    new_runs.append(self._child(tick, run, step.workflow, step.name, position, given))
                    size += len(new_runs[-1].params)
                else:
                    new_tasks.append(self._task(run, place, position, count, given, key))
                    size += len(new_tasks[-1].payload)
                if size > _ENOUGH_DATA:
                    break
        except (InvalidWorkflow, *REFUSALS) as error:
            failed.append((run, place, len(positions), str(error)))
            return
        tasks.extend(new_tasks)
        children.extend(new_runs)
        created = len(new_tasks) + len(new_runs)
        if created < len(positions):
            run.plan.give_back(place, len(positions) - created)

    def _task(
        self, run: DagRun, place: int, position: int, count: int | None, given: dict[str, Any], key: str | None
    ) -> NewTask:
        step = run.compiled.graph.steps[place]
        context = {"workflow": run.info["workflow"], "step": step.name, "index": position, "count": count}
        payload = _encode(((), given, context))
        if len(payload) > self._max_payload:
            raise InvalidWorkflow(
                f"The input of task {step.name!r} has {len(payload):,} bytes, and at most {self._max_payload:,} are "
                f"allowed. Let upstreams return references to large data, or raise the setting max_payload."
            )
        identifier = derived_id(run.id, step.name, position)
        return run.compiled.placements[place].new(identifier, payload, key, Origin(run.id, position, step.name))

    def _child(self, tick: Tick, run: DagRun, workflow: str, step: str, position: int, given: dict[str, Any]) -> NewRun:
        if workflow not in self._latest:
            self._latest[workflow] = workflows.latest(tick.connection, workflow)
        stored = self._latest[workflow]
        if stored is None:
            raise InvalidWorkflow(f"There is no workflow {workflow!r}.")
        params = resolve_params(stored.definition, given, tick.now)
        turn = (run.plan.retried,) if run.plan.retried else ()
        new = dags.new_run(stored.definition, stored.version, derived_id(run.id, "run", step, position, *turn), params)
        check_size(new.params, f"The parameters of workflow {workflow!r}", self._max_payload)
        return new._replace(
            parent_run=run.id, parent_step=step, parent_position=position, fire_time=run.info["fire_time"]
        )

    # -- outputs

    def _names(
        self,
        tick: Tick,
        wanted: Iterable[tuple[DagRun, int]],
        needs: Callable[[StepProgram], Iterable[int]] | None = None,
    ) -> dict[bytes, Scope]:
        """Return, by run, what expressions of these steps may name, as far as it `needs`; one query for all of them.

        Without `needs`, these steps themselves are named.
        """
        needed: dict[Key, tuple[DagRun, int]] = {}
        names: dict[bytes, Scope] = {}
        rooms: dict[bytes, int] = defaultdict(lambda: _MOST_OUTPUTS)
        for run, place in wanted:
            if run.id not in names:
                names[run.id] = Scope({"params": run.params, "run": run.info}, Budget(self._max_payload))
            for other in [place] if needs is None else needs(run.compiled.programs[place]):
                name = run.compiled.graph.steps[other].name
                if (run.id, name) in needed:
                    continue
                fan = run.plan.fan(other)
                number = fan.total if fan is not None else 1
                if number > rooms[run.id]:
                    names[run.id].unreadable[name] = (
                        f"it has {number:,} values, and {_MOST_OUTPUTS:,} are the most that one step can read. "
                        f"Let its tasks keep their results elsewhere, or combine them in several steps"
                    )
                    continue
                rooms[run.id] -= number
                needed[run.id, name] = (run, other)
        of_tasks: list[Key] = []
        of_runs: list[Key] = []
        for key, (run, place) in needed.items():
            (of_tasks if run.compiled.graph.steps[place].workflow is None else of_runs).append(key)
        found = dags.outputs(tick.connection, of_tasks) if of_tasks else {}
        found |= dags.child_outputs(tick.connection, of_runs) if of_runs else {}
        for key, (run, place) in needed.items():
            try:
                plan = run.plan
                names[run.id][key[1]] = step_output(plan.step_state(place), plan.fan(place), found[key], _decode)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                names[run.id].unreadable[key[1]] = str(error)
        return names


def _tell(run: DagRun, happened: Happened) -> None:
    """Tell a plan what happened."""
    plan, index = run.plan, run.compiled.graph.index
    if happened.begun:
        plan.begin()
    for (step, state), number in happened.ended.items():
        plan.task_ended(index[step], STATE_OF_TASK[state], number)
    if happened.stopped:
        plan.stop()
    if happened.reopened:
        plan.reopen(
            (index[step], STATE_OF_TASK[state])
            for (step, state), number in happened.reopened.items()
            for _ in range(number)
        )
    if happened.is_expanding:
        plan.resume()


def _drain(plan: Plan) -> Iterable[int]:
    while (place := plan.next_candidate()) is not None:
        yield place
