"""Mutations of flows: the planner, and the leader's handling of its commands."""

from __future__ import annotations

from tests.chaos.mutations.mutation import Mutation, seeds, tests

FLOWS = (
    Mutation(
        "visits-numbered-twice",
        "visits to nodes of subflows are recorded twice under one number",
        "orchestrator/domain/flow/cursor.py",
        "        state.recorded += 1\n",
        "        state.recorded += len(state.frames) == 1\n",
        (seeds("2", "has recorded the visits"),),
    ),
    Mutation(
        "cancelled-not-awaited",
        "tasks that were cancelled with their node are not awaited",
        "orchestrator/domain/flow/cursor.py",
        "            self._state.closing += calls.running\n",
        "",
        (seeds("58", "left in untold"),),
    ),
    Mutation(
        "branches-as-they-came",
        "results of branches are stored in the order of their arrival",
        "orchestrator/domain/flow/plan.py",
        "                work.values[position] = event.value\n",
        "                work.values[sum(one is not None for one in work.values)] = event.value\n",
        (seeds("13", "came to"),),
    ),
    Mutation(
        "undone-state-kept",
        "a leader keeps the last planned state of a flow although its transaction was rolled back",
        "orchestrator/scheduler/runs/kinds.py",
        "        self._runs.clear()\n",
        "",
        (
            tests(
                "tests/integration/test_kept_flows.py::test_plans_of_a_failed_tick_are_not_kept",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "failure-takes-default",
        "a failed node follows its `default` edge although it has an `error` edge",
        "orchestrator/domain/flow/cursor.py",
        "            self._follow(current, ERROR)\n",
        '            self._follow(current, "default")\n',
        (seeds("46", "has visited"),),
    ),
    Mutation(
        "numbers-begin-again",
        "a failover restarts the numbers of a flow's tasks and timers",
        "orchestrator/domain/flow/state.py",
        "            made=made,\n",
        "            made=0,\n",
        (seeds("8", "not at rest"),),
    ),
    Mutation(
        "ended-twice",
        "an ended run of a flow ends again",
        "orchestrator/domain/flow/plan.py",
        "        if state.has_ended and not (isinstance(event, commands.Retried) and state.error is not None):\n",
        "        if False:\n",
        (tests("tests/unit/flows/test_planner.py::test_late_and_duplicate_events_change_nothing", "it ends once"),),
    ),
    Mutation(
        "timer-of-before",
        "the timer of an earlier wait ends a later wait",
        "orchestrator/domain/flow/waits.py",
        "        if not isinstance(work, Wait) or work.timer != timer:\n",
        "        if not isinstance(work, Wait):\n",
        (
            tests(
                "tests/unit/flows/test_planner.py::test_the_timer_of_an_earlier_wait_does_not_end_a_later_wait",
                "^E ",
            ),
        ),
        missed="simulator: a timer is deleted with its wait",
    ),
    Mutation(
        "early-signal-lost",
        "a signal that arrives before a flow's run has begun is lost",
        "orchestrator/domain/flow/waits.py",
        "        if state.is_over:\n            self.keep_signal(event)\n",
        "        if not state.frames:\n            return\n"
        "        if state.is_over:\n            self.keep_signal(event)\n",
        (
            tests(
                "tests/integration/test_flows.py::test_a_signal_sent_before_the_run_begins_counts",
                "^E ",
            ),
        ),
        missed="simulator: its person repeats signals",
    ),
)
