"""The DAG planner compared with a naive oracle, on random graphs."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.dag.definition import Definition, Step, Trigger
from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.plan import Plan
from orchestrator.domain.dag.state import ENDED, DagState, Fan, StepState, decide
from tests.fuzzing import examples

TRIGGERS: tuple[Trigger, ...] = get_args(Trigger)


def graph_of(parents: list[list[int]], triggers: list[Trigger], concurrency: list[int | None] | None = None) -> Graph:
    steps = tuple(
        Step(
            name=f"s{place}",
            task="t",
            depends_on=tuple(f"s{parent}" for parent in above),
            trigger=triggers[place],
            concurrency=concurrency[place] if concurrency else None,
        )
        for place, above in enumerate(parents)
    )
    return Graph(Definition(name="random", steps=steps))


def oracle(graph: Graph, outcomes: list[StepState]) -> list[StepState]:
    """Return how each step ends, computed step by step from the ends of its upstream steps."""
    states: list[StepState] = []
    for place, step in enumerate(graph.steps):
        above = [states[parent] for parent in graph.upstream[place]]
        failed = any(state in (StepState.FAILED, StepState.CANCELLED) for state in above)
        runs = {
            "all_success": all(state is StepState.SUCCESS for state in above),
            "all_ended": True,
            "any_success": not above or StepState.SUCCESS in above,
            "any_failed": not above or failed,
            "none_failed": not failed,
        }[step.trigger]
        states.append(outcomes[place] if runs else StepState.SKIPPED)
    return states


@st.composite
def runs(draw: st.DrawFn) -> tuple[Graph, list[StepState], int, list[int]]:
    size = draw(st.integers(1, 25))
    parents = [
        draw(st.lists(st.integers(0, place - 1), max_size=5, unique=True)) if place else [] for place in range(size)
    ]
    triggers = [draw(st.sampled_from(TRIGGERS)) for _ in range(size)]
    outcomes = [draw(st.sampled_from(ENDED)) for _ in range(size)]
    fans = [draw(st.sampled_from([-1, -1, 0, 1, 3, 7])) for _ in range(size)]
    limits = [draw(st.sampled_from([None, 1, 2])) for _ in range(size)]
    outcomes = [
        StepState.SUCCESS if fan == 0 else (StepState.FAILED if fan > 0 and end is StepState.CANCELLED else end)
        for fan, end in zip(fans, outcomes, strict=True)
    ]
    return graph_of(parents, triggers, limits), outcomes, draw(st.integers(0, 2**32)), fans


class Driver:
    """Plays the scheduler: evaluates candidates, creates tasks, ends them in random order, reloads saved state."""

    def __init__(self, graph: Graph, outcomes: list[StepState], seed: int, fans: list[int]) -> None:
        self.graph, self.outcomes, self.fans = graph, outcomes, fans
        self.random = random.Random(seed)
        self.plan = Plan(graph)
        self.out: list[tuple[int, int]] = []
        self.started: dict[int, int] = {}
        self.counts = {"total": 0, "open": 0, "success": 0, "failed": 0, "skipped": 0, "cancelled": 0}

    def run(self) -> None:
        self.plan.begin()
        self.settle()
        while self.out:
            place, position = self.out.pop(self.random.randrange(len(self.out)))
            state = self.end_of(place, position)
            self.count(state.name.lower(), 1)
            self.count("open", -1)
            self.plan.task_ended(place, state)
            self.settle()
            if self.random.random() < 0.3:  # the leader died; the next leader has only the saved state
                self.plan = Plan(
                    self.graph, DagState(*[getattr(self.plan.state(), f) for f in DagState.__struct_fields__])
                )
                self.plan.fans_with_room.update(dict.fromkeys(self.unfinished_fans()))
                self.settle()

    def unfinished_fans(self) -> list[int]:
        return [
            place
            for place in range(len(self.graph.steps))
            if self.plan.step_state(place) is StepState.OPEN
            and (fan := self.plan.fan(place)) is not None
            and fan.created < fan.total
        ]

    def end_of(self, place: int, position: int) -> StepState:
        """All but the first task of a fan-out succeed."""
        end = self.outcomes[place]
        if self.fans[place] < 0 or (position == 0 and end in (StepState.FAILED, StepState.SUCCESS)):
            return end
        return StepState.SUCCESS

    def settle(self) -> None:
        while (place := self.plan.next_candidate()) is not None:
            self.check_trigger(place)
            if self.outcomes[place] is StepState.SKIPPED:
                self.plan.skip(place, "when")
            elif self.fans[place] < 0:
                self.plan.open_single(place)
                self.out.append((place, 0))
            else:
                self.plan.open_fan(place, self.fans[place])
            self.started[place] = self.started.get(place, 0) + 1
        for place in list(self.plan.fans_with_room):
            self.out.extend((place, position) for position in self.plan.create(place, limit=self.random.randint(1, 4)))
            fan, limit = self.plan.fan(place), self.graph.steps[place].concurrency
            assert fan is not None
            assert limit is None or fan.created - fan.ended <= limit
        delta = self.plan.delta
        self.count("total", delta.total)
        self.count("open", delta.opened)
        for name, number in delta.counts.items():
            self.count(name, number)
        self.plan.delta = type(delta)()
        if self.plan.fans_with_room and not self.out:
            self.settle()

    def check_trigger(self, place: int) -> None:
        above = [self.plan.step_state(parent) for parent in self.graph.upstream[place]]
        trigger = self.graph.steps[place].trigger
        if trigger in ("all_success", "all_ended", "none_failed"):
            assert all(state in ENDED for state in above)

    def count(self, name: str, number: int) -> None:
        self.counts[name] += number


@examples(200)
@given(runs())
@pytest.mark.slow
def test_any_order_of_events_ends_as_the_oracle_says(run: tuple[Graph, list[StepState], int, list[int]]) -> None:
    graph, outcomes, seed, fans = run
    for place, fan in enumerate(fans):
        if fan > 0 and outcomes[place] is StepState.SKIPPED:
            fans[place] = -1
    driver = Driver(graph, outcomes, seed, fans)
    driver.run()
    final = [driver.plan.step_state(place) for place in range(len(graph.steps))]
    assert final == oracle(graph, outcomes)
    assert all(number == 1 for number in driver.started.values()), "each step starts once"
    counts = driver.counts
    assert counts["open"] == 0
    assert counts["total"] == counts["success"] + counts["failed"] + counts["skipped"] + counts["cancelled"]


@pytest.mark.slow
def test_a_long_chain_is_skipped_without_recursion() -> None:
    size = 20_000
    graph = graph_of([[place - 1] if place else [] for place in range(size)], ["all_success"] * size)
    plan = Plan(graph)
    plan.begin()
    assert plan.next_candidate() == 0
    plan.open_single(0)
    plan.task_ended(0, StepState.FAILED)
    assert plan.next_candidate() is None
    assert plan.delta.counts == {"skipped": size - 1}
    assert plan.state().reasons[1] == "all_success: s0 failed"


def test_stop_cancels_waiting_steps_and_uncreated_tasks() -> None:
    graph = graph_of([[], [0], [1]], ["all_success"] * 3, [None, 2, None])
    plan = Plan(graph)
    plan.begin()
    assert plan.next_candidate() == 0
    plan.open_single(0)
    plan.task_ended(0, StepState.SUCCESS)
    assert plan.next_candidate() == 1
    plan.open_fan(1, 10)
    assert list(plan.create(1, 100)) == [0, 1]
    plan.stop()
    assert plan.delta.counts == {"cancelled": 8 + 1}
    plan.task_ended(1, StepState.CANCELLED)
    plan.task_ended(1, StepState.CANCELLED)
    assert [plan.step_state(place) for place in range(3)] == [
        StepState.SUCCESS,
        StepState.FAILED,
        StepState.CANCELLED,
    ]


def test_a_step_that_is_withheld_before_it_starts_is_cancelled_and_what_follows_is_skipped() -> None:
    plan = Plan(graph_of([[], [0], [1]], ["all_success"] * 3))
    plan.begin()
    plan.open_single(plan.next_candidate())  # type: ignore[arg-type]
    plan.withhold(1)
    plan.withhold(0)  # has started
    assert [plan.step_state(index) for index in range(3)] == [StepState.OPEN, StepState.CANCELLED, StepState.SKIPPED]
    plan.task_ended(0, StepState.SUCCESS)
    assert (plan.next_candidate(), plan.delta.opened) == (None, 1)  # the end of the task is counted elsewhere


def test_reopen_runs_failed_and_skipped_steps_again() -> None:
    graph = graph_of([[], [], [0, 1]], ["all_success"] * 3)
    plan = Plan(graph)
    plan.begin()
    while (place := plan.next_candidate()) is not None:
        plan.open_single(place)
    plan.task_ended(0, StepState.SUCCESS)
    plan.task_ended(1, StepState.FAILED)
    assert plan.step_state(2) is StepState.SKIPPED
    again = Plan(graph, plan.state())
    again.reopen([(1, StepState.FAILED)])
    assert again.next_candidate() is None
    again.task_ended(1, StepState.SUCCESS)
    assert again.next_candidate() == 2


@given(st.sampled_from(TRIGGERS), st.lists(st.sampled_from(list(StepState)), max_size=6))
def test_an_early_decision_holds_for_every_final_state(trigger: Trigger, above: list[StepState]) -> None:
    """A decision made while some steps are open holds however they end."""
    early = decide(trigger, len(above), [above.count(state) for state in StepState])
    if early is None:
        return
    for end in ENDED:
        final = [state if state in ENDED else end for state in above]
        assert decide(trigger, len(final), [final.count(state) for state in StepState]) is early


def test_a_fan_out_counts_its_ended_tasks() -> None:
    assert Fan(5, 3, 1, 1, 1, 0).ended == 3
