"""The fleet as the leader sees it: who lives, counted fairly, and what they can run."""

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
        """Let the grace of a new leader pass, with one worker alive."""
        while self.fleet.in_grace:
            self.observe(beat())


def seconds_until_dead(observer: Observer, worker: str, step: float) -> float:
    silent = 0.0
    while not observer.fleet.is_dead(worker):
        observer.observe(after=step)
        silent += step
        assert silent < 100
    return silent


# -- silence


def test_a_worker_that_beats_is_alive_for_ever() -> None:
    observer = Observer()
    for _ in range(100):
        observer.observe(beat())
        assert not observer.fleet.is_dead("w")


def test_a_silent_worker_is_dead_after_its_ttl() -> None:
    observer = Observer()
    observer.settle()
    assert seconds_until_dead(observer, "w", step=1.0) == TTL


def test_a_heartbeat_that_does_not_change_is_silence() -> None:
    """Redis's clock was set back, so that it does not expire."""
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


def test_a_worker_that_is_heard_again_lives() -> None:
    observer = Observer()
    observer.settle()
    seconds_until_dead(observer, "w", step=1.0)
    observer.observe(beat())
    assert not observer.fleet.is_dead("w")
    assert seconds_until_dead(observer, "w", step=1.0) == TTL


def test_time_in_which_redis_was_away_does_not_count() -> None:
    observer = Observer()
    observer.settle()
    for _ in range(20):
        observer.fleet.interrupted()
        observer.observe(after=3_600)
    assert not observer.fleet.is_dead("w")
    assert seconds_until_dead(observer, "w", step=1.0) == TTL


def test_a_leader_that_was_stopped_for_an_hour_blames_nobody_at_once() -> None:
    observer = Observer()
    observer.settle()
    observer.observe(after=3_600)
    assert not observer.fleet.is_dead("w")


def test_a_new_leader_gives_everyone_a_full_ttl() -> None:
    """It may find a message of a worker that it has never heard of."""
    observer = Observer()
    observer.observe()
    assert not observer.fleet.is_dead("stranger")
    assert observer.fleet.in_grace
    assert seconds_until_dead(observer, "stranger", step=1.0) >= TTL


def test_grace_spares_the_dead_until_it_has_passed() -> None:
    observer = Observer()
    observer.settle()
    seconds_until_dead(observer, "w", step=1.0)
    observer.fleet.grace()
    assert not observer.fleet.is_dead("w")
    assert seconds_until_dead(observer, "w", step=1.0) == TTL


def test_someone_never_seen_is_silent_from_the_first_question_on() -> None:
    observer = Observer()
    observer.settle()
    assert not observer.fleet.is_dead("stranger")
    assert seconds_until_dead(observer, "stranger", step=1.0) == TTL


steps = st.lists(st.tuples(st.floats(0.01, 100), st.booleans(), st.booleans()), max_size=40)


@given(steps)
def test_nobody_dies_within_the_ttl_of_a_beat(history: list[tuple[float, bool, bool]]) -> None:
    """Whatever happens: from the last beat on, at least a TTL of watched time passes."""
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


def test_the_long_dead_are_forgotten_once() -> None:
    observer = Observer()
    observer.settle()
    forgotten: list[str] = []
    for _ in range(60):
        observer.observe(beat("other"))
        forgotten += observer.fleet.forget_dead()
    assert forgotten == ["w"]


# -- what it can run


def test_slots_and_names_add_up_by_queue() -> None:
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


def test_a_name_is_known_only_on_the_queues_of_those_who_know_it() -> None:
    observer = Observer()
    observer.observe(beat("a"), beat("b", queues=["images"], names=names_digest(["add", "mul"])))
    assert not observer.fleet.knows("default", "mul")
    assert observer.fleet.knows("images", "mul")


def test_draining_and_doubtful_workers_take_nothing_but_are_heard() -> None:
    observer = Observer()
    held = pack_attempt(b"t" * 16, 3)
    observer.observe(beat("a", draining=True, held=held), beat("b", doubtful=True, held=pack_attempt(b"u" * 16, 1)))
    assert not list(observer.fleet.queues)
    assert not observer.fleet.knows("default", "add")
    assert observer.fleet.held() == {(b"t" * 16, 3), (b"u" * 16, 1)}
    assert not observer.fleet.is_dead("a")


def test_a_worker_that_is_gone_is_gone_from_the_window_at_once() -> None:
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
def test_the_last_look_counts_whatever_was_seen_before(
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


def test_names_are_read_once_per_digest() -> None:
    observer = Observer()
    for _ in range(5):
        observer.observe(beat("a"), beat("b"))
    assert observer.asked == [names_digest(["add"])]


def test_names_that_were_not_published_yet_are_asked_for_again() -> None:
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


def test_one_look_that_took_long_does_not_put_off_the_next_for_minutes() -> None:
    assert pause_after(0.01) == pytest.approx(0.2)
    assert pause_after(5.0) == 30.0, "what Redis has lost is found by it"
