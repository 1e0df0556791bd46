"""Which steps a retry of a DAG run repeats: the planner compared with a naive model, on random graphs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.dag.definition import Definition, Step, Trigger
from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.plan import Plan
from orchestrator.domain.dag.state import DagState, StepState, to_retry
from tests.fuzzing import examples

TRIGGERS: tuple[Trigger, ...] = get_args(Trigger)
COMPLETE = ("all_success", "all_ended", "none_failed")
SUCCESS, FAILED, SKIPPED, CANCELLED = StepState.SUCCESS, StepState.FAILED, StepState.SKIPPED, StepState.CANCELLED
Rows = dict[tuple[int, int], tuple[StepState, int]]
"""How a task ended and its result, by step and position."""


@dataclass
class World:
    """A graph, and the behavior of its steps: equal in every order of events, and different in each round."""

    graph: Graph
    seed: int
    seen: list[set[int]] = field(default_factory=list)
    """For each step, the upstream steps that have certainly ended when it starts."""
    above: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for place, parents in enumerate(self.graph.upstream):
            self.above.append(set(parents).union(*(self.above[parent] for parent in parents)))
            complete = self.graph.steps[place].trigger in COMPLETE
            # Steps with other triggers may be skipped while some upstream steps are open.
            further = (self.seen[parent] for parent in parents if self.graph.steps[parent].trigger == "all_ended")
            self.seen.append(set(parents).union(*further) if complete else set())

    def _random(self, *parts: object) -> random.Random:
        return random.Random(repr((self.seed, parts)))

    def given(self, place: int, outputs: dict[int, object]) -> int:
        """Return the input of a step, from all outputs above it."""
        return self._random("input", place, [(up, outputs.get(up)) for up in sorted(self.seen[place])]).getrandbits(32)

    def decision(self, place: int, given: int) -> str | int:
        """Return what a step becomes with an input: skipped, one task, or a fan-out of a size."""
        choices: list[str | int] = ["skip", "one", "one", "one", 0, 1, 2, 5]
        return self._random("decision", place, given).choice(choices)

    def fails_evaluation(self, place: int, turn: int) -> bool:
        return self._random("evaluation", place, turn).random() < 0.1

    def creatable(self, place: int, turn: int) -> int:
        """Return the first position from which tasks of a fan-out cannot be created in a round."""
        return self._random("creation", place, turn).choice([99, 99, 99, 0, 1, 3])

    def end(self, place: int, position: int, turn: int, given: int) -> tuple[StepState, int]:
        state = self._random("end", place, position, turn).choice([SUCCESS, SUCCESS, SUCCESS, FAILED, CANCELLED])
        return state, hash((place, position, given)) if state is SUCCESS else 0


class Leader:
    """Plays the scheduler: creates, reopens and ends tasks in random order, and sometimes dies."""

    def __init__(self, world: World) -> None:
        self.world, self.graph = world, world.graph
        self.random = random.Random(world.seed)
        self.plan = Plan(self.graph)
        self.rows: Rows = {}
        self.inputs: dict[tuple[int, int], int] = {}
        self.out: list[tuple[int, int]] = []
        self.ended_in: dict[tuple[int, int], int] = {}
        self.turn = 0
        self.counts = dict.fromkeys(("total", "open", "success", "failed", "skipped", "cancelled"), 0)

    def outputs(self) -> dict[int, object]:
        return outputs_of(
            [self.plan.step_state(place) for place in range(len(self.graph.steps))], self.totals(), self.rows
        )

    def totals(self) -> dict[int, int]:
        return {place: fan.total for place in range(len(self.graph.steps)) if (fan := self.plan.fan(place)) is not None}

    def begin(self) -> None:
        self.plan.begin()
        self.settle()

    def retry(self) -> None:
        self.turn += 1
        state = self.plan.state()
        retry = to_retry(self.graph, state.steps, state.fans)
        for place in retry.restarted:
            self.rows = {key: row for key, row in self.rows.items() if key[0] != place}
        self.plan.retry(retry.resumed, retry.restarted, float(self.turn))
        self.settle()

    def run(self, stop_after: int) -> bool:
        """Run to the end; return False if the run was stopped before."""
        stopped = False
        while self.out:
            if stop_after == 0 and not stopped:
                self.plan.stop()
                stopped = True
            stop_after -= 1
            place, position = self.out.pop(self.random.randrange(len(self.out)))
            state, result = self.world.end(place, position, self.turn, self.inputs[place, position])
            self.rows[place, position] = (CANCELLED, 0) if stopped else (state, result)
            self.ended_in[place, position] = self.turn
            state = self.rows[place, position][0]
            self.counts[state.name.lower()] += 1
            self.counts["open"] -= 1
            self.plan.task_ended(place, state)
            self.settle()
            if self.random.random() < 0.3:
                saved = msgspec.msgpack.decode(msgspec.msgpack.encode(self.plan.state()), type=DagState)
                self.plan = Plan(self.graph, saved)
                self.plan.resume()
                self.settle()
        return not stopped

    def settle(self) -> None:
        while True:
            while (place := self.plan.next_candidate()) is not None:
                self.open(place)
            for place in list(self.plan.fans_with_room):
                self.expand(place)
            self.count()
            if self.plan.fans_with_room and not self.out:
                continue
            if not self.plan._candidates:
                return

    def open(self, place: int) -> None:
        above = self.world.above[place] if self.turn else self.world.seen[place]
        tried_above = [up for up in above if self.plan.step_state(up) in (StepState.OPEN, StepState.WAITING)]
        assert not tried_above, "nothing above is still tried when a step is evaluated"
        given = self.world.given(place, self.outputs())
        decision = self.world.decision(place, given)
        if self.world.fails_evaluation(place, self.turn):
            self.plan.fail(place, "it cannot be evaluated")
        elif decision == "skip":
            self.plan.skip(place, "when")
        elif decision == "one":
            self.plan.open_single(place)
            self.start(place, 0)
        else:
            self.plan.open_fan(place, int(decision))

    def expand(self, place: int) -> None:
        limit = self.random.randint(1, 3)
        held = self.plan.reopen_held(place, limit)
        unhappy = [key for key, row in self.rows.items() if key[0] == place and row[0] is not SUCCESS]
        waiting = [key[1] for key in unhappy if self.ended_in[key] < self.turn]
        assert held <= len(waiting)
        for position in waiting[:held]:
            del self.rows[place, position]
            self.out.append((place, position))
        positions = self.plan.create(place, limit - held)
        if positions and positions[-1] >= self.world.creatable(place, self.turn):
            self.plan.abandon(place, len(positions), "it cannot be created")
        else:
            for position in positions:
                self.start(place, position)
        fan, concurrency = self.plan.fan(place), self.graph.steps[place].concurrency
        assert fan is not None
        mine = sum(1 for step, _ in self.out if step == place)
        assert concurrency is None or mine <= concurrency

    def start(self, place: int, position: int) -> None:
        assert (place, position) not in self.rows, "no task is created that is there"
        self.inputs[place, position] = self.world.given(place, self.outputs())
        self.out.append((place, position))

    def count(self) -> None:
        delta, self.plan.delta = self.plan.delta, type(self.plan.delta)()
        self.counts["total"] += delta.total
        self.counts["open"] += delta.opened
        for name, number in delta.counts.items():
            self.counts[name] += number
        assert all(number >= 0 for number in self.counts.values()), self.counts
        assert self.counts["total"] == sum(number for name, number in self.counts.items() if name != "total")


def outputs_of(states: list[StepState], totals: dict[int, int], rows: Rows) -> dict[int, object]:
    found: dict[int, object] = {}
    for place, state in enumerate(states):
        if place in totals:
            ended = [rows.get((place, position), (FAILED, 0)) for position in range(totals[place])]
            found[place] = tuple(result if end is SUCCESS else None for end, result in ended)
        else:
            found[place] = rows[place, 0][1] if state is SUCCESS else None
    return found


class Model:
    """The retry rule, naively: from the first step to the last, each checks all steps above it."""

    def __init__(self, leader: Leader) -> None:
        self.world = leader.world
        self.turn = leader.turn
        self.states = [leader.plan.step_state(place) for place in range(len(leader.graph.steps))]
        self.totals = leader.totals()
        self.rows = dict(leader.rows)

    def retry(self) -> None:
        self.turn += 1
        tried: set[int] = set()
        for place in range(len(self.states)):
            above = bool(tried & self.world.above[place])
            unhappy = self.states[place] in (FAILED, CANCELLED)
            if unhappy and not above and place in self.totals:
                tried.add(place)
                self.go_on(place)
            elif unhappy or (self.states[place] is SKIPPED and above):
                tried.add(place)
                self.consider(place)

    def go_on(self, place: int) -> None:
        total, creatable = self.totals[place], self.world.creatable(place, self.turn)
        created = sum(1 for step, _ in self.rows if step == place)
        for position in range(total):
            if position < created and self.rows[place, position][0] is not SUCCESS:
                self.run(place, position)
        self.create(place, range(created, total), creatable)

    def create(self, place: int, positions: range, creatable: int) -> None:
        """Create all tasks that can be created. The leader creates by slices, and may create fewer."""
        for position in positions:
            if position < creatable:
                self.run(place, position)
        mine = [self.rows.get((place, position), (FAILED, 0))[0] for position in range(self.totals[place])]
        self.states[place] = SUCCESS if all(state is SUCCESS for state in mine) else FAILED

    def consider(self, place: int) -> None:
        self.totals.pop(place, None)
        self.rows = {key: row for key, row in self.rows.items() if key[0] != place}
        above = [self.states[parent] for parent in self.world.graph.upstream[place]]
        failed = any(state in (FAILED, CANCELLED) for state in above)
        fires = {
            "all_success": all(state is SUCCESS for state in above),
            "all_ended": True,
            "any_success": not above or SUCCESS in above,
            "any_failed": not above or failed,
            "none_failed": not failed,
        }[self.world.graph.steps[place].trigger]
        decision = self.world.decision(place, self.given(place))
        if not fires:
            self.states[place] = SKIPPED
        elif self.world.fails_evaluation(place, self.turn):
            self.states[place] = FAILED
        elif decision == "skip":
            self.states[place] = SKIPPED
        elif decision == "one":
            self.states[place] = self.run(place, 0)
        else:
            self.totals[place] = int(decision)
            self.create(place, range(int(decision)), self.world.creatable(place, self.turn))

    def given(self, place: int) -> int:
        return self.world.given(place, outputs_of(self.states, self.totals, self.rows))

    def run(self, place: int, position: int) -> StepState:
        self.rows[place, position] = self.world.end(place, position, self.turn, self.given(place))
        return self.rows[place, position][0]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.integers(1, 12))
    steps = tuple(
        Step(
            name=f"s{place}",
            task="t",
            depends_on=tuple(
                f"s{parent}" for parent in draw(st.lists(st.integers(0, place - 1), max_size=4, unique=True))
            )
            if place
            else (),
            trigger=draw(st.sampled_from(TRIGGERS)),
            concurrency=draw(st.sampled_from([None, 1, 2])),
        )
        for place in range(size)
    )
    return World(Graph(Definition(name="random", steps=steps)), draw(st.integers(0, 2**32)))


@examples(250)
@given(worlds(), st.lists(st.sampled_from([-1, -1, 0, 1, 3]), min_size=2, max_size=5))
@pytest.mark.slow
def test_any_graph_is_retried_as_the_model_says(world: World, stops: list[int]) -> None:
    leader = Leader(world)
    leader.begin()
    leader.run(stops[0])
    for stop_after in stops[1:]:
        assert leader.counts["open"] == 0
        model = Model(leader)
        model.retry()
        leader.retry()
        if not leader.run(stop_after):
            continue
        states = [leader.plan.step_state(place) for place in range(len(world.graph.steps))]
        assert states == model.states
        assert leader.totals() == model.totals
        missing = {key for key in model.rows.keys() ^ leader.rows.keys() if key[0] in model.totals}
        assert all(world.creatable(place, leader.turn) < 99 for place, _ in missing), "but for slices of fan-outs"
        common = model.rows.keys() & leader.rows.keys()
        assert {key: model.rows[key] for key in common} == {key: leader.rows[key] for key in common}
        sizes = [leader.totals().get(place, 1) for place in range(len(states))]
        assert leader.counts["total"] == sum(sizes)
        assert leader.counts["open"] == 0


def test_a_step_below_a_success_waits_for_retried_steps_above_it() -> None:
    """A step may name any step above it: the end of the step right above is not enough."""
    parents = {"bad": (), "always": ("bad",), "low": ("always",)}
    steps = tuple(Step(name=name, task="t", depends_on=up, trigger="all_ended") for name, up in parents.items())
    plan = Plan(Graph(Definition(name="x", steps=steps)))
    plan.begin()
    for place, end in enumerate((FAILED, SUCCESS, FAILED)):
        assert plan.next_candidate() == place
        plan.open_single(place)
        plan.task_ended(place, end)
    retry = to_retry(plan.graph, plan.state().steps, plan.state().fans)
    assert retry == ([], [0, 2])
    plan.retry(*retry, 0.0)
    assert plan.next_candidate() == 0
    assert plan.next_candidate() is None
    plan.open_single(0)
    plan.task_ended(0, SUCCESS)
    assert plan.next_candidate() == 2


def test_reopened_tasks_keep_to_the_concurrency_of_their_fan_out() -> None:
    plan = Plan(Graph(Definition(name="x", steps=(Step(name="a", task="t", concurrency=2),))))
    plan.begin()
    assert plan.next_candidate() == 0
    plan.open_fan(0, 5)
    while positions := plan.create(0, 10):
        for _ in positions:
            plan.task_ended(0, FAILED)
    plan.retry([0], [], 0.0)
    assert plan.reopen_held(0, 10) == 2
    assert list(plan.create(0, 10)) == []
    assert not plan.fans_with_room
    plan.task_ended(0, SUCCESS)
    assert list(plan.fans_with_room) == [0]
    assert plan.reopen_held(0, 10) == 1
