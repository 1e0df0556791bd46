"""Which workers of a queue receive a task where they know different names, and how many."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.executors.record import announced
from orchestrator.scheduler.fleet.capabilities import ANY_FUNCTION, Capabilities, Placement
from orchestrator.transport.codec import Heartbeat

NAMES = {
    "old": frozenset({"both", "gone"}),
    "new": frozenset({"both", "fresh"}),
    "any": frozenset({"both", ANY_FUNCTION}),
}
NOBODY: frozenset[str] = frozenset()
FRESH_AT_B = Placement("b", "default", ("fresh",))


def beat(worker: str, kind: str, *, slots: int = 2, running: int = 0, queue: str = "default") -> Heartbeat:
    return Heartbeat(worker, "host", 1, [queue], slots, kind, "", 0.0, b"", running)


def capabilities(*beats: Heartbeat) -> Capabilities:
    found = Capabilities()
    found.index(beats, NAMES, 0.0)
    found.begin(())
    return found


def test_a_queue_of_equal_workers_needs_no_placement() -> None:
    same = capabilities(beat("a", "old"), beat("b", "old"), beat("c", "new", queue="other"))
    assert same.mixed == frozenset()
    assert same.knowing("default", "both") is None
    assert same.knowing("default", "fresh") == NOBODY


def test_each_name_has_the_kinds_of_workers_that_know_it() -> None:
    mixed = capabilities(beat("a", "old"), beat("b", "new"), beat("c", "any"))
    assert mixed.mixed == {"default"}
    assert mixed.knowing("default", "both") is None
    assert mixed.knowing("default", "gone") == {"old"}
    assert mixed.knowing("default", "jobs:run") == {"any"}
    assert mixed.knowing("default", "nothing") == NOBODY
    assert mixed.knowing("elsewhere", "both") == NOBODY


def test_a_task_is_placed_on_the_able_worker_with_most_free_slots() -> None:
    mixed = capabilities(beat("a", "old", slots=9), beat("b", "new", slots=2), beat("c", "new", slots=3, running=2))
    assert mixed.places("default", frozenset({"new"})) == 5
    placed = [mixed.place("default", frozenset({"new"})) for _ in range(6)]
    assert placed[:3] == ["b", "b", "c"] or placed[:3] == ["b", "c", "b"]
    assert Counter(placed) == {"b": 2, "c": 3, None: 1}
    assert mixed.places("default", frozenset({"new"})) == 0


def test_a_program_that_one_worker_lacks_is_run_by_equal_workers() -> None:
    names = {"open": frozenset({announced("process *")})}
    found, ffmpeg = Capabilities(), announced("process ffmpeg")

    def observe(*workers: str, now: float = 0.0) -> None:
        found.index([beat(worker, "open") for worker in workers], names, now)

    observe("a", "b")
    found.deny("a", ffmpeg)
    assert (found.executing("default", ffmpeg), found.mixed) == (["b"], frozenset())
    assert found.executing("default", announced("process wc")) == ["a", "b"]
    found.deny("b", ffmpeg)
    assert found.knowing("default", ffmpeg) == NOBODY, "it waits for another"
    observe("a", "b", "c")
    assert found.executing("default", ffmpeg) == ["c"]
    observe("a", "b", "c", now=601.0)
    assert found.executing("default", ffmpeg) == ["a", "b", "c"], "it may have been installed"


def test_tasks_in_flight_occupy_their_slots_until_they_end() -> None:
    mixed = capabilities(beat("a", "old"), beat("b", "new", slots=2))
    mixed.committed({b"1": FRESH_AT_B, b"2": FRESH_AT_B}, ())
    mixed.begin(())
    assert mixed.place("default", frozenset({"new"})) is None
    mixed.begin([b"1", b"1", b"other"])  # ended in this very tick
    assert mixed.places("default", frozenset({"new"})) == 1
    assert mixed.place("default", frozenset({"new"})) == "b"
    mixed.committed({b"3": FRESH_AT_B}, [b"1"])
    assert (mixed.holder(b"1"), mixed.holder(b"2"), mixed.holder(b"3")) == ("b", "b", "b")
    mixed.committed({}, ())
    assert mixed.holder(b"1") is None
    mixed.recount([b"3", b"4"])
    mixed.begin(())
    assert (mixed.places("default", frozenset({"new"})), mixed.holder(b"2")) == (1, None)


def test_a_fast_queue_is_placed_ahead_of_its_slots() -> None:
    mixed = capabilities(beat("a", "old"), beat("b", "new", slots=2))
    mixed.rates = {"default": 400.0}
    mixed.begin(())
    assert mixed.places("default", frozenset({"new"})) == 2 + 20


def test_a_missing_function_is_not_retried_until_another_worker_arrives() -> None:
    beats = [beat("a", "any"), beat("b", "any")]
    found = capabilities(*beats)
    assert found.mixed == frozenset()
    found.deny("a", "jobs:run")
    assert found.mixed == {"default"}
    assert found.knowing("default", "jobs:run") == NOBODY
    assert found.knowing("default", "jobs:other") is None
    assert found.knowing("default", "both") is None
    assert found.denied() == [("default", "jobs:run")]
    found.index(beats, NAMES, 1.0)
    assert found.knowing("default", "jobs:run") == NOBODY
    found.index([*beats, beat("c", "any")], NAMES, 2.0)  # the new worker may have the file
    assert (found.knowing("default", "jobs:run"), found.mixed, found.denied()) == (None, frozenset(), [])
    found.deny("a", "jobs:run")
    found.index([*beats, beat("c", "any")], NAMES, 1_000.0)
    assert found.mixed == frozenset(), "and it is not believed for ever"


def test_a_function_that_one_kind_lacks_is_left_to_the_other_kind() -> None:
    found = Capabilities()
    found.index(
        [beat("a", "any"), beat("b", "more")], {"any": NAMES["any"], "more": frozenset({"x", ANY_FUNCTION})}, 0.0
    )
    found.deny("a", "jobs:run")
    assert found.knowing("default", "jobs:run") == {"more"}
    assert found.denied() == []


@given(
    st.lists(st.tuples(st.sampled_from(["old", "new", "any"]), st.integers(0, 5), st.integers(0, 5)), max_size=8),
    st.integers(0, 30),
)
def test_no_worker_exceeds_its_slots_or_idles_while_a_task_waits(
    workers: list[tuple[str, int, int]], tasks: int
) -> None:
    beats = [beat(f"w{place}", kind, slots=slots, running=run) for place, (kind, slots, run) in enumerate(workers)]
    found = capabilities(*beats)
    kinds = frozenset({"old", "any"})
    room = found.places("default", kinds)
    placed = Counter(found.place("default", kinds) for _ in range(tasks))
    slots = {beat.worker: beat.slots for beat in beats if beat.names in kinds}
    assert room == sum(slots.values())
    assert placed[None] == max(0, tasks - room)
    assert all(count <= slots[worker] for worker, count in placed.items() if worker is not None)


def test_a_full_worker_returns_only_tasks_that_others_have_slots_for() -> None:
    full, old, other = beat("b", "new", running=2), beat("a", "old", slots=9), beat("c", "new", slots=2, running=1)
    placed = dict.fromkeys((b"1", b"2", b"3"), FRESH_AT_B)
    for beats, expected, is_of_use in (
        ((full, old), {}, True),
        ((full, old, msgspec.structs.replace(other, running=2)), {}, True),
        ((full, old, other), {"b": [b"1"]}, False),
        ((full, old, msgspec.structs.replace(other, running=0)), {"b": [b"1", b"2"]}, False),
        ((msgspec.structs.replace(full, running=1), old, other), {}, False),
        ((old, other), {}, False),
    ):
        mixed = capabilities(*beats)
        mixed.committed(placed, ())
        mixed.begin(())
        assert mixed.better_elsewhere([b"1", b"2", b"3", b"never placed"]) == expected
        assert mixed.is_of_use(FRESH_AT_B) is is_of_use


def test_a_worker_must_know_everything_that_a_task_needs() -> None:
    mixed = capabilities(beat("a", "old"), beat("b", "new"), beat("c", "any"))
    assert mixed.able("default", ("both",)) == {"old", "new", "any"}
    assert mixed.able("default", ("both", "fresh")) == {"new"}
    assert mixed.able("default", ("gone", "fresh")) == NOBODY
    assert mixed.able("elsewhere", ("both",)) == NOBODY
