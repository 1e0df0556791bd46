"""Mutations of flows: the planner, and what the leader does with its answers."""

from __future__ import annotations

from tests.chaos.mutations.mutation import Mutation, seeds, tests

FLOWS = (
    Mutation(
        "visits-numbered-twice",
        "visits to nodes of subflows are recorded under a number twice",
        "orchestrator/domain/flow/cursor.py",
        "        state.recorded += 1\n",
        "        state.recorded += len(state.frames) == 1\n",
        (seeds("2", "has recorded the visits"),),
    ),
    Mutation(
        "cancelled-not-awaited",
        "tasks that were cancelled with their node are not waited for",
        "orchestrator/domain/flow/cursor.py",
        "            self._state.closing += calls.running\n",
        "",
        (seeds("58", "left in untold"),),
    ),
    Mutation(
        "branches-as-they-came",
        "results of branches stand in the order in which they came",
        "orchestrator/domain/flow/plan.py",
        "                work.values[position] = event.value\n",
        "                work.values[sum(one is not None for one in work.values)] = event.value\n",
        (seeds("13", "came to"),),
    ),
    Mutation(
        "undone-state-kept",
        "a leader remembers the state of a flow that it planned last, also where that was rolled back",
        "orchestrator/scheduler/runs/kinds.py",
        "        self._runs.clear()\n",
        "",
        (
            tests(
                "tests/integration/test_kept_flows.py::test_what_was_planned_in_a_tick_that_failed_is_not_kept",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "failure-takes-default",
        "a node that has failed takes its `default` edge although it has an `error` edge",
        "orchestrator/domain/flow/cursor.py",
        "            self._follow(current, ERROR)\n",
        '            self._follow(current, "default")\n',
        (seeds("46", "has visited"),),
    ),
    Mutation(
        "numbers-begin-again",
        "the numbers of tasks and timers of a flow begin again",
        "orchestrator/domain/flow/state.py",
        "            made=made,\n",
        "            made=0,\n",
        (seeds("8", "not at rest"),),
    ),
    Mutation(
        "ended-twice",
        "a run of a flow that has ended is told to end again",
        "orchestrator/domain/flow/plan.py",
        "        if state.has_ended and not (isinstance(event, commands.Retried) and state.error is not None):\n",
        "        if False:\n",
        (tests("tests/unit/flows/test_planner.py::test_what_comes_late_or_twice_changes_nothing", "it ends once"),),
    ),
    Mutation(
        "timer-of-before",
        "a timer of an earlier wait ends a later one",
        "orchestrator/domain/flow/waits.py",
        "        if not isinstance(work, Wait) or work.timer != timer:\n",
        "        if not isinstance(work, Wait):\n",
        (
            tests(
                "tests/unit/flows/test_planner.py::test_the_timer_of_an_earlier_wait_ends_no_later_one",
                "^E ",
            ),
        ),
        missed="simulator: a timer is forgotten with its wait",
    ),
    Mutation(
        "early-signal-lost",
        "a signal that comes before a run of a flow has begun is lost",
        "orchestrator/domain/flow/waits.py",
        "        if state.is_over:\n            self.keep_signal(event)\n",
        "        if not state.frames:\n            return\n"
        "        if state.is_over:\n            self.keep_signal(event)\n",
        (
            tests(
                "tests/integration/test_flows.py::test_a_signal_counts_that_was_sent_before_the_run_began",
                "^E ",
            ),
        ),
        missed="simulator: people there send again what is waited for",
    ),
)
