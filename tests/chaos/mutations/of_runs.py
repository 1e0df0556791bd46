"""Mutations of runs: ticks that bisect, plans of DAGs, and code workflows."""

from __future__ import annotations

from tests.chaos.mutations.mutation import Mutation, chaos, seeds, tests

_UNDONE = "            tx.result = outer\n            tx.rolled_back()\n            belongs_to_part = "

CAREFUL_TICKS = (
    Mutation(
        "nobody-isolated",
        "a tick never bisects: one run that cannot be planned stops all others",
        "orchestrator/scheduler/transaction.py",
        "    if not tx.is_bisecting:\n        do(tx, items)\n",
        "    if True:\n        do(tx, items)\n",
        (seeds("22", "died of a defect"),),
    ),
    Mutation(
        "rolled-back-result-told",
        "the result of a rolled back part of a tick is published",
        "orchestrator/scheduler/transaction.py",
        _UNDONE,
        "            outer.merge(tx.result)\n" + _UNDONE,
        (
            tests(
                "tests/integration/test_rolled_back.py::test_a_rejected_turn_stops_no_running_task",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "undone-cancel-told",
        "a worker is ordered to stop a task that was cancelled in a rolled back part of a tick",
        "orchestrator/scheduler/transaction.py",
        _UNDONE,
        "            outer.outgoing.revoked.extend(tx.result.outgoing.revoked)\n" + _UNDONE,
        (
            tests(
                "tests/integration/test_rolled_back.py::test_a_rejected_turn_stops_no_running_task",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "undone-plan-kept",
        "caches are not told that a part of a tick was rolled back",
        "orchestrator/scheduler/transaction.py",
        _UNDONE,
        "            tx.result = outer\n            belongs_to_part = ",
        (
            tests(
                "tests/chaos/test_simulator.py::test_poison_harms_no_other_run_of_the_same_tick",
                "not at rest",
            ),
        ),
    ),
    Mutation(
        "undone-tick-remembered",
        "caches are not told that a whole tick was rolled back",
        "orchestrator/scheduler/term.py",
        "            self._rolled_back()\n            self.due_in = 0.0\n",
        "            self.due_in = 0.0\n",
        (
            tests(
                "tests/integration/test_rolled_back.py"
                "::test_a_request_whose_tick_was_rolled_back_is_applied_by_the_next",
                "^E ",
            ),
            tests(
                "tests/chaos/test_simulator.py::test_poison_harms_no_other_run_of_the_same_tick",
                "not at rest",
            ),
        ),
    ),
)

PLANS = (
    Mutation(
        "plan-begun-anew",
        "a new leader does not read the progress of a run's plan",
        "orchestrator/scheduler/dag/plans.py",
        "            plan = Plan(compiled.graph, state)\n",
        "            plan = Plan(compiled.graph, None)\n",
        (seeds("8", "not at rest"),),
    ),
    Mutation(
        "plan-not-resumed",
        "a new leader does not resume a plan that did not fit into a tick",
        "orchestrator/scheduler/dag/plans.py",
        "                plan.resume()\n",
        "                pass\n",
        (
            tests(
                "tests/integration/test_dag_runs.py::test_steps_left_for_the_next_tick_start_without_the_cached_plan",
                "^E ",
            ),
        ),
    ),
)

CODE = (
    Mutation(
        "code-sleeps",
        "a code workflow sleeps although a fact arrived during its turn",
        "orchestrator/store/code/taken_turns.py",
        "blockers = CASE WHEN run.last_event > r.through THEN 0 ELSE 1 END",
        "blockers = 1",
        (
            tests(
                "tests/integration/test_code_runs.py::test_events_during_a_turn_are_delivered_in_another_turn",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "turn-of-any-attempt",
        "a turn of any attempt counts, not only that of the current attempt",
        "orchestrator/store/code/taken_turns.py",
        "{current_attempt()}\n     CROSS JOIN LATERAL (SELECT last_event",
        "CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.tasks\n"
        "            WHERE id = r.id AND status IN ('dispatched', 'running') LIMIT 1) AS found\n"
        "     CROSS JOIN LATERAL (SELECT last_event",
        (
            tests(
                "tests/integration/test_code_runs.py::test_a_turn_of_an_attempt_that_is_over_is_ignored",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "continue-forgets",
        "a run that continues as new loses its cancellation and its messages",
        "orchestrator/domain/code/ends.py",
        "    return CarriedOver(facts, settled)\n",
        "    return CarriedOver([], [])\n",
        (
            chaos("--seconds 15 --seed 7 --rate 2 --faults kill-child --every 3 --loads inquiry", "was certainly told"),
            tests("tests/integration/test_code_continue_as_new.py::test_a_cancel_reaches_a_run_that_continues", "^E "),
        ),
    ),
    Mutation(
        "promise-given-up",
        "the resolution of a promise that the code has given up is lost",
        "orchestrator/scheduler/code/requests.py",
        "    if not missed:\n        return\n    runs = list({run for run, _ in missed})\n",
        "    return\n    runs = list({run for run, _ in missed})\n",
        (
            chaos("--seconds 15 --seed 7 --rate 2 --faults kill-child --every 3 --loads inquiry", "heard answer"),
            tests(
                "tests/integration/test_code_promises.py"
                "::test_a_resolution_of_an_abandoned_promise_goes_to_its_namesake",
                "^E ",
            ),
        ),
    ),
)
