"""Mutations of tasks: dispatch, reports, losses, limits, and leadership."""

from __future__ import annotations

from tests.chaos.mutations.mutation import Mutation, chaos, seeds, tests

TASKS = (
    Mutation(
        "reports-not-resent",
        "reports are not sent again after Redis has lost them",
        "workers/reporting/reporter.py",
        "        resent = [*kept, *lost, *batch]\n",
        "        resent = [*kept, *batch]\n",
        (tests("tests/unit/test_kept_reports.py", "sent_again_before_the_rest"),),
    ),
    Mutation(
        "pulled-again-at-once",
        "pulled work that Redis has lost is offered to other clients at once",
        "workers/executors/pull.py",
        "self._offer_work(execution, again=True)",
        "self._offer_work(execution)",
        (
            chaos("--seconds 15 --seed 7 --rate 4 --faults redis-flush --every 2 --loads pulled", "had been heard"),
            tests("tests/integration/test_executor_pull_losses.py", "stays_with_its_holder"),
        ),
    ),
    Mutation(
        "dead-at-first-silence",
        "workers are declared dead at the first missing heartbeat",
        "orchestrator/scheduler/fleet/view.py",
        "            self.fair_time += min(monotonic - self._last_check, self.ttl / 2)\n",
        "            self.fair_time += self.ttl\n",
        (
            seeds("0", "alive and heard"),
            chaos(
                "--seconds 15 --seed 7 --rate 10 --faults stop-worker --every 1 --loads long", "whose worker was alive"
            ),
        ),
    ),
    Mutation(
        "ttl-too-short",
        "the TTL of workers is a tenth of the setting",
        "orchestrator/scheduler/fleet/view.py",
        "        self.ttl = ttl\n",
        "        self.ttl = ttl / 10\n",
        (seeds("14", "alive and heard"),),
    ),
    Mutation(
        "heartbeats-believed",
        "heartbeats count as long as Redis keeps them, even if their number does not change",
        "orchestrator/scheduler/fleet/view.py",
        "            if beat.number == 0 or beat.number != self._numbers.get(beat.worker):\n",
        "            if True:\n",
        (
            seeds("85", "not at rest"),
            tests("tests/unit/test_fleet.py::test_an_unchanged_heartbeat_counts_as_silence", "^E "),
        ),
    ),
    Mutation(
        "completion-overruled",
        "an attempt that has completed in its transaction is failed or cancelled",
        "orchestrator/store/tasks/transitions.py",
        "     WHERE t.ctid = found.place AND t.completion IS NULL\n    RETURNING t.*, r.reason",
        "     WHERE t.ctid = found.place\n    RETURNING t.*, r.reason",
        (tests("tests/integration/test_completions.py::test_a_completed_task_is_not_taken_away", "^E "),),
        missed="simulator: seed 10 no longer finds it",
    ),
    Mutation(
        "success-of-any-attempt",
        "a success of any attempt counts",
        "orchestrator/store/tasks/transitions.py",
        "     {current_attempt(sources_of(TaskState.SUCCESS))}\n     WHERE t.ctid = found.place {condition}\n",
        "     CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.tasks\n"
        "            WHERE id = r.id AND status IN {among(sources_of(TaskState.SUCCESS))} LIMIT 1) AS found\n"
        "     WHERE t.ctid = found.place {condition}\n",
        (
            seeds("55", "has the result of another execution"),
            tests("tests/integration/test_transitions.py::test_a_report_of_another_attempt_changes_nothing", "^E "),
        ),
    ),
    Mutation(
        "first-loss-charged",
        "the first loss is charged, even to a task that ran with others",
        "orchestrator/domain/tasks/outcomes.py",
        "    charged = 1 if alone else 0\n",
        "    charged = 1\n",
        (
            tests(
                "tests/integration/test_lost_workers.py::test_only_the_death_of_its_own_process_charges_a_task",
                "^E ",
            ),
        ),
        missed="simulator in 61 seeds",
    ),
    Mutation(
        "losses-free",
        "no loss is charged: a task that kills its process is retried thirty times",
        "orchestrator/domain/tasks/outcomes.py",
        "    charged = 1 if alone else 0\n",
        "    charged = 0\n",
        (
            tests(
                "tests/unit/test_retry_policy.py::test_losses_of_a_task_alone_count_up_to_the_limit", "AssertionError"
            ),
        ),
    ),
    Mutation(
        "no-last-word-free",
        "tasks of a process that died without a farewell are returned free of charge",
        "workers/parent/child.py",
        "            Lost(*attempt, alone=False, reason=died_of)\n            if attempt in begun",
        '            Returned(*attempt, "worker stops")\n            if attempt in begun',
        (chaos("--seconds 10 --seed 7 --rate 5 --faults kill-child --every 5 --loads exiting", "has not ended"),),
    ),
    Mutation(
        "exit-code-believed",
        "tasks of a process that ended with exit code 4 are returned free of charge",
        "workers/parent/child.py",
        "        if self.held.farewell is Farewell.UNFINISHED or self.dismissed:\n",
        '        if self.held.farewell is Farewell.UNFINISHED or self.dismissed or died_of == "exit code 4":\n',
        (
            tests(
                "tests/acceptance/test_crashes.py::test_an_exiting_task_counts_as_lost_with_any_exit_code[4]",
                "ResultTimeout",
            ),
        ),
        missed="driver in 10 s: few exit codes are 4, and the next attempt has another one",
    ),
    Mutation(
        "tasks-to-any-worker",
        "tasks go to workers that do not know them",
        "orchestrator/scheduler/dispatch/dispatcher.py",
        "            elif kinds is None or task.is_turn_task:\n",
        "            elif True:\n",
        (
            tests(
                "tests/integration/test_rolling_deploy.py::test_tasks_known_to_some_workers_go_only_to_these",
                "^E .*old|^E .*80",
            ),
        ),
        missed="driver in 20 s: a worker returns an unknown task, and another worker runs it soon",
    ),
    Mutation(
        "rates-forgotten",
        "a new leader forgets the used capacity of rates",
        "orchestrator/scheduler/limits.py",
        "            self.buckets.due.update(store.buckets(tx.connection))\n",
        "",
        (
            chaos("--seconds 20 --seed 7 --rate 2 --faults term-scheduler --every 3 --loads rated", "one more than"),
            tests(
                "tests/integration/test_limits_and_fairness.py::test_a_rate_limit_survives_a_change_of_leader",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "cancelled-makes-room",
        "a cancelled attempt frees its place in the lane before its code has stopped",
        "orchestrator/scheduler/tasks/creation.py",
        "lingering={task.id for task in revoked})\n",
        "lingering=())\n",
        (
            chaos(
                "--seconds 15 --seed 7 --rate 2 --faults kill-child --every 5 --loads reconsidered",
                "of tidying ran at once",
            ),
            tests(
                "tests/integration/test_limits_and_fairness.py"
                "::test_a_cancelled_task_occupies_its_limit_until_its_code_stops",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "follow-ups-lost",
        "of several callbacks in one tick, only the first is created",
        "orchestrator/scheduler/requests.py",
        "        follow_ups = list(tx.result.tasks.follow_ups)\n",
        "        follow_ups = list(tx.result.tasks.follow_ups)[:1]\n",
        (chaos("--seconds 10 --seed 7 --rate 15 --faults kill-child --every 2 --loads followed", "was followed by"),),
    ),
    Mutation(
        "late-fires-left-out",
        "fires that are two seconds late are omitted",
        "orchestrator/domain/schedules/schedule.py",
        "        chosen.append(following)\n",
        "        if now - following < timedelta(seconds=2):\n            chosen.append(following)\n",
        (
            chaos(
                "--seconds 15 --seed 7 --rate 2 --faults kill-scheduler,postgres-restart --every 3 --loads plain",
                "did not fire",
            ),
        ),
    ),
)

TERMS = (
    Mutation(
        "term-not-checked",
        "a replaced leader continues to write",
        "orchestrator/store/leases.py",
        '_OWN_TERM = "WHERE shard = %(shard)s AND term = %(term)s"\n',
        '_OWN_TERM = "WHERE shard = %(shard)s AND %(term)s::bigint > 0"\n',
        (seeds("5", "wrote after term"),),
    ),
    Mutation(
        "foresight-trusted",
        "a foreseen end is followed up although Postgres has not ended the task",
        "orchestrator/store/tasks/transitions.py",
        "CASE count(*) WHEN %(number)s::int THEN",
        "CASE count(*) * 0 + %(number)s::int WHEN %(number)s::int THEN",
        (
            tests(
                "tests/integration/test_foreseen_ends.py::test_an_outdated_success_changes_nothing",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "term-issued-twice",
        "a term that Postgres issues twice is taken for the first one",
        "orchestrator/scheduler/fleet/generations.py",
        "        if not is_new:\n            self.postgres_has_lost_commits()\n",
        "",
        (
            tests(
                "tests/integration/test_lost_commits.py::test_a_term_issued_twice_reveals_a_lost_claim",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "generation-named-twice",
        "a generation of a term that is issued twice gets the first one's name",
        "orchestrator/scheduler/fleet/generations.py",
        "token = secrets.token_hex(4)\n",
        'token = "0"\n',
        (
            tests(
                "tests/integration/test_lost_commits.py::test_a_generation_forgotten_by_postgres_is_not_reused",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "applied-not-sent-again",
        "after lost commits, workers resend unapplied reports only",
        "workers/reporting/reporter.py",
        "            if rewind_of(generation) != rewind_of(self.generation):\n",
        "            if False:\n",
        (
            tests(
                "tests/unit/test_kept_reports.py::test_applied_reports_are_sent_again_first_after_lost_commits",
                "^E ",
            ),
        ),
    ),
    Mutation(
        "fence-not-raised",
        "after lost commits, the fence of attempts is not raised",
        "orchestrator/scheduler/fleet/generations.py",
        "                self._leadership.raise_fence(writing, _FENCE_STEP + secrets.randbelow(_FENCE_STEP))\n",
        "                pass\n",
        (
            tests(
                "tests/integration/test_lost_commits.py::test_a_lost_claim_is_noticed_without_applied_events",
                "^E ",
            ),
        ),
    ),
)
