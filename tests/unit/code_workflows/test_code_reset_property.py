"""Random programs with random events, reset to each event that allows it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from orchestrator.domain.code import commands, history, resets
from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.history import Event
from orchestrator.domain.code.resets import preview
from orchestrator.domain.ids import to_text
from orchestrator.sdk.code.live_run import LiveRun
from orchestrator.testing import Recording, replay
from tests.fuzzing import examples
from tests.unit.code_workflows.programs import LIMIT, PROGRAMS, World, program

pytestmark = pytest.mark.long

OLD, NEW = bytes(range(16)), bytes(range(16, 32))
NOW = 1_800_000_000.0
KINDS: tuple[commands.Kind, ...] = ("task", "timer", "promise", "child", "operation", "state", "signal")
IDS = {OLD: NEW} | {
    commands.command_id(OLD, kind, ordinal): commands.command_id(NEW, kind, ordinal)
    for kind in KINDS
    for ordinal in range(1, 200)
}
IDS |= {to_text(old).encode(): to_text(new).encode() for old, new in IDS.items()}  # as in the name of a wait
ID = re.compile(re.escape(OLD[:6]) + b".{10}|" + to_text(OLD)[:13].encode() + b".{23}", re.DOTALL)
random_programs = examples(40)


def in_new(what: Any) -> bytes:
    """Encode a command, a record or a fact of the old run with the ids of the new run."""
    return ID.sub(lambda found: IDS.get(found[0], found[0]), msgspec.msgpack.encode(what))


def taken_back(trace: Iterable[Command], reopened: set[bytes]) -> set[bytes]:
    """Return the timers that leave no trace in the new run: started again, and cancelled before the start is sent."""
    return {one.id for one in trace if isinstance(one, commands.CancelTimer)} & reopened


def lasting(trace: list[Command], timers: set[bytes]) -> list[Command]:
    """Return the commands without other timers: batching decides whether a cancelled timer is ever sent."""
    return [one for one in trace if not isinstance(one, commands.StartTimer | commands.CancelTimer) or one.id in timers]


def as_again(command: Command, taken: Mapping[bytes, float]) -> Command:
    """Return the command of a reopened timer as the new run gives it: due at the original time."""
    if not isinstance(command, commands.StartTimer) or command.id not in taken:
        return command
    return msgspec.structs.replace(command, since=taken[command.id], is_again=True)


def played(run_id: bytes, events: list[Event], more: Iterable[Event] = ()) -> tuple[list[Command], list[Command]]:
    """Replay a history in a new flow, then apply more events one by one; return all commands, and the first batch."""
    flow = LiveRun(program, run_id, LIMIT)
    trace = flow.commander.ledger.trace = []
    try:
        batch = flow.advance(events, whole=True)
        for one in more:
            flow.advance([one])
        return trace, batch
    finally:
        flow.close()


@random_programs
@given(PROGRAMS, st.integers(0, 2**32))
def test_a_reset_run_repeats_the_old_run_and_continues_alike(steps: list[Any], seed: int) -> None:
    world = World(steps, seed)
    world.play()
    events = world.run.history
    whole, _ = played(OLD, events)
    fired = {one.what.id for one in events if isinstance(one.what, history.TimerFired)}
    fired -= {one.id for one in whole if isinstance(one, commands.CancelTimer)}
    for to in resets.allowed(events):
        begins = resets.reset(OLD, events, NEW, to, NOW)
        reopened = resets.Cut(OLD, events, to).reopened
        assert [one.number for one in begins.copy] == list(range(1, to + 2))
        assert preview(OLD, events, to) is not None

        # Up to the event, the new run gives the same commands; its first batch has those that were open.
        before, unrecorded = played(OLD, events[:to])
        gone = taken_back(before, reopened)
        trace, batch = played(NEW, begins.copy)
        expected = [one for one in before if getattr(one, "id", None) not in gone]
        taken = {one.what.id: one.at for one in events[:to] if isinstance(one.what, history.TimerStarted)}
        taken = {timer: at for timer, at in taken.items() if timer in reopened}
        assert [msgspec.msgpack.encode(one) for one in trace] == [in_new(as_again(one, taken)) for one in expected]
        again = [one for one in expected if created(one) in reopened or one in unrecorded]
        assert sorted(msgspec.msgpack.encode(one) for one in batch) == sorted(
            in_new(as_again(one, taken)) for one in again
        )

        # With the same later events in the same order, the whole run is the same, also its end. An end that the leader
        # rejected, because of messages that the code had not seen, is not rejected here.
        if any(isinstance(one.what, history.ActivationApplied) and one.what.ended for one in events[to:]):
            continue
        rest = [
            Event(one.number + 1, one.at, msgspec.msgpack.decode(in_new(one.what), type=history.Fact))
            for one in events[to:]
            if isinstance(one.what, history.Fact)
        ]
        trace, _ = played(NEW, begins.copy, rest)
        in_other = lasting(trace, {IDS[timer] for timer in fired})
        alike = [in_new(as_again(one, taken)) for one in lasting(whole, fired)]
        assert [msgspec.msgpack.encode(one) for one in in_other] == alike


def created(command: Command) -> bytes | None:
    return command.task.id if isinstance(command, commands.ScheduleTask) else getattr(command, "id", None)


@random_programs
@given(PROGRAMS, st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 10**6), st.booleans())
def test_a_reset_run_reaches_its_end(steps: list[Any], seed: int, long: int, place: int, twice: bool) -> None:
    world = World(steps, seed)
    world.go_on(long)
    for _ in range(1 + twice):
        possible = resets.allowed(world.run.history)
        world.reset(possible[place % len(possible)])
        world.go_on(long)
    world.play(300)  # asserts, turn by turn, that the code is never stuck
    event("ended" if world.run.end is not None else "still open")
    assume(world.run.end is not None)
    replay(program, Recording(world.run.id, world.run.history))
