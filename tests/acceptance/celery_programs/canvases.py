"""Canvases in the shapes of Celery's own integration tests, with Celery's results.

Each test checks one property: `SAME` the result, `ONCE` that every task runs once, `FAILING` and `ERROR_CALLBACKS` what
happens when a task fails. Celery flattens nested groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canvas_tasks import add, add_to_all, fail, identity
from canvas_tasks import build_tree as pair
from canvas_tasks import redis_echo as note
from canvas_tasks import tsum as total

from orchestrator.compat.celery import chain, chord, group

Part = Any


def twice(part: Part) -> Part:
    return group(part, part)


def notes(key: str, *words: object) -> list[Part]:
    return [note.si(word, key) for word in words]


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
        [11, 101, 1001, 2001],
    ),
    "group.nested_group_group": (lambda: group(twice(identity.s(42))), [42, 42]),
    "group.nested_group_chord_counting_simple": (lambda: group(chord([identity.si(42)], identity.s())), [[42]]),
    "group.nested_group_chord_counting_chain": (
        lambda: group(chord([chain([identity.si(7)] * 42)], identity.s())),
        [[7]],
    ),
    "group.nested_group_chord_counting_group": (
        lambda: group(chord([group([identity.si(7)] * 42)], identity.s())),
        [[7] * 42],
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
        [[1, 2, *[3] * 42, 5]],
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
    "chord.nested_chord_group": (lambda: chord([twice(identity.s(42))], identity.s()), [42, 42]),
    "chord.nested_chord_group_chain_group_tail": (
        lambda: chord([chain(identity.s(42), twice(identity.s()))], identity.s()),
        [[42, 42]],
    ),
    "chord.generator": (lambda: chord((add.s(i, 0) for i in range(9)), total.s()), 36),
    # signatures that are serialized and rebuilt by a worker
    "signature_serialization.rebuild_nested_chain_chain": (lambda: chain(chain(identity.s(42))), 42),
    "signature_serialization.rebuild_nested_chain_group": (lambda: chain(group(identity.s(42))), [42]),
    "signature_serialization.rebuild_nested_chain_chord": (lambda: chain(chord([identity.s(42)], total.s())), 42),
    "signature_serialization.rebuild_nested_group_chain": (lambda: group(chain(identity.s(42))), [42]),
    "signature_serialization.rebuild_nested_group_group": (lambda: group(group(identity.s(42))), [42]),
    "signature_serialization.rebuild_nested_group_chord": (lambda: group(chord([identity.s(42)], total.s())), [42]),
    "signature_serialization.rebuild_nested_chord_chain": (lambda: chord([chain(identity.s(42))], total.s()), 42),
    "signature_serialization.rebuild_nested_chord_group": (
        lambda: chord([group(identity.s(42))], identity.s()),
        [42],
    ),
    "signature_serialization.rebuild_nested_chord_chord": (
        lambda: chord([chord([identity.s(42)], identity.s())], identity.s()),
        [[42]],
    ),
}

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
}
