"""The fleet as the leader sees it: live workers, counted fairly, and the tasks that they can run."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.scheduler.fleet.reconcile import pause_after
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.transport.codec import Heartbeat, names_digest, pack_attempt

TTL = 5.0
NAMES = {names_digest(["add"]): ["add"], names_digest(["add", "mul"]): ["add", "mul"]}


def beat(worker: str = "w", **changes: object) -> Heartbeat:
    plain = Heartbeat(worker, "host", 1, ["default"], 10, names_digest(["add"]), "", 0.0)
    return msgspec.structs.replace(plain, **changes)


class Observer:
    """A fleet and its clock."""

    def __init__(self) -> None:
        self.fleet = Fleet(TTL)
        self.now = 1_000.0
        self.asked: list[str] = []

    def observe(self, *beats: Heartbeat, after: float = 1.0) -> None:
        self.now += after
        self.fleet.observe(beats, self.now, self.names)

    def names(self, digest: str) -> list[str] | None:
        self.asked.append(digest)
        return NAMES.get(digest)

    def settle(self) -> None:
        """Let the grace period of a new leader pass, with one live worker."""
        while self.fleet.in_grace:
            self.observe(beat())


def seconds_until_dead(observer: Observer, worker: str, step: float) -> float:
    silent = 0.0
    while not observer.fleet.is_dead(worker):
        observer.observe(after=step)
        silent += step
        assert silent < 100
    return silent


# -- silent workers


def test_a_worker_that_sends_heartbeats_stays_alive() -> None:
    observer = Observer()
    for _ in range(100):
        observer.observe(beat())
        assert not observer.fleet.is_dead("w")


def test_a_silent_worker_is_dead_after_its_ttl() -> None:
    observer = Observer()
    observer.settle()
    assert seconds_until_dead(observer, "w", step=1.0) == TTL


def test_an_unchanged_heartbeat_counts_as_silence() -> None:
    """Redis's clock was set back, so the heartbeat does not expire."""
    observer = Observer()
    observer.settle()
    observer.observe(beat(number=7))
    for _ in range(int(TTL) - 1):
        observer.observe(beat(number=7))
        assert not observer.fleet.is_dead("w")
        assert observer.fleet.slots("default") == 10
    observer.observe(beat(number=7))
    assert observer.fleet.is_dead("w")
    assert observer.fleet.slots("default") == 0
    observer.observe(beat(number=8))
    assert not observer.fleet.is_dead("w")
    assert observer.fleet.slots("default") == 10


def test_a_dead_worker_that_is_heard_again_is_alive() -> None:
    observer = Observer()
    observer.settle()
    seconds_until_dead(observer, "w", step=1.0)
    observer.observe(beat())
    assert not observer.fleet.is_dead("w")
    assert seconds_until_dead(observer, "w", step=1.0) == TTL


def test_time_of_a_redis_outage_does_not_count_as_silence() -> None:
    observer = Observer()
    observer.settle()
    for _ in range(20):
        observer.fleet.interrupted()
        observer.observe(after=3_600)
    assert not observer.fleet.is_dead("w")
    assert seconds_until_dead(observer, "w", step=1.0) == TTL


def test_a_leader_paused_for_an_hour_declares_no_worker_dead_at_once() -> None:
    observer = Observer()
    observer.settle()
    observer.observe(after=3_600)
    assert not observer.fleet.is_dead("w")


def test_a_new_leader_gives_every_worker_a_full_ttl() -> None:
    """The leader may find a message of a worker that it has never heard of."""
    observer = Observer()
    observer.observe()
    assert not observer.fleet.is_dead("stranger")
    assert observer.fleet.in_grace
    assert seconds_until_dead(observer, "stranger", step=1.0) >= TTL


def test_dead_workers_count_as_alive_during_a_grace_period() -> None:
    observer = Observer()
    observer.settle()
    seconds_until_dead(observer, "w", step=1.0)
    observer.fleet.grace()
    assert not observer.fleet.is_dead("w")
    assert seconds_until_dead(observer, "w", step=1.0) == TTL


def test_an_unknown_worker_is_silent_from_the_first_query_on() -> None:
    observer = Observer()
    observer.settle()
    assert not observer.fleet.is_dead("stranger")
    assert seconds_until_dead(observer, "stranger", step=1.0) == TTL


steps = st.lists(st.tuples(st.floats(0.01, 100), st.booleans(), st.booleans()), max_size=40)


