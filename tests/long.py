"""Tests that every build leaves out, because others show the same on a smaller scale: see `scripts/test --long`."""

from __future__ import annotations

_LARGE = (
    "acceptance/executors/test_conformance.py::test_a_remote_side_that_is_away_for_minutes",
    "acceptance/executors/test_conformance.py::test_time_runs_while_the_remote_side_is_away",
    "acceptance/executors/test_killed_watchers.py::test_a_full_worker_receives_executions_after_redis_has_lost_everything",
    "acceptance/executors/test_killed_watchers.py::test_a_watcher_may_die_before_it_clears_away",
    "acceptance/executors/test_killed_watchers.py::test_work_that_is_slow_to_start_has_not_begun_and_is_begun_once",
    "acceptance/executors/test_stumbling_watchers.py",
    "acceptance/test_bench.py",
    "acceptance/test_code_recovery.py::test_fifty_megabytes_are_replayed_by_a_process_of_their_own_and_by_another_worker",
    "acceptance/test_code_workflows.py::test_a_run_is_reset_from_the_command_line[http]",
    "acceptance/test_code_workflows.py::test_a_thousand_workflows_of_ten_steps",
    "acceptance/test_code_workflows.py::test_from_the_command_line[http]",
    "acceptance/test_crashes.py::test_innocents_in_children_do_not_pay_for_the_death_of_their_worker",
    "acceptance/test_dashboard_in_browser.py::test_a_reset_is_looked_at_before_it_is_done",
    "acceptance/test_dashboard_in_browser.py::test_nobody_is_shut_out_and_nothing_moves[dark-all]",
    "acceptance/test_dashboard_in_browser.py::test_nobody_is_shut_out_and_nothing_moves[light-all]",
    "acceptance/test_dashboard_in_browser.py::test_there_may_be_more_tabs_than_connections",
    "acceptance/test_enqueue_to_result.py::test_a_run_of_a_hundred_thousand_tasks_counts_exactly",
    "acceptance/test_flow_recovery.py::test_somebody_is_killed_in_the_middle_of_every_kind_of_node[scheduler]",
    "acceptance/test_flow_recovery.py::test_somebody_is_killed_in_the_middle_of_every_kind_of_node[worker]",
    "acceptance/test_live_recovery.py::test_who_does_not_read_is_not_waited_for_and_begins_again",
    "acceptance/test_payload_outages.py::test_an_outage_of_the_store_fails_no_workflow",
    "acceptance/test_payloads.py::test_outputs_that_are_very_large_are_answered_by_reference",
    "acceptance/test_rolling_deploy.py::test_a_task_waits_at_the_worker_that_knows_it_and_leaves_when_another_has_room",
    "acceptance/test_schedules.py::test_a_year_is_filled_in_a_few_at_a_time",
    "acceptance/test_sealed_data.py::test_a_rotation_under_load_that_is_killed_goes_on",
    "acceptance/test_workflows.py::test_the_cost_of_a_task_does_not_grow_with_the_size_of_its_run",
    "chaos/test_long_outages.py",
    "chaos/test_real.py::test_the_promises_hold_on_real_processes[1]",
    "chaos/test_soak.py",
    "integration/test_changes.py::test_where_too_many_have_spoken_any_may_have",
    "integration/test_code_large_histories.py::test_a_history_of_fifty_megabytes_outlives_its_worker",
    "integration/test_dev.py::test_it_serves_every_queue_that_is_named",
    "integration/test_dev.py::test_its_servers_are_started_again",
    "integration/test_guarantees.py::test_the_promises_hold_whatever_happens",
    "integration/test_leader_under_pressure.py::test_where_the_front_is_slow_the_most_urgent_still_go_first",
    "integration/test_schedules.py::test_a_year_in_ten_zones_with_leaders_that_die",
    "unit/code_workflows/test_code_replay_property.py",
    "unit/code_workflows/test_code_reset_property.py",
)
_COMMANDS = "integration/test_cli_reads.py"
_EXECUTORS = "acceptance/executors/test_conformance.py"
_OTHERS = ("[cloud_run]", "[dask]", "[kubernetes]", "[pull]", "[ray]", "[rq]")
"""Executors that have tests of their own in every build."""


def is_long(name: str) -> bool:
    """Say whether a test, by the name that pytest gives it, is left out."""
    place = name.removeprefix("tests/")
    over_http = place.startswith(_COMMANDS) and place.endswith("[http]")
    return place.startswith(_LARGE) or over_http or (place.startswith(_EXECUTORS) and place.endswith(_OTHERS))
