"""Shares of lanes: priority first, then keys in turn, by weight; limits are kept, and no lane is forgotten."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from orchestrator import Rate
from orchestrator.domain.limits import lanes
from orchestrator.domain.limits.buckets import Buckets
from orchestrator.domain.limits.lane_limits import gate_of, lane_name
from orchestrator.domain.limits.lanes import Lanes, Rest, Stock
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, TaskOptions
from tests.fuzzing import examples

NOW = 1_000.0


class Bench:
    """Lanes, and their tasks as Postgres would hold them."""

    def __init__(self) -> None:
        self.buckets = Buckets()
        self.lanes = Lanes(self.buckets)
        self.ready: dict[str | None, list[int]] = defaultdict(list)
        """The priorities of the tasks in each lane."""
        self.now = NOW
        self.counted = 50
        """The maximum of tasks that are counted at once in a lane."""

    def add(self, lane: str | None, count: int = 1, priority: int = 0, options: TaskOptions = DEFAULT_OPTIONS) -> None:
        self.ready[lane] += [priority] * count
        self.ready[lane].sort(reverse=True)
        if lane is not None:
            self.lanes.arrive("q", lane, priority, options, is_first=count > 1)

    def hear(self, *names: str) -> None:
        """Report the start of all tasks handed out."""
        self.buckets.unreported.clear()
        for name in names:
            self.lanes.start_reported(name)

    def look(self) -> None:
        """Count the ready tasks of lanes whose count is in doubt."""
        for lane in self.lanes.in_doubt("q", 1_000):
            found = self.ready[lane][: self.counted]
            known = found.count(found[0]) if found else 0
            rest = Rest.NOTHING if known == len(found) < self.counted else Rest.SOMETHING
            self.lanes.learn("q", lane, Stock(found[0], known, rest) if found else None)

    def serve(self, room: int) -> list[str | None]:
        """Hand out up to `room` tasks like the leader; return the lanes in the order of their shares."""
        served: list[str | None] = []
        for _ in range(20):
            if not self.lanes.has("q") or len(served) == room:
                break
            self.look()
            plain = self.ready[None][0] if self.ready[None] else None
            for share in self.lanes.allot("q", room - len(served), plain, self.now):
                mine = [priority for priority in self.ready[share.lane] if priority == share.priority][: share.turns]
                for priority in mine:
                    self.ready[share.lane].remove(priority)
                served += [share.lane] * len(mine)
                if share.lane is not None and len(mine) < share.turns:
                    self.lanes.return_turns("q", share.lane, share.turns - len(mine), self.now)
        return served


def test_lanes_are_named_after_limits_and_keys() -> None:
    limited = TaskOptions(concurrency=1)
    assert lane_name("mail", None, DEFAULT_OPTIONS) is None
    assert lane_name("mail", "acme", DEFAULT_OPTIONS) == "|acme"
    assert lane_name("mail", None, limited) == "mail|"
    assert lane_name("mail", "a|b", limited) == "mail|a|b"
    assert gate_of("mail|a|b") == "mail"
    assert gate_of("|acme") == ""


def test_keys_take_turns() -> None:
    bench = Bench()
    bench.add("|many", 1_000)
    bench.serve(100)
    bench.add("|few", 3)
    assert Counter(bench.serve(6)) == {"|few": 3, "|many": 3}
    assert bench.serve(2) == ["|many", "|many"]


def test_an_idle_key_saves_no_turns() -> None:
    bench = Bench()
    bench.add("|late", 1)
    bench.serve(1)
    bench.add("|busy", 1_000)
    bench.serve(500)
    bench.add("|late", 500)
    assert Counter(bench.serve(100)) == {"|late": 50, "|busy": 50}


def test_turns_are_shared_by_weight() -> None:
    bench = Bench()
    bench.add("|heavy", 1_000, options=TaskOptions(weight=3.0))
    bench.add("|light", 1_000)
    assert Counter(bench.serve(400)) == {"|heavy": 300, "|light": 100}


def test_tasks_without_a_key_form_one_lane() -> None:
    bench = Bench()
    bench.add(None, 100)
    bench.add("|a", 100)
    bench.add("|b", 100)
    assert Counter(bench.serve(30)) == {None: 10, "|a": 10, "|b": 10}


def test_higher_priorities_precede_turns() -> None:
    bench = Bench()
    bench.add("|a", 10)
    bench.add("|b", 2, priority=5)
    bench.add(None, 1, priority=9)
    assert bench.serve(3) == [None, "|b", "|b"]
    bench.add("|a", 1, priority=50)
    bench.add("|b", 1)
    assert bench.serve(1) == ["|a"]
    assert Counter(bench.serve(2)) == {"|a": 1, "|b": 1}


def test_a_lane_loses_its_precedence_when_its_urgent_task_is_gone() -> None:
    bench = Bench()
    bench.add("|a", 1, priority=10)
    bench.add("|a", 100)
    bench.add("|b", 5, priority=5)
    assert bench.serve(6) == ["|a"] + ["|b"] * 5


def test_concurrency_limits_of_keys_and_tasks_hold() -> None:
    options = TaskOptions(concurrency=2, total_concurrency=5)
    bench = Bench()
    for key in "abcd":
        bench.add(f"mail|{key}", 10, options=options)
    first = bench.serve(100)
    assert len(first) == 5
    assert max(Counter(first).values()) == 2
    assert bench.serve(100) == []
    bench.lanes.remove_in_flight("mail|a")
    assert len(bench.serve(100)) == 1


def test_tasks_in_flight_are_recounted_from_their_rows() -> None:
    bench = Bench()
    bench.add("mail|", 10, options=TaskOptions(concurrency=3))
    bench.lanes.recount(["mail|", "mail|"])
    assert bench.serve(10) == ["mail|"]
    assert bench.serve(10) == []
    bench.lanes.recount([])
    assert len(bench.serve(10)) == 3


def test_a_limit_holds_across_queues() -> None:
    everything = Lanes(Buckets())
    for queue in ("one", "two"):
        everything.arrive(queue, "mail|", 0, TaskOptions(concurrency=1))
    assert len(everything.allot("one", 5, None, NOW)) == 1
    assert everything.allot("two", 5, None, NOW) == []
    everything.remove_in_flight("mail|")
    assert len(everything.allot("two", 5, None, NOW)) == 1


def test_rate_limits_of_keys_and_tasks_hold() -> None:
    bench = Bench()
    for key in "abc":
        bench.add(f"mail|{key}", 50, options=TaskOptions(rate=Rate(2, 1), total_rate=Rate(5, 1)))
    assert Counter(bench.serve(100)) == {"mail|a": 2, "mail|b": 2, "mail|c": 1}
    assert bench.serve(100) == []
    assert bench.lanes.next_due(bench.now) is None, "the time of nobody has to come: five are unheard of"
    bench.hear("mail|a", "mail|b", "mail|c")
    due = bench.lanes.next_due(bench.now)
    assert due == pytest.approx(NOW + 0.2)
    bench.now = NOW + 0.2
    assert bench.serve(100) == ["mail|c"]
    bench.hear("mail|c")
    bench.now = NOW + 10
    assert len(bench.serve(100)) == 5


def test_unreported_starts_hold_back_further_tasks() -> None:
    bench = Bench()
    bench.add("mail|a", 50, options=TaskOptions(rate=Rate(10, 1, burst=1)))
    bench.add("post|a", 50, options=TaskOptions(total_rate=Rate(100, 1, burst=1)))
    given = Counter[str | None]()
    for _ in range(100):
        given.update(bench.serve(100))
        bench.now += 1.0
    assert given == {"mail|a": 1, "post|a": 10}, "no more than a tenth of a second of the rate"
    bench.hear("mail|a", "post|a")
    assert Counter(bench.serve(100)) == {"mail|a": 1, "post|a": 1}


def test_lanes_at_their_limits_are_not_examined() -> None:
    bench = Bench()
    for key in range(10_000):
        bench.add(f"mail|{key}", 1, options=TaskOptions(concurrency=1))
    bench.lanes.recount(f"mail|{key}" for key in range(10_000))
    assert bench.serve(10) == []
    bench.add("|free", 1)
    looked = Counter[str]()
    original = bench.lanes._take

    def counting(lane: lanes._Lane, requested: int, now: float) -> int:
        looked[lane.name] += 1
        return original(lane, requested, now)

    bench.lanes._take = counting  # type: ignore[method-assign]
    assert bench.serve(10) == ["|free"]
    assert set(looked) == {"|free"}


def test_lanes_beyond_the_maximum_are_read_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_LANES", 4)
    bench = Bench()
    for key in range(10):
        bench.add(f"|{key}", 1)
    assert not bench.lanes.should_read()
    bench.serve(10)
    assert bench.lanes.should_read()
    assert not bench.lanes.should_read()


class TurnsMachine(RuleBasedStateMachine):
    """In random sequences no limit is exceeded, no task that may be served waits, and no task is served twice."""

    LIMITS = {
        "a": TaskOptions(concurrency=2),
        "b": TaskOptions(concurrency=1, total_concurrency=3),
        "c": TaskOptions(total_concurrency=2),
        "": DEFAULT_OPTIONS,
    }

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.in_flight: list[str | None] = []

    @rule(gate=st.sampled_from(["a", "b", "c", ""]), key=st.sampled_from("xyz"), priority=st.integers(-1, 1))
    def add(self, gate: str, key: str, priority: int) -> None:
        self.bench.add(f"{gate}|{key}", 1, priority, self.LIMITS[gate])

    @rule(priority=st.integers(-1, 1))
    def add_plain(self, priority: int) -> None:
        self.bench.add(None, 1, priority)

    @rule(room=st.integers(1, 8))
    def serve(self, room: int) -> None:
        served = self.bench.serve(room)
        assert len(served) <= room
        self.in_flight += served
        if len(served) < room and self.bench.lanes.has("q"):
            for lane, waiting in self.bench.ready.items():
                assert not waiting or not self.may_serve(lane), f"{lane} waits, and there is room"

    @rule(place=st.integers(0, 20))
    def land(self, place: int) -> None:
        if self.in_flight:
            lane = self.in_flight.pop(place % len(self.in_flight))
            if lane is not None:
                self.bench.lanes.remove_in_flight(lane)

    @rule()
    def recount(self) -> None:
        self.bench.lanes.recount(lane for lane in self.in_flight if lane is not None)

    @invariant()
    def limits_hold(self) -> None:
        counts = Counter(lane for lane in self.in_flight if lane is not None)
        for lane, count in counts.items():
            options = self.LIMITS[gate_of(lane)]
            assert options.concurrency is None or count <= options.concurrency
        for gate, options in self.LIMITS.items():
            total = sum(count for lane, count in counts.items() if gate_of(lane) == gate)
            assert options.total_concurrency is None or total <= options.total_concurrency

    def may_serve(self, lane: str | None) -> bool:
        if lane is None:
            return True
        options = self.LIMITS[gate_of(lane)]
        mine = self.in_flight.count(lane)
        total = sum(1 for other in self.in_flight if other is not None and gate_of(other) == gate_of(lane))
        return (options.concurrency is None or mine < options.concurrency) and (
            options.total_concurrency is None or total < options.total_concurrency
        )


@pytest.mark.slow
@pytest.mark.hypothesis
def test_random_sequences_keep_limits_and_serve_each_task_once() -> None:
    run_state_machine_as_test(TurnsMachine, settings=examples(75, stateful_step_count=60))


def test_an_urgent_lane_with_more_tasks_is_served_alone() -> None:
    lanes = Lanes(Buckets())
    lanes.learn("q", "|urgent", Stock(5, 3, Rest.SOMETHING), DEFAULT_OPTIONS)
    lanes.learn("q", "|other", Stock(0, 100, Rest.SOMETHING), DEFAULT_OPTIONS)
    assert [(share.lane, share.turns) for share in lanes.allot("q", 10, 0, NOW)] == [("|urgent", 3)]
    assert lanes.has_next("q", NOW)
    assert lanes.in_doubt("q", 10) == ["|urgent"]
    lanes.learn("q", "|urgent", Stock(5, 4, Rest.NOTHING))
    shares = {share.lane: share.turns for share in lanes.allot("q", 10, None, NOW)}
    assert shares == {"|urgent": 4, "|other": 6}, "nothing else is there: so there is nobody to wait for"


def test_a_lane_is_queried_unless_postgres_reported_no_further_tasks() -> None:
    lanes = Lanes(Buckets())
    lanes.learn("q", "|counted", Stock(0, 2, Rest.NOTHING), DEFAULT_OPTIONS)
    lanes.arrive("q", "|arrived", 0, DEFAULT_OPTIONS)
    lanes.learn("q", "|both", Stock(0, 1, Rest.NOTHING), DEFAULT_OPTIONS)
    lanes.arrive("q", "|both", 0, DEFAULT_OPTIONS)
    assert {share.lane: share.turns for share in lanes.allot("q", 10, None, NOW)} == {
        "|counted": 2,
        "|arrived": 1,
        "|both": 2,
    }
    assert not lanes.has_next("q", NOW), "nobody has to hurry"
    assert lanes.in_doubt("q", 10) == ["|arrived", "|both"]
    for lane in ("|arrived", "|both"):
        lanes.learn("q", lane, None)
    assert not lanes.has("q")


def test_a_lane_is_queried_after_a_task_was_put_back() -> None:
    """The task may be ready again without an announcement, and be claimed in place of another, which was forgotten."""
    lanes = Lanes(Buckets())
    lanes.learn("q", "mail|", Stock(0, 2, Rest.NOTHING), TaskOptions(concurrency=1))
    for _ in range(2):
        assert [share.turns for share in lanes.allot("q", 1, None, NOW)] == [1]
        lanes.refuse("q", "mail|")
    assert lanes.in_doubt("q", 10) == ["mail|"]
    lanes.learn("q", "mail|", Stock(0, 1, Rest.NOTHING))
    assert [share.turns for share in lanes.allot("q", 1, None, NOW)] == [1]
    lanes.remove_in_flight("mail|")
    assert lanes.in_doubt("q", 10) == []
    assert not lanes.has("q")


def test_a_lane_is_queried_after_an_uncounted_task_took_a_turn() -> None:
    lanes = Lanes(Buckets())
    lanes.learn("q", "mail|", Stock(0, 1, Rest.NOTHING), TaskOptions(concurrency=1))
    assert [share.turns for share in lanes.allot("q", 1, None, NOW)] == [1]
    lanes.claimed_early("q", "mail|", 0, TaskOptions(concurrency=1))
    assert lanes.in_doubt("q", 10) == ["mail|"]
    lanes.learn("q", "mail|", None)
    lanes.claimed_early("q", "mail|", 0, TaskOptions(concurrency=1))
    assert lanes.in_doubt("q", 10) == ["mail|"], "it was forgotten already"
    assert not lanes.has_next("q", NOW), "nobody has to hurry, or to wait for it"


def test_a_lane_is_queried_after_it_had_fewer_tasks_than_known() -> None:
    lanes = Lanes(Buckets())
    lanes.learn("q", "|a", Stock(0, 5, Rest.NOTHING), TaskOptions(concurrency=5))
    assert lanes.allot("q", 10, None, NOW)[0].turns == 5
    lanes.return_turns("q", "|a", 2, NOW)
    assert lanes.in_doubt("q", 10) == ["|a"]
    lanes.learn("q", "|a", Stock(0, 4, Rest.NOTHING))
    assert lanes.allot("q", 10, None, NOW)[0].turns == 2, "three are in flight"


@pytest.mark.parametrize("options", [TaskOptions(concurrency=1), TaskOptions(rate=Rate(1, 3600.0))])
def test_a_lane_waits_for_its_limits_once_whatever_arrives(options: TaskOptions) -> None:
    buckets = Buckets()
    lanes = Lanes(buckets)
    lanes.learn("q", "mail|a", Stock(0, 5, Rest.SOMETHING), options)
    assert [share.turns for share in lanes.allot("q", 10, None, NOW)] == [1]
    for number in range(100):
        lanes.learn("q", "mail|a", Stock(0, 6 + number, Rest.SOMETHING), options)
        lanes.arrive("q", "mail|a", number % 3, options)
        assert lanes.allot("q", 10, None, NOW) == []
    assert len(lanes._asleep) + sum(map(len, lanes._full.values())) == 1
    buckets.unreported.clear()
    lanes.remove_in_flight("mail|a")
    later = NOW + (3601.0 if options.rate else 0.0)
    assert [share.turns for share in lanes.allot("q", 10, None, later)] == [1]


def test_each_of_many_lanes_receives_several_turns_at_once() -> None:
    lanes = Lanes(Buckets())
    names = [f"mail|{number}" for number in range(1_000)]
    for name in names:
        lanes.learn("q", name, Stock(0, 16, Rest.SOMETHING), TaskOptions(concurrency=3))
    first = lanes.allot("q", 512, None, NOW)
    assert [(share.lane, share.turns) for share in first[:170]] == [(name, 3) for name in names[:170]], (
        "never more than 3"
    )
    assert sum(share.turns for share in first) == 512
    second = lanes.allot("q", 1_000, None, NOW)
    assert {share.lane for share in second[:50]}.isdisjoint({share.lane for share in first[:170]}), "then the others"
    for share in (*first, *second):
        for _ in range(share.turns):
            lanes.remove_in_flight(share.lane or "")
    assert sum(share.turns for share in lanes.allot("q", 512, None, NOW)) == 512


def test_total_limits_hold_across_many_lanes() -> None:
    lanes = Lanes(Buckets())
    for number in range(1_000):
        lanes.arrive("q", f"mail|{number}", 0, TaskOptions(concurrency=50, total_concurrency=101))
    assert sum(share.turns for share in lanes.allot("q", 512, None, NOW)) == 101
    assert lanes.allot("q", 512, None, NOW) == []


def test_tasks_in_flight_of_other_shards_count() -> None:
    found = Lanes(Buckets())
    options = TaskOptions(concurrency=3, total_concurrency=5)
    lane = lane_name("mail", "acme", options)
    assert lane is not None
    found.learn("q", lane, Stock(0, 9, Rest.NOTHING), options)
    assert found.limited() == {"mail|acme", "mail"}
    found.share({"mail|acme": 2})
    assert [share.turns for share in found.allot("q", 9, None, 0.0)] == [1]
    assert found.in_flight() == {"mail|acme": 1, "mail": 1}
    found.share({"mail": 4})
    assert found.allot("q", 9, None, 0.0) == [], "the gate is full"
    found.share({})
    assert sum(share.turns for share in found.allot("q", 9, None, 0.0)) == 2
