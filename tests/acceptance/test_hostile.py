"""Garbage is written into every stream and key while real processes work: everything else goes on."""

from __future__ import annotations

import base64
import json
import random
from functools import partial
from typing import Any

import project
import pytest

from orchestrator.transport.codec import encode
from orchestrator.transport.keys import Keys
from tests import forking
from tests.acceptance.stack import Stack
from tests.waiting import eventually

KEYS = Keys()
TASKS = 200


@pytest.fixture
def settings() -> dict[str, float]:
    return QUICK


def rubbish(chance: random.Random) -> bytes:
    """Return garbage of a random kind; some kinds are decodable messages of unknown workers."""
    return chance.choice(
        [
            b"",
            chance.randbytes(chance.randrange(200)),
            b"\x91" * chance.randrange(10_000),
            b"\xdd\xff\xff\xff\xff",
            encode(["w", [["succeeded", chance.randbytes(3), 1, 0.1, b"\x01"]]]),
            encode(["w\0", [["failed", chance.randbytes(16), 1, float("nan"), ["k", "m\0"]]]]),
            encode(["w", [["enqueued", [[chance.randbytes(16), "a\0b", "default", b""]]]]]),
            encode([[chance.randbytes(16), 1, "project.noop", b"\xc1", "default"]]),
            encode([[chance.randbytes(5), 0, "project.noop", b"", "default"]]),
            encode([[[chance.randbytes(16), 1]], True, True, True]),
            bytes(1_000_000),
        ]
    )


def disturb(stack: Stack, chance: random.Random) -> None:
    """Write garbage wherever the orchestrator reads."""
    redis = stack.redis
    generation = generation_of(stack)
    workers: Any = redis.smembers(KEYS.workers)
    pipeline = redis.pipeline(transaction=False)
    pipeline.xadd(KEYS.events(generation), {"d": rubbish(chance)})
    pipeline.xadd(KEYS.events(generation), {b"\xff": b"\xff"})
    pipeline.xadd(KEYS.queue(generation, "default"), {"d": rubbish(chance)})
    pipeline.xadd(KEYS.nudges, {"d": rubbish(chance)})
    for worker in workers:
        if b"stranger" not in worker:
            pipeline.xadd(KEYS.orders(worker.decode()), {"d": chance.randbytes(20)})
    pipeline.set(KEYS.worker("stranger"), rubbish(chance))
    pipeline.sadd(KEYS.workers, "stranger")
    pipeline.publish(KEYS.applied, rubbish(chance))
    pipeline.publish(f"{KEYS.prefix}:done:{chance.randrange(16)}", rubbish(chance))
    pipeline.execute()


def generation_of(stack: Stack) -> str:
    found = eventually(lambda: stack.redis.get(KEYS.generation), "a generation")
    assert isinstance(found, bytes)
    return found.decode()


def status(stack: Stack) -> Any:
    done = forking.run("status", "--json", environment=stack.environment, folder=stack.folder)
    return json.loads(done.stdout)["redis"]


QUICK = {"worker_ttl": 2.0, "heartbeat": 0.5}
SIGNED = QUICK | {"signing_keys": base64.b64encode(bytes(32)).decode()}


@pytest.mark.parametrize("settings", [QUICK, SIGNED], ids=["unsigned", "signed"])
def test_garbage_in_every_stream_stops_nothing(stack: Stack) -> None:
    chance = random.Random(4)
    scheduler = stack.scheduler()
    worker = stack.worker(processes=2)
    handles = []
    for number in range(TASKS):
        handles.append(project.add.enqueue(number, 1))
        if number % 10 == 0:
            disturb(stack, chance)
    stack.redis.set(KEYS.applied, encode([generation_of(stack), "banana"]))
    assert [handle.result(60) for handle in handles] == [number + 1 for number in range(TASKS)]
    assert project.parent.enqueue(str(stack.folder / "children"), 3).result(60)
    assert scheduler.is_running()
    assert worker.is_running()
    for process in (scheduler, worker):
        assert "Traceback" not in process.log.read_text()
        assert "died" not in process.log.read_text()
    assert status(stack)["quarantined"] >= TASKS / 10
    assert status(stack)["foreign_keys"] == []


def test_the_log_and_status_report_an_overwritten_key(stack: Stack) -> None:
    scheduler = stack.scheduler()
    worker = stack.worker()
    assert project.add.enqueue(1, 1).result(60) == 2
    with stack.redis.pipeline() as at_once:  # before the worker writes it again
        at_once.delete(KEYS.workers)
        at_once.lpush(KEYS.workers, "mine")
        at_once.execute()
    for process in (scheduler, worker):
        eventually(
            partial(lambda process: process.logged("Another program has overwritten one of our keys"), process),
            "the log says so",
        )
    assert status(stack)["foreign_keys"] == [{"key": KEYS.workers, "expected": "set", "found": "list"}]
    handle = project.add.enqueue(2, 2)
    stack.redis.delete(KEYS.workers)
    assert handle.result(60) == 4
    assert (scheduler.stop(), worker.stop()) == (0, 0)