@given(steps)
def test_no_worker_dies_within_the_ttl_of_a_heartbeat(history: list[tuple[float, bool, bool]]) -> None:
    """In any history, at least a TTL of watched time passes after the last heartbeat."""
    observer = Observer()
    watched = 0.0
    observer.observe(beat())
    for after, heard, interrupted in history:
        if interrupted:
            observer.fleet.interrupted()
        observer.observe(*([beat()] if heard else []), after=after)
        watched = 0.0 if heard else watched + (0.0 if interrupted else min(after, TTL / 2))
        if observer.fleet.is_dead("w"):
            assert watched >= TTL - 1e-6


def test_long_dead_workers_are_forgotten_once() -> None:
    observer = Observer()
    observer.settle()
    forgotten: list[str] = []
    for _ in range(60):
        observer.observe(beat("other"))
        forgotten += observer.fleet.forget_dead()
    assert forgotten == ["w"]


# -- tasks that workers can run


def test_slots_and_task_names_add_up_by_queue() -> None:
    observer = Observer()
    both = names_digest(["add", "mul"])
    observer.observe(beat("a"), beat("b", queues=["default", "images"], slots=4, names=both))
    fleet = observer.fleet
    assert set(fleet.queues) == {"default", "images"}
    assert (fleet.slots("default"), fleet.slots("images"), fleet.slots("nowhere")) == (14, 4, 0)
    assert fleet.knows("default", "mul")
    assert fleet.known_on("images") == ["add", "mul"]
    assert not fleet.knows("nowhere", "add")
    assert fleet.known() == {("default", "add"), ("default", "mul"), ("images", "add"), ("images", "mul")}
    assert fleet.names_of(both) == {"add", "mul"}


def test_a_task_name_is_known_only_on_the_queues_of_its_workers() -> None:
    observer = Observer()
    observer.observe(beat("a"), beat("b", queues=["images"], names=names_digest(["add", "mul"])))
    assert not observer.fleet.knows("default", "mul")
    assert observer.fleet.knows("images", "mul")


def test_draining_and_doubtful_workers_get_no_tasks_but_count_as_alive() -> None:
    observer = Observer()
    held = pack_attempt(b"t" * 16, 3)
    observer.observe(beat("a", draining=True, held=held), beat("b", doubtful=True, held=pack_attempt(b"u" * 16, 1)))
    assert not list(observer.fleet.queues)
    assert not observer.fleet.knows("default", "add")
    assert observer.fleet.held() == {(b"t" * 16, 3), (b"u" * 16, 1)}
    assert not observer.fleet.is_dead("a")


def test_a_vanished_worker_leaves_the_window_at_once() -> None:
    observer = Observer()
    observer.observe(beat("a"), beat("b"))
    observer.observe(beat("b"))
    assert observer.fleet.slots("default") == 10


NAMED = ["default", "other"]
_FLEETS = st.dictionaries(
    st.sampled_from("abc"),
    st.tuples(st.lists(st.sampled_from(NAMED), unique=True), st.sampled_from(sorted(NAMES)), st.booleans()),
)


@given(st.lists(_FLEETS, min_size=1, max_size=6))
def test_only_the_last_observation_of_the_fleet_counts(
    looks: list[dict[str, tuple[list[str], str, bool]]],
) -> None:
    seen, fresh = Observer(), Observer()
    for number, look in enumerate(looks, 1):
        beats = [
            beat(worker, queues=queues, names=names, slots=slots, draining=draining, number=number)
            for slots, (worker, (queues, names, draining)) in enumerate(look.items(), 1)
        ]
        seen.observe(*beats)
    fresh.observe(*beats)
    assert seen.fleet.queues == fresh.fleet.queues
    assert seen.fleet.known() == fresh.fleet.known()
    ours, theirs = seen.fleet.capabilities, fresh.fleet.capabilities
    assert ours.mixed == theirs.mixed
    assert [ours.watching(queue) for queue in NAMED] == [theirs.watching(queue) for queue in NAMED]


def test_task_names_are_read_once_per_digest() -> None:
    observer = Observer()
    for _ in range(5):
        observer.observe(beat("a"), beat("b"))
    assert observer.asked == [names_digest(["add"])]


def test_unpublished_task_names_are_read_again() -> None:
    observer = Observer()
    missing = names_digest(["late"])
    observer.observe(beat(names=missing))
    assert not observer.fleet.knows("default", "late")
    NAMES[missing] = ["late"]
    try:
        observer.observe(beat(names=missing))
        assert observer.fleet.knows("default", "late")
    finally:
        del NAMES[missing]


def test_a_slow_check_delays_the_next_by_at_most_thirty_seconds() -> None:
    assert pause_after(0.01) == pytest.approx(0.2)
    assert pause_after(5.0) == 30.0, "what Redis has lost is found by it"
