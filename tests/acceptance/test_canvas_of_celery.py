"""What Celery's own integration tests of its canvas ask for, asked of ours.

`SAME` has an entry for each of its tests (in Celery 5.5, of its canvas) about what a composition
does: a composition of the same shape, and its result. `ONCE` are those that look whether every task ran once, and
`FAILING` those in which one fails. `NOT_APPLICABLE` names all others, and why. `test_none_is_left_out` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast
from uuid import uuid4

import composed
import pytest
from composed import add, add_by_chain, add_by_chord, add_to_all, app, fail, identity, note, pair, total

from orchestrator import InvalidWorkflow, RunFailed, chain, chord, group
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Stack, using
from tests.waiting import eventually

Part = Any


@pytest.fixture(scope="module")
def running(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack, using(app, stack):
        stack.scheduler()
        stack.worker("--app", "composed:app", processes=2)
        yield stack


def twice(part: Part) -> Part:
    return group(part, part)


# -- results

SAME: dict[str, tuple[Callable[[], Part], Any]] = {
    # chains
    "chain.simple_chain": (lambda: add.s(1, 2) | add.s(4) | add.s(8), 15),
    "chain.single_chain": (lambda: chain(add.s(5, 6)), 11),
    "chain.complex_chain": (
        lambda: add.s(1, 1) | (add.s(2) | add.s(4) | add.s(8)) | group(add.s(i) for i in range(3)),
        [16, 17, 18],
    ),
    "chain.group_results_in_chain": (lambda: group(add.s(1, 2) | group(add.s(1), add.s(2))), [[4, 5]]),
    "chain.chain_of_chain_with_a_single_task": (lambda: chain([chain(identity.s(1))]), 1),
    "chain.chain_inside_group_receives_arguments": (
        lambda: add.s(5, 5) | group(add.s(1) | add.s(2), add.s(4)),
        [13, 14],
    ),
    "chain.group_result_not_has_cache": (
        lambda: group(identity.si(1), identity.si(2), chain(identity.si(5), group(identity.si(3), identity.si(4)))),
        [1, 2, [3, 4]],
    ),
    "chain.chain_of_task_a_group_and_a_chord": (
        lambda: add.si(1, 0) | twice(add.s(1)) | twice(total.s()) | total.s(),
        8,
    ),
    "chain.chain_of_chords_as_groups_chained_to_a_task_with_two_tasks": (
        lambda: add.si(1, 0) | twice(add.s(1)) | total.s() | add.s(1) | twice(add.s(1)) | total.s(),
        12,
    ),
    "chain.chain_of_chords_with_two_tasks": (
        lambda: add.si(1, 0) | twice(add.s(1)) | total.s() | add.s(1) | chord(twice(add.s(1)), total.s()),
        12,
    ),
    "chain.chain_of_a_chord_and_a_group_with_two_tasks": (
        lambda: add.si(1, 0) | twice(add.s(1)) | total.s() | add.s(1) | twice(add.s(1)),
        [6, 6],
    ),
    "chain.chain_of_a_chord_and_a_task_and_a_group": (
        lambda: twice(add.s(1, 1)) | total.s() | add.s(1) | twice(add.s(1)),
        [6, 6],
    ),
    "chain.chain_of_a_chord_and_two_tasks_and_a_group": (
        lambda: twice(add.s(1, 1)) | total.s() | add.s(1) | add.s(1) | twice(add.s(1)),
        [7, 7],
    ),
    "chain.chain_of_a_chord_and_three_tasks_and_a_group": (
        lambda: twice(add.s(1, 1)) | total.s() | add.s(1) | add.s(1) | add.s(1) | twice(add.s(1)),
        [8, 8],
    ),
    "chain.nested_chain_group_lone": (lambda: chain(twice(identity.s(42))), [42, 42]),
    "chain.nested_chain_group_mid": (lambda: chain(identity.s(42), twice(identity.s()), identity.s()), [42, 42]),
    "chain.nested_chain_group_last": (lambda: chain(identity.s(42), twice(identity.s())), [42, 42]),
    "chain.chain_error_handler_with_eta": (
        lambda: chain(group(add.options(delay=0.2).s(1, 2), add.s(3, 4)), total.s()),
        10,
    ),
    "chain.group_in_center_of_chain": (
        lambda: chord(
            [add.s(0, 1)],
            chord([total.s(), total.s()], chain(total.s(), group(add.s(8), add.s(16)), total.s() | add.s(32))),
        ),
        60,
    ),
    # groups
    "group.large_group": (lambda: group(identity.s(i) for i in range(1_000)), list(range(1_000))),
    "group.group_lone": (lambda: twice(identity.s(42)), [42, 42]),
    "group.nested_group": (
        lambda: group(add.si(1, 10), group(add.si(1, 100), group(add.si(1, 1000), add.si(1, 2000)))),
        [11, [101, [1001, 2001]]],  # Celery gives a flat list
    ),
    "group.nested_group_group": (lambda: group(twice(identity.s(42))), [[42, 42]]),  # Celery gives a flat list
    "group.nested_group_chord_counting_simple": (lambda: group(chord([identity.si(42)], identity.s())), [[42]]),
    "group.nested_group_chord_counting_chain": (
        lambda: group(chord([chain([identity.si(7)] * 42)], identity.s())),
        [[7]],
    ),
    "group.nested_group_chord_counting_group": (
        lambda: group(chord([group([identity.si(7)] * 42)], identity.s())),
        [[[7] * 42]],  # Celery takes one of the lists away
    ),
    "group.nested_group_chord_counting_chord": (
        lambda: group(chord([chord([identity.si(7)] * 42, identity.si(31))], identity.s())),
        [[31]],
    ),
    "group.nested_group_chord_counting_mixed": (
        lambda: group(
            chord(
                [
                    identity.si(1),
                    chain([identity.si(2)] * 42),
                    group([identity.si(3)] * 42),
                    chord([identity.si(4)] * 42, identity.si(5)),
                ],
                identity.s(),
            )
        ),
        [[1, 2, [3] * 42, 5]],
    ),
    "group.nested_group_chord_body_chain": (lambda: group(chord([identity.si(42)], chain(identity.s()))), [[42]]),
    # chords
    "chord.simple_chord_with_a_delay_in_group_save": (lambda: chord([add.si(1, 1), add.si(1, 1)], total.s()), 4),
    "chord.chord_order": (lambda: chord([identity.si(i) for i in range(10)], identity.s()), list(range(10))),
    "chord.group_chain": (
        lambda: add.s(2, 2) | group(add.s(i) for i in range(4)) | add_to_all.s(8),
        [12, 13, 14, 15],
    ),
    "chord.group_kwargs": (
        lambda: add.s(2, 2, z=1) | group(add.s(i) for i in range(4)) | add_to_all.s(8),
        [13, 14, 15, 16],
    ),
    "chord.group_args_and_kwargs": (
        lambda: group(add.s(4, i, z=1) for i in range(4)) | add_to_all.s(8),
        [13, 14, 15, 16],
    ),
    "chord.nested_group_chain": (
        lambda: chain(
            add.si(1, 0),
            group(add.si(1, 100), chain(add.si(1, 200), group(add.si(1, 1000), add.si(1, 2000)))),
            add.si(1, 10),
        ),
        11,
    ),
    "chord.single_task_header": (lambda: chord([add.s(2, 5)], add_to_all.s(9)), [16]),
    "chord.nested_chord": (
        lambda: chord([chord([chord([add.s(1, 2), add.s(1, 2)], pair.s(4))], pair.s(5))], pair.s(6)),
        [[[[[[3, 3], 4]], 5]], 6],
    ),
    "chord.parallel_chords": (
        lambda: group(chord([add.s(1, 2), add.s(3, 4)], total.s()), chord([add.s(1, 2), add.s(3, 4)], total.s())),
        [10, 10],
    ),
    "chord.chord_in_chords_with_chains": (
        lambda: chord([chain(add.si(1, 2), chord([add.si(1, 2)] * 2, add.si(1, 2)))] * 2, add.si(2, 2)),
        4,
    ),
    "chord.chain_chord_chain_chord": (
        lambda: chain(
            identity.si(1),
            chord(
                [identity.si(2), chain(identity.si(3), chord([identity.si(4), identity.si(5)], identity.si(6)))],
                identity.si(7),
            ),
        ),
        7,
    ),
    "chord.chord_in_chain_with_args": (
        lambda: chain(identity.s(1), chord([identity.s(), identity.s()], identity.s()), identity.s()),
        [1, 1],
    ),
    "chord.chain_in_chain_with_args": (lambda: chain(chain(identity.s(1), identity.s())), 1),
    "chord.large_header": (lambda: group(identity.si(i) for i in range(1_000)) | total.s(), 499_500),
    "chord.chain_to_a_chord_with_large_header": (
        lambda: identity.si(1) | group(identity.s() for _ in range(1_000)) | total.s(),
        1_000,
    ),
    "chord.nested_chord_group": (lambda: chord([twice(identity.s(42))], identity.s()), [[42, 42]]),
    "chord.nested_chord_group_chain_group_tail": (
        lambda: chord([chain(identity.s(42), twice(identity.s()))], identity.s()),
        [[42, 42]],
    ),
    "chord.generator": (lambda: chord((add.s(i, 0) for i in range(9)), total.s()), 36),
    # what is sent to a worker and made there again
    "signature_serialization.rebuild_nested_chain_chain": (lambda: chain(chain(identity.s(42))), 42),
    "signature_serialization.rebuild_nested_chain_group": (lambda: chain(group(identity.s(42))), [42]),
    "signature_serialization.rebuild_nested_chain_chord": (lambda: chain(chord([identity.s(42)], total.s())), 42),
    "signature_serialization.rebuild_nested_group_chain": (lambda: group(chain(identity.s(42))), [42]),
    "signature_serialization.rebuild_nested_group_group": (lambda: group(group(identity.s(42))), [[42]]),
    "signature_serialization.rebuild_nested_group_chord": (lambda: group(chord([identity.s(42)], total.s())), [42]),
    "signature_serialization.rebuild_nested_chord_chain": (lambda: chord([chain(identity.s(42))], total.s()), 42),
    "signature_serialization.rebuild_nested_chord_group": (
        lambda: chord([group(identity.s(42))], identity.s()),
        [[42]],
    ),
    "signature_serialization.rebuild_nested_chord_chord": (
        lambda: chord([chord([identity.s(42)], identity.s())], identity.s()),
        [[42]],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_it_comes_to_the_same_result(running: Stack, name: str) -> None:
    build, expected = SAME[name]
    assert build().start().result(60) == expected


# -- what has run


def noted(stack: Stack, key: str) -> list[str]:
    return [str(word, "utf-8") for word in cast(list[bytes], stack.redis.lrange(key, 0, -1))]


def notes(key: str, *words: object) -> list[Part]:
    return [note.si(word, key) for word in words]


ONCE: dict[str, Callable[[str], Part]] = {
    "chain.group_chord_group_chain": lambda key: group(notes(key, 1, 2, 3)) | note.si(4, key) | group(notes(key, 5, 6)),
    "chain.chaining_upgraded_chords_pure_groups": lambda key: chain(
        group(notes(key, 1, 2, 3)),
        group(notes(key, 4, 5, 6)),
        group(notes(key, 7)),
        group(notes(key, 8)),
        *notes(key, 9),
    ),
    "chain.chaining_upgraded_chords_starting_with_chord": lambda key: chain(
        chord(notes(key, 1, 2, 3), group(notes(key, 4, 5, 6))),
        group(notes(key, 7)),
        group(notes(key, 8)),
        *notes(key, 9),
    ),
    "chain.chaining_upgraded_chords_mixed_canvas": lambda key: chain(
        chord(notes(key, 1, 2, 3), group(notes(key, 4, 5, 6))), note.si(7, key), group(notes(key, 8)), note.si(9, key)
    ),
    "chain.chaining_upgraded_chords_mixed_canvas_protocol_2": lambda key: chain(
        group(notes(key, 1, 2)), group(notes(key, 3, 4, 5)), group(notes(key, 6, 7, 8, 9)), group(notes(key, 10))
    ),
    "chain.upgrade_to_chord_inside_chains": lambda key: chain(
        group(notes(key, 1, 2)) | group(notes(key, 3, 4)), note.si(5, key) | note.si(6, key)
    ),
    "group.callback_called_by_group": lambda key: chain(group(notes(key, 1, 2)), note.si(3, key)),
}


@pytest.mark.parametrize("name", ONCE)
def test_every_task_runs_once_and_none_before_those_it_follows(running: Stack, name: str) -> None:
    key = f"{name}-{uuid4()}"
    run = ONCE[name](key).start()
    run.result(60)
    words = [int(word) for word in noted(running, key)]
    assert sorted(words) == list(range(1, len(words) + 1))
    assert len(words) == run.progress().counters.success
    if name == "chain.group_chord_group_chain":
        assert words[3] == 4, "it runs after all of the group before it, and before all of the one after it"
    running.redis.delete(key)


CALLBACKS: dict[str, Callable[[Part], Part]] = {
    "chain.chain_children_with_callbacks": lambda part: chain([part] * 10),
    "group.group_children_with_callbacks": lambda part: group([part] * 42),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_the_callback_of_each_part_is_called_once(running: Stack, name: str) -> None:
    key = f"{name}-{uuid4()}"
    running.redis.set(composed.NOTES, key)
    run = CALLBACKS[name](identity.options(on_success=composed.note_success).si(7)).start()
    run.result(60)
    succeeded = run.progress().counters.success
    eventually(lambda: noted(running, key) == ["succeeded 7"] * succeeded, f"{succeeded} callbacks")


PRIORITIES: dict[str, tuple[int, ...]] = {"chord.priority": (3,), "chord.priority_chain": (3, 5)}


@pytest.mark.parametrize("name", PRIORITIES)
def test_each_part_keeps_its_priority(running: Stack, name: str) -> None:
    run = chain([identity.options(priority=priority).si(1) for priority in PRIORITIES[name]]).start()
    run.result(60)
    rows = running.sql(
        "SELECT priority FROM orchestrator.ended_tasks WHERE run_id = :run ORDER BY ended_at", run=run.id
    )
    assert tuple(priority for (priority,) in rows) == PRIORITIES[name]


# -- failures

FAILING: dict[str, Callable[[str], Part]] = {
    "chain.chain_on_error": lambda key: chain(add.s(1, 2), fail.s(), note.si("never", key)),
    "chain.chain_children_with_errbacks": lambda key: chain(identity.s(1), fail.s(), note.si("never", key)),
    "result_set.result_set_error": lambda key: chain(group(fail.s(), add.s(1, 1)), note.si("never", key)),
    "group.ready_with_exception": lambda key: chain(group(add.s(1, 2), fail.s()), note.si("never", key)),
    "group.errback_called_by_group_fail_first": lambda key: chain(
        group(fail.s(), identity.s(42)), note.si("never", key)
    ),
    "group.errback_called_by_group_fail_last": lambda key: chain(
        group(identity.s(42), fail.s()), note.si("never", key)
    ),
    "group.errback_called_by_group_fail_multiple": lambda key: chain(
        group([*[identity.si(1)] * 24, *[fail.si()] * 42]), note.si("never", key)
    ),
    "group.group_children_with_errbacks": lambda key: chain(group([fail.si()] * 42), note.si("never", key)),
    "chord.chord_on_error": lambda key: chord([add.s(1, 2), add.s(3, 4), fail.s()], note.si("never", key)),
    "chord.error_propagates_from_chord": lambda key: (
        add.s(1, 1) | fail.s() | group(add.s(1), add.s(1)) | note.si("never", key)
    ),
    "chord.error_propagates_from_chord2": lambda key: (
        add.s(1, 1) | add.s(1) | group(add.s(1), fail.s()) | note.si("never", key)
    ),
    "chord.error_propagates_to_chord_from_simple": lambda key: chord([fail.s()], note.si("never", key)),
    "chord.error_propagates_to_chord_from_chain": lambda key: chord([fail.s() | identity.s()], note.si("never", key)),
    "chord.error_propagates_to_chord_from_chain_tail": lambda key: chord(
        [identity.s(1) | fail.s()], note.si("never", key)
    ),
    "chord.error_propagates_to_chord_from_group": lambda key: chord(
        [group(identity.s(1), fail.s())], note.si("never", key)
    ),
    "chord.nested_chord_header_link_error": lambda key: chord(
        [chord([fail.s(), identity.s(1)], identity.s())], note.si("never", key)
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_reaches_the_caller_and_what_follows_is_not_run(running: Stack, name: str) -> None:
    key = f"{name}-{uuid4()}"
    run = FAILING[name](key).start()
    with pytest.raises(RunFailed, match="meant to fail") as failure:
        run.result(60)
    assert "composed.fail" in str(failure.value) or "composed.note" in str(failure.value)
    assert run.status() == "failed"
    assert noted(running, key) == []


ERROR_CALLBACKS: dict[str, Callable[[Part], Part]] = {
    "link_error.link_error": lambda part: part,
    "link_error.link_error_callback_retries": lambda part: part,
    "link_error.link_error_using_signature": lambda part: part,
    "chord.immutable_errback_called_by_chord_from_simple": lambda part: chord([part], identity.s()),
    "chord.mutable_errback_called_by_chord_from_simple": lambda part: chord([identity.si(1)], part),
    "chord.immutable_errback_called_by_chord_from_chain": lambda part: chord([part | identity.s()], identity.s()),
    "chord.mutable_errback_called_by_chord_from_chain": lambda part: chord([identity.si(1)], part | identity.s()),
    "chord.immutable_errback_called_by_chord_from_chain_tail": lambda part: chord(
        [identity.si(1) | part], identity.s()
    ),
    "chord.mutable_errback_called_by_chord_from_chain_tail": lambda part: chord([identity.si(1)], identity.s() | part),
    "chord.immutable_errback_called_by_chord_from_group": lambda part: chord(
        [group(part, identity.s(1))], identity.s()
    ),
    "chord.mutable_errback_called_by_chord_from_group": lambda part: chord([identity.si(1)], group(part, identity.s())),
    "chord.immutable_errback_called_by_chord_from_group_fail_multiple": lambda part: chord([part] * 5, identity.s()),
    "chord.mutable_errback_called_by_chord_from_group_fail_multiple_on_header_failure": lambda part: chord(
        [part] * 5, identity.s()
    ),
    "chord.mutable_errback_called_by_chord_from_group_fail_multiple_on_body_failure": lambda part: chord(
        [identity.si(1)] * 3, group([part] * 5)
    ),
}


@pytest.mark.parametrize("name", ERROR_CALLBACKS)
def test_the_error_callback_of_each_part_that_fails_is_called_once(running: Stack, name: str) -> None:
    key = f"{name}-{uuid4()}"
    running.redis.set(composed.NOTES, key)
    run = ERROR_CALLBACKS[name](fail.options(on_failure=composed.note_failure).si()).start()
    with pytest.raises(RunFailed, match="meant to fail"):
        run.result(60)
    failed = run.progress().counters.failed
    eventually(lambda: noted(running, key) == ["failed ValueError"] * failed, f"{failed} callbacks")


# -- from inside, and of what they know


def test_a_task_starts_compositions(running: Stack) -> None:
    """`chain.eager_chain_inside_task`, `chord.eager_chord_inside_task`, `chord.add_to_chord`, `add_chord_to_chord`."""
    assert app.run(add_by_chain.enqueue(1, 2).result(60)).result(60) == 13
    assert app.run(add_by_chord.enqueue([1, 2, 3], 4).result(60)).result(60) == 18


def test_an_empty_group_is_refused_by_name() -> None:
    """`group.empty_group_result` and `chord.empty_header_chord`, which Celery starts."""
    with pytest.raises(InvalidWorkflow, match="nothing"):
        group([]).start()


NOT_APPLICABLE: dict[str, str] = {}
for _reason, _names in {
    "Celery's eager mode; ours is in `orchestrator.testing`, with tests of its own": (
        "link_error.link_error_eager link_error.link_error_callback_error_callback_retries_eager "
        "link_error.link_error_using_signature_eager chain.eager_chain_inside_task chord.eager_chord_inside_task"
    ),
    "A task cannot replace itself by another one: it starts a composition, and returns its id": (
        "chain.second_order_replace chain.chain_replaced_with_a_chain_and_a_callback "
        "chain.chain_replaced_with_a_chain_and_an_error_callback chain.chain_with_cb_replaced_with_chain_with_cb "
        "chain.chain_with_eb_replaced_with_chain_with_eb chain.replace_chain_with_empty_chain "
        "chain.chain_with_callback_child_replaced chain.chain_with_errback_child_replaced "
        "chain.chain_child_with_callback_replaced "
        "chain.chain_child_with_errback_replaced chain.task_replaced_with_chain "
        "chain.chain_child_replaced_with_chain_first chain.chain_child_replaced_with_chain_middle "
        "chain.chain_child_replaced_with_chain_last group.group_with_callback_child_replaced "
        "group.group_with_errback_child_replaced group.group_child_with_callback_replaced "
        "group.group_child_with_errback_replaced group.group_child_replaced_with_chain_first "
        "group.group_child_replaced_with_chain_middle group.group_child_replaced_with_chain_last "
        "chord.replaced_nested_chord chord.add_to_chord "
        "chord.add_chord_to_chord chord.chord_header_task_replaced_with_chain "
        "chord.chord_header_child_replaced_with_chain_first chord.chord_header_child_replaced_with_chain_middle "
        "chord.chord_header_child_replaced_with_chain_last chord.chord_body_task_replaced_with_chain "
        "chord.chord_body_chain_child_replaced_with_chain_first "
        "chord.chord_body_chain_child_replaced_with_chain_middle "
        "chord.chord_body_chain_child_replaced_with_chain_last"
    ),
    "About Celery's result backend, broker or message protocol": (
        "chain.groupresult_serialization chain.chord_header_id_duplicated_on_rabbitmq_msg_duplication "
        "chord.redis_subscribed_channels_leak chain.freezing_chain_sets_id_of_last_task group.empty_group_result "
        "chord.empty_header_chord result_set.result_set"
    ),
    "Ids of parts: ours are tasks of one run, which `handle.parent` and `.children` lead through": (
        "chain.parent_ids group.parent_ids chord.parent_ids chord.parent_ids__OR"
    ),
    "A link of a chain within a chain: here it is a part, or an option of a task": (
        "chain.chain_flattening_keep_links_of_inner_chain"
    ),
    "A setting of Celery about error callbacks of headers: here each task has its own": (
        "chord.enabling_flag_allow_error_cb_on_chord_header chord.disabling_flag_allow_error_cb_on_chord_header "
        "chord.flag_allow_error_cb_on_chord_header_on_upgraded_chord "
        "chord.upgraded_chord_link_error_with_header_errback_enabled"
    ),
    "Soft timeouts are tested with tasks: a part is a task": "chain.chord_soft_timeout_recuperation",
    "Stamps: middleware adds headers here, which travel to every part": (
        "stamping_mechanism.stamping_workflow stamping_mechanism.stamping_example_canvas "
        "stamping_mechanism.stamp_value_type_defined_by_visitor "
        "stamping_mechanism.properties_not_affected_from_stamping "
        "stamping_mechanism.task_received_has_access_to_stamps stamping_mechanism.all_tasks_of_canvas_are_stamped "
        "stamping_mechanism.replace_merge_stamps stamping_mechanism.linking_stamped_sig "
        "stamping_mechanism.err_linking_stamped_sig stamping_mechanism.stamps_remain_on_task_retry "
        "stamping_mechanism.stamp_canvas_with_dictionary_link "
        "stamping_mechanism.stamp_canvas_with_dictionary_link_error"
    ),
}.items():
    NOT_APPLICABLE |= dict.fromkeys(_names.split(), _reason)


def test_none_is_left_out_and_none_counted_twice() -> None:
    tables: tuple[Mapping[str, object], ...] = (
        SAME,
        ONCE,
        PRIORITIES,
        CALLBACKS,
        FAILING,
        ERROR_CALLBACKS,
        NOT_APPLICABLE,
    )
    assert sum(map(len, tables)) == len({name for table in tables for name in table}) == CELERY_HAS


CELERY_HAS = 163
"""Tests in Celery 5.5's integration tests of the canvas."""
