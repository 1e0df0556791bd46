"""The reconciler's table: attempts left alone, attempts returned, and losses."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.domain.tasks.task import Dispatch, Lost, Returned
from orchestrator.scheduler.fleet.capabilities import Placement
from orchestrator.scheduler.fleet.reconcile import Reconciler
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.tasks.locked import Reported
from orchestrator.store.tasks.waiting import InFlight
from orchestrator.transport.codec import Heartbeat, encode, pack_attempt
from orchestrator.transport.leader.queues import Message

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
TTL = 5.0


def in_flight(task: bytes = A, *, attempt: int = 1, worker: str | None = None, age: float = 9.0) -> InFlight:
    status = "running" if worker else "dispatched"
    return InFlight(task, attempt, "default", status, alone=False, worker=worker, age=age)


def message(entry: str, *members: bytes, consumer: str | None, attempt: int = 1) -> Message:
    body = encode([Dispatch(task, attempt, "job", b"", "default") for task in members])
    return Message(entry, body, consumer)


class Streams:
    """The messages in the stream of a queue."""

    def __init__(self, *messages: Message, queue: str = "default", in_time: bool = True) -> None:
        self._messages = list(messages)
        self._queue = queue
        self._in_time = in_time
        self.reads = 0

    def messages(self, generation: str, queue: str) -> list[Message]:
        assert generation == "g"
        self.reads += 1
        return self._messages if queue == self._queue else []

    def take_back(self, generation: str, queue: str, entries: list[str]) -> list[str]:
        assert (generation, queue) == ("g", self._queue)
        return entries if self._in_time else []


class Situation:
    """A fleet after its grace period, with one live and one dead worker."""

    def __init__(self, *, grace: bool = False, held: bytes = b"") -> None:
        self.fleet = Fleet(TTL)
        self.reconciler = Reconciler(self.fleet)
        self._now = 0.0
        self._held = held
        self._look("live", "dead")
        for _ in range(20):
            self._look("live")
        assert self.fleet.is_dead("dead")
        assert not self.fleet.in_grace
        if grace:
            self.fleet.grace()

    def _look(self, *workers: str) -> None:
        self._now += 1.0
        plain = Heartbeat("", "host", 1, ["default"], 10, "", "", 0.0, self._held)
        beats = [msgspec.structs.replace(plain, worker=worker) for worker in workers]
        self.fleet.observe(beats, self._now, lambda _: [])

    def judge(self, streams: Streams, *tasks: InFlight) -> tuple[list[Reported], dict[str, list[str]]]:
        suspicion = self.reconciler.suspects(streams, "g", tasks)  # type: ignore[arg-type]
        return self.reconciler.judge(suspicion)

    def judge_for(self, seconds: float, streams: Streams, *tasks: InFlight) -> None:
        """Judge at once, and then repeatedly for this many seconds; nothing is judged lost yet."""
        assert self.judge(streams, *tasks) == NOTHING
        for _ in range(int(seconds)):
            self._look("live")
            assert self.judge(streams, *tasks) == NOTHING

    def wait(self) -> None:
        self._look("live")


NOTHING: tuple[list[Reported], dict[str, list[str]]] = ([], {})


def test_an_attempt_held_by_a_live_worker_is_left_alone() -> None:
    situation = Situation(held=pack_attempt(A, 1))
    streams = Streams(message("1-0", A, consumer="live"))
    for _ in range(3):
        assert situation.judge(streams, in_flight(worker="live", age=1e6)) == NOTHING
    assert streams.reads == 0


def test_an_unreceived_message_is_backlog() -> None:
    situation = Situation()
    for _ in range(3):
        assert situation.judge(Streams(message("1-0", A, consumer=None)), in_flight(age=1e6)) == NOTHING


def test_a_message_its_receiver_does_not_list_for_a_ttl_is_withdrawn() -> None:
    situation = Situation()
    streams = Streams(message("1-0", A, consumer="live"))
    situation.judge_for(TTL - 1, streams, in_flight())
    situation.wait()
    reports, withdraw = situation.judge(streams, in_flight())
    assert reports == [("reconcile", "live", Returned(A, 1, "message lost"))]
    assert withdraw == {"default": ["1-0"]}


@pytest.mark.parametrize(
    ("age", "in_time", "expected"),
    [
        (1.5, True, []),
        (3.0, True, [("reconcile", "nobody", Returned(A, 1, "not received"))]),
        (3.0, False, []),  # the worker has received the message meanwhile
    ],
)
def test_a_message_not_received_by_its_only_worker_is_taken_back(
    age: float, in_time: bool, expected: list[Reported]
) -> None:
    situation = Situation()
    situation.fleet.capabilities.committed({A: Placement("live", "default", ("job",))}, ())
    streams = Streams(message("1-0", A, consumer=None), queue="@live", in_time=in_time)
    assert situation.judge(streams, in_flight(age=age)) == (expected, {})


def test_all_worker_streams_are_searched_before_a_message_is_given_up() -> None:
    """Another leader may have sent the message to one of these workers."""
    situation = Situation()
    streams = Streams(message("1-0", A, consumer=None), queue="@live")
    for _ in range(int(TTL / 2)):
        assert situation.judge(streams, in_flight()) == NOTHING
        situation.wait()
    situation.wait()
    assert situation.judge(streams, in_flight())[0] == [("reconcile", "nobody", Returned(A, 1, "not received"))]


def test_a_message_received_by_a_dead_worker_is_a_loss() -> None:
    reports, withdraw = Situation().judge(Streams(message("1-0", A, consumer="dead")), in_flight())
    assert reports == [("reconcile", "dead", Lost(A, 1, alone=False, unheard=20.0))]
    assert withdraw == {"default": ["1-0"]}


def test_an_attempt_on_a_dead_worker_without_a_message_is_a_loss() -> None:
    reports, withdraw = Situation().judge(Streams(), in_flight(worker="dead"))
    assert reports == [("reconcile", "dead", Lost(A, 1, alone=False, unheard=20.0))]
    assert not withdraw


def test_an_attempt_without_a_message_or_a_worker_is_returned() -> None:
    situation = Situation()
    situation.judge_for(TTL - 1, Streams(), in_flight())
    situation.wait()
    reports, withdraw = situation.judge(Streams(), in_flight())
    assert reports == [("reconcile", "nobody", Returned(A, 1, "message lost", begun=True))]
    assert not withdraw


def test_checks_in_quick_succession_prove_no_loss() -> None:
    """All checks may see the heartbeat from before the message was received."""
    situation = Situation()
    for _ in range(20):
        assert situation.judge(Streams(message("1-0", A, consumer="live")), in_flight()) == NOTHING


def test_a_message_found_again_is_not_missing() -> None:
    situation = Situation()
    for _ in range(3):
        situation.judge_for(TTL - 1, Streams(), in_flight())
        assert situation.judge(Streams(message("1-0", A, consumer=None)), in_flight()) == NOTHING


def test_absence_counts_separately_for_each_attempt() -> None:
    situation = Situation()
    situation.judge_for(TTL - 1, Streams(), in_flight(attempt=1))
    situation.wait()
    assert situation.judge(Streams(), in_flight(attempt=2)) == NOTHING


def test_a_silent_worker_is_not_yet_dead() -> None:
    situation = Situation()
    for _ in range(3):
        assert situation.judge(Streams(message("1-0", A, consumer="stranger")), in_flight()) == NOTHING
        assert situation.judge(Streams(), in_flight(worker="stranger")) == NOTHING


@pytest.mark.parametrize("consumer", ["dead", "live", "stranger"])
def test_nothing_is_judged_lost_during_grace(consumer: str) -> None:
    situation = Situation(grace=True)
    for _ in range(3):
        assert situation.judge(Streams(message("1-0", A, consumer=consumer)), in_flight()) == NOTHING
        assert situation.judge(Streams(), in_flight(worker=consumer)) == NOTHING
        assert situation.judge(Streams(), in_flight()) == NOTHING


def test_a_task_dispatched_just_now_is_not_checked() -> None:
    situation, streams = Situation(), Streams()
    for _ in range(3):
        assert situation.judge(streams, in_flight(age=0.5)) == NOTHING
    assert streams.reads == 0


def test_a_bundle_is_judged_by_member_and_withdrawn_once() -> None:
    streams = Streams(message("1-0", A, B, consumer="dead"), message("2-0", C, consumer=None))
    reports, withdraw = Situation().judge(streams, in_flight(A), in_flight(B), in_flight(C))
    assert reports == [("reconcile", "dead", Lost(task, 1, alone=False, unheard=20.0)) for task in (A, B)]
    assert withdraw == {"default": ["1-0"]}


def test_messages_of_ended_attempts_are_withdrawn() -> None:
    streams = Streams(
        message("1-0", A, consumer="dead", attempt=1),  # A is in its second attempt
        message("2-0", A, consumer=None, attempt=2),
        message("3-0", B, C, consumer="live"),  # B has ended, C has not
    )
    _, withdraw = Situation(held=pack_attempt(C, 1)).judge(streams, in_flight(A, attempt=2), in_flight(C))
    assert withdraw == {"default": ["1-0"]}


def test_an_unreadable_message_is_left_to_its_worker() -> None:
    streams = Streams(Message("1-0", b"\xff\xff", "live"), message("2-0", A, consumer=None))
    assert Situation().judge(streams, in_flight(A)) == NOTHING


def test_a_sweep_withdraws_messages_without_tasks() -> None:
    situation = Situation()
    streams = Streams(message("1-0", A, consumer="dead"), message("2-0", B, consumer="live"))
    suspicion = situation.reconciler.suspects(streams, "g", [], sweep=["default"])  # type: ignore[arg-type]
    assert situation.reconciler.judge(suspicion) == ([], {"default": ["1-0", "2-0"]})
