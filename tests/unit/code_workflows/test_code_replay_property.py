"""Random programs with random events: replay gives the same commands, with or without a cached run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.history import Event
from orchestrator.sdk.code.live_run import LiveRun
from orchestrator.testing import Recording, replay
from tests.fuzzing import examples
from tests.unit.code_workflows.programs import LIMIT, PROGRAMS, World, program, refused_at

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).parents[3]


def fresh(events: list[Event]) -> tuple[list[Command], list[Command]]:
    """Replay a history, or a part of it, without a cache; return all commands, and the new commands."""
    flow = LiveRun(program, bytes(range(16)), LIMIT)
    trace = flow.commander.ledger.trace = []
    try:
        return trace, flow.advance(events, whole=True)
    finally:
        flow.close()


@examples(60)
@example([("gather", [[("sleep", 0.5)]], False)], 43251)  # an end is rejected
@given(PROGRAMS, st.integers(0, 2**32))
def test_replay_gives_the_same_commands_at_every_cut(steps: list[Any], seed: int) -> None:
    world = World(steps, seed)
    world.play()

    # A cached workflow and one that is replayed from the history answer the same events with the same commands.
    for turn in world.turns:
        _, batch = fresh(turn.shown)
        assert [history.record(command) for command in batch] == turn.batch

    # A replay of any prefix of the history gives a prefix of the commands of the whole history.
    whole, _ = fresh(world.run.history)
    timers = {command.id for command in whole if isinstance(command, commands.StartTimer)}
    # Except from a fact at which the code ended to the marker that rejects that end, and the records that the leader
    # kept of that turn: the other commands were not applied.
    refused: set[int] = set()
    for mark in world.run.history:
        if at := refused_at(mark):
            kept = takewhile(lambda event: isinstance(event.what, history.Record), world.run.history[mark.number :])
            refused.update(range(at, mark.number + len([*kept])))
    for length in sorted({*range(1, len(world.run.history) + 1)} - refused):
        part, _ = fresh(world.run.history[:length])
        part = [one for one in part if not isinstance(one, commands.StartTimer) or one.id in timers]
        assert part == whole[: len(part)]

    if world.run.end is not None:
        assert replay(program, Recording(world.run.id, world.run.history)) == whole


def output_of(program: str, seed: str, given: str = "") -> str:
    """Return what a program prints in a process; the hash seed is also the program's argument."""
    return subprocess.run(
        [sys.executable, "-c", program, seed],
        input=given,
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


PLAY = """
import json, sys
from tests.unit.code_workflows.programs import World
for steps, seed in json.load(sys.stdin):
    world = World(steps, seed)
    world.play()
    print(world.run.history)
"""


def test_histories_do_not_depend_on_addresses_or_hash_seeds() -> None:
    branches = [[["task", 1], ["sleep", 1]], [["timer", 0.5], ["task", 2]], [["signal"], ["operation", 3]]]
    steps = [["first", branches], ["as completed", branches], ["gather", branches, True], ["group", branches]]
    steps += [["first gathered", branches], ["tell", 1], ["signal"]]
    programs = json.dumps([[steps, seed] for seed in range(10)])
    outputs = {output_of(PLAY, seed, programs) for seed in ("0", "1", "2")}
    assert len(outputs) == 1
    assert "TimerFired" in outputs.pop()


SETS = """
import asyncio, random, sys
from orchestrator import Orchestrator, WorkflowContext
from orchestrator.testing import WorkflowTest

app = Orchestrator()

@app.task(name="work")
def work(label: str, among: set[str]) -> str: ...

@app.workflow(name="branches")
async def branches(ctx: WorkflowContext) -> list[str]:
    names = [f"branch {number}" for number in range(20)]
    gathered = [asyncio.gather(work.schedule(name, set(names))) for name in names]
    done, _ = await asyncio.wait(gathered)
    again = [await work.schedule(next(iter(await one)), set()) for one in done]
    assert len(asyncio.all_tasks()) == 1
    return again

class Litter(asyncio.tasks._GatheringFuture):
    pass

async def play():
    litter = [Litter([], loop=asyncio.get_running_loop()) for _ in range(500)]
    random.Random(sys.argv[1]).shuffle(litter)
    del litter[:400]  # so that the next ones of that size get addresses in an order of this process
    async with WorkflowTest() as test:
        run = await test.start(branches, mocks={work: lambda label, among: label})
        print(await run.result())
        print(run.history.to_json())

asyncio.run(play())
"""


def test_sets_of_futures_have_the_same_order_in_every_process() -> None:
    """Also sets of the futures that `asyncio.gather` returns; and sets among arguments have the same digest."""
    outputs = {output_of(SETS, seed) for seed in ("0", "1", "2")}
    assert len(outputs) == 1
