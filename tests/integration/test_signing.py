"""An attacker can write to Redis, but has no signing key: forged messages have no effect and are not counted.

The leader and its services are those of `stage.py`.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import Engine

from orchestrator import Settings
from orchestrator.domain.code.history import Event
from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.tasks.outcomes import Flush
from orchestrator.domain.tasks.task import Dispatch, KeyHolder, Succeeded
from orchestrator.errors import ConfigurationError
from orchestrator.transport import journal
from orchestrator.transport.client import Announcements
from orchestrator.transport.codec import (
    Applied,
    Attempt,
    Ended,
    Heartbeat,
    LogChunk,
    LogLine,
    Order,
    ProgressMark,
    encode,
    names_digest,
)
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from orchestrator.transport.leader.streams import LeaderStreams
from orchestrator.transport.pages import Pages
from orchestrator.transport.signing import OFF, Forged, Signatures
from orchestrator.transport.worker import WorkerStreams
from tests.integration.stage import ID, ONE, System, fresh_system, raw
from tests.waiting import eventually

SECRET = base64.b64encode(b"a" * 32).decode()
OTHER = base64.b64encode(b"b" * 32).decode()
PLAIN = Keys()
THEIRS = Keys(signing=Signatures([b"c" * 32], required=True))


@pytest.fixture
def signed(engine: Engine, database_url: str, redis_url: str) -> Iterator[System]:
    """All messages are signed, and signatures required."""
    with fresh_system(engine, database_url, redis_url, signing_keys=SECRET) as system:
        yield system


def entries(system: System, stream: str) -> list[tuple[bytes, dict[Any, Any]]]:
    found: Any = system.redis.xrange(stream)
    return list(found)


def quarantine_reasons(system: System) -> str:
    return " ".join(fields[b"error"].decode() for fields in system.quarantine())


def forgeries(system: System, place: str, body: bytes) -> Iterator[bytes]:
    """Yield messages unsigned, signed with another key, altered, and signed for another place."""
    yield body
    yield THEIRS.signing.sign(place, body)
    genuine = system.keys.signing.sign(place, body)
    yield genuine[:-1] + bytes([genuine[-1] ^ 1])
    yield system.keys.signing.sign(f"{place}x", body)


def run_task_to_success(system: System) -> None:
    """Enqueue a task, and run it to success."""
    worker = system.workers[0] if system.workers else system.worker()
    handle = system.job.enqueue(1)
    system.pass_seconds()
    worker.succeed(*worker.take())
    system.pass_seconds()
    assert handle.status() == "success"


def test_signed_messages_run_a_task(signed: System) -> None:
    run_task_to_success(signed)
    assert signed.quarantine() == []
    stream = signed.keys.events(signed.generation)
    assert all(fields[b"d"].startswith(b"\xc1") for _, fields in entries(signed, stream))


def test_a_forged_report_is_ignored(signed: System) -> None:
    worker = signed.worker()
    (handle,) = signed.dispatch()
    (task,) = worker.take()
    stream = signed.keys.events(signed.generation)
    body = encode(Flush("w1", [Succeeded(task.id, task.attempt, 0.1, b"\x2a")]))
    for forged in forgeries(signed, stream, body):
        signed.redis.xadd(stream, {"d": forged})
    signed.pass_seconds()
    assert signed.states(handle) == ["dispatched"]
    assert len(signed.quarantine()) == 4
    for words in ("not signed", "not among signing_keys", "is invalid"):
        assert words in quarantine_reasons(signed)
    worker.succeed(task)
    signed.pass_seconds()
    assert handle.result(0) == 1


def test_a_forged_dispatch_is_quarantined_and_blocks_nothing(signed: System) -> None:
    worker = signed.worker()
    run_task_to_success(signed)
    stream = signed.keys.queue(signed.generation, "default")
    body = encode([Dispatch(ID, 1, "job", encode(((), {})), "default")])
    for forged in forgeries(signed, stream, body):
        signed.redis.xadd(stream, {"d": forged})
    assert worker.take() == []
    assert len(signed.quarantine()) == 4
    assert signed.redis.xlen(stream) == 0
    run_task_to_success(signed)


def test_an_altered_dispatch_is_dispatched_again(signed: System) -> None:
    worker = signed.worker()
    (handle,) = signed.dispatch()
    stream = signed.keys.queue(signed.generation, "default")
    ((entry, fields),) = entries(signed, stream)
    signed.redis.xdel(stream, entry)
    signed.redis.xadd(stream, {"d": fields[b"d"].replace(b"job", b"jab")})
    assert worker.take() == []
    signed.make_old()
    signed.tick_until(lambda: worker.succeed(*worker.take()) or handle.status() == "success")


def test_a_forged_dispatch_does_not_hide_the_loss_of_the_genuine_one(signed: System) -> None:
    worker = signed.worker()
    (handle,) = signed.dispatch()
    stream = signed.keys.queue(signed.generation, "default")
    ((entry, fields),) = entries(signed, stream)
    signed.redis.xdel(stream, entry)
    signed.redis.xadd(stream, {"d": OFF.body("", fields[b"d"])})
    signed.make_old()
    signed.tick_until(lambda: len(signed.messages()) > 1)
    signed.tick_until(lambda: worker.succeed(*worker.take()) or handle.status() == "success")


def test_a_process_accepts_a_dispatch_only_once(signed: System) -> None:
    worker = signed.worker()
    signed.dispatch()
    stream = signed.keys.queue(signed.generation, "default")
    ((_, fields),) = entries(signed, stream)
    worker.succeed(*worker.take())
    signed.redis.xadd(stream, fields)
    assert worker.take() == []
    assert "received before" in quarantine_reasons(signed)


def test_a_dispatch_is_valid_only_on_its_own_stream(signed: System) -> None:
    worker = signed.worker()
    signed.dispatch()
    worker.join()
    stream = signed.keys.queue(signed.generation, "default")
    ((_, fields),) = entries(signed, stream)
    signed.redis.xadd(signed.keys.queue(signed.generation, "@w1"), fields)
    assert len(worker.take()) == 1, "that of the queue"
    assert "a different place" in quarantine_reasons(signed)


def test_forged_and_repeated_orders_are_ignored(signed: System) -> None:
    worker = signed.worker()
    worker.burst = True
    signed.pass_seconds()
    (order,) = worker.orders()
    assert order.drain
    place = signed.keys.orders("w1")
    ((_, fields),) = entries(signed, place)
    signed.redis.xadd(place, fields)
    for forged in forgeries(signed, place, encode(Order(stop=[Attempt(ID, 1)], drain=True))):
        signed.redis.xadd(place, {"d": forged})
    assert worker.orders() == []
    assert len(signed.quarantine()) == 5
    assert "received before" in quarantine_reasons(signed)


def test_an_outdated_order_is_ignored(signed: System) -> None:
    worker = signed.worker()
    place = signed.keys.orders("w1")
    kept = signed.keys.signing.sign(place, encode(Order(go_on=True)), 1)
    for _ in range(70):
        worker.beat()
    signed.redis.xadd(place, {"d": kept})
    assert worker.orders() == []
    assert "too old" in quarantine_reasons(signed)


def test_a_forged_heartbeat_is_ignored(signed: System) -> None:
    place = signed.keys.worker("stranger")
    beat = Heartbeat("stranger", "host", 1, ["default"], 10, names_digest(["job"]), "", 1.0, number=1)
    signed.redis.sadd(signed.keys.workers, "stranger")
    for forged in forgeries(signed, place, encode(beat)):
        signed.redis.set(place, forged)
        signed.pass_seconds()
        assert "stranger" not in signed.scheduler.term.fleet.beats
    assert len(signed.quarantine()) == 4
    run_task_to_success(signed)


def test_forged_task_names_are_ignored(signed: System) -> None:
    signed.redis.set(signed.keys.names("digest"), encode(["job"]))
    assert LeaderStreams(signed.redis, signed.keys).fleet.names("digest") is None


def test_a_forged_deregistration_of_a_worker_is_ignored(signed: System) -> None:
    signed.pass_seconds()
    signed.redis.xadd(signed.keys.nudges, {"fleet": b"", "stopped": encode(["w1"])})
    leader = LeaderStreams(signed.redis, signed.keys)
    assert leader.read(signed.generation, "0-0", 10, 0.0).stopped == []
    WorkerStreams(signed.redis, signed.keys).deregister(["w2"], ["w2"])
    assert leader.read(signed.generation, "0-0", 10, 0.0).stopped == ["w2"]
    leader.close()


def test_a_worker_ignores_a_forged_confirmation_of_its_reports(signed: System) -> None:
    signed.pass_seconds()
    streams = WorkerStreams(signed.redis, signed.keys)
    applied = encode(Applied(signed.generation, "9-9"))
    for forged in forgeries(signed, signed.keys.applied, applied):
        signed.redis.set(signed.keys.applied, forged)
        assert streams.flush(signed.generation, None, {}).applied is None
    signed.redis.set(signed.keys.applied, signed.keys.signing.sign(signed.keys.applied, applied))
    assert streams.flush(signed.generation, None, {}).applied == Applied(signed.generation, "9-9")


def test_a_forged_history_page_is_rejected(signed: System) -> None:
    pages = Pages(signed.redis, signed.keys)
    page = encode(list[Event]())
    pages.write(ID, 1, 0, page)
    assert pages.read(ID, 1, 0) == page
    key = signed.keys.pages(ID, 1)
    genuine: Any = signed.redis.hget(key, "0")
    signed.redis.hset(key, "1", genuine)
    signed.redis.hset(key, "2", page)
    assert pages.read(ID, 1, 1) is None
    assert pages.read(ID, 1, 2) is None
    assert len(signed.quarantine()) == 2


def test_a_forged_key_holder_is_ignored(signed: System) -> None:
    streams = WorkerStreams(signed.redis, signed.keys)
    holder = KeyHolder(time_ordered_id(6, bytes(10)))
    signed.redis.set(signed.keys.key_holder(ID), encode(holder))
    assert streams.key_holders([ID]) == {}
    LeaderStreams(signed.redis, signed.keys).publish_key_holders({ID: holder})
    assert streams.key_holders([ID]) == {ID: holder}


def test_forged_log_lines_and_progress_are_not_shown(signed: System) -> None:
    lines, mark = encode([LogLine(1.0, 1, "info", "genuine")]), ProgressMark(1, 0.5)
    chunk = LogChunk(ID, 1, 0, None, "step", lines)
    journal.write(signed.redis, signed.keys, {ID: mark})
    assert journal.send_lines(signed.redis, signed.keys, [chunk]) == 1
    signed.redis.xadd(signed.keys.logs, {"d": encode([LogChunk(ID, 1, 1, None, "step", b"forged")])})
    waiting = journal.waiting_lines(signed.redis, signed.keys, 10, 0.0)
    assert (len(waiting.entries), waiting.chunks) == (2, [chunk])
    assert journal.read_progress(signed.redis, signed.keys, ID)[0] == mark  # type: ignore[index]
    signed.redis.set(signed.keys.progress(ID), encode(ProgressMark(1, 1.0)))
    assert journal.read_progress(signed.redis, signed.keys, ID) is None


class EndListener:
    """Records the announcements of a task's end."""

    def __init__(self, redis: Redis, keys: Keys, task: bytes) -> None:
        self.heard: list[Ended | None] = []
        self.rang = threading.Event()
        self.announcements = Announcements(redis, keys)
        self.announcements.listen(task, self.wake)  # waits for the subscription, but only briefly
        eventually(lambda: redis.pubsub_numsub(keys.done(task))[0][1], "the subscription stands")

    def wake(self, ended: Ended | None) -> None:
        self.heard.append(ended)
        self.rang.set()


def test_a_forged_end_is_ignored_and_an_old_one_only_wakes_waiters(signed: System) -> None:
    ear = EndListener(connect(signed.settings.redis_url), signed.keys, ID)
    channel = signed.keys.done(ID)
    end = Ended(ID, "success", ONE)
    sign = signed.keys.signing.sign
    for forged in forgeries(signed, channel, encode([end])):
        signed.redis.publish(channel, forged)
    eventually(lambda: "refused" in quarantine_reasons(signed), "it is set aside")
    assert ear.heard == []
    signed.redis.publish(channel, sign(channel, encode([end]), int((time.time() - 100) * 1000)))
    signed.redis.publish(channel, sign(channel, encode([end]), int(time.time() * 1000)))
    eventually(lambda: len(ear.heard) == 2, "both are heard")
    assert ear.heard == [None, end], "the old one only rings"
    ear.announcements.close()


def test_rejected_messages_are_counted_but_seldom_logged(signed: System, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "orchestrator.signing"):
        for _ in range(100):
            with pytest.raises(Forged):
                signed.keys.signing.check("somewhere", b"\x90")
    assert signed.keys.signing.refused == 100
    assert len(caplog.records) == 1


# -- introduction of signing, and key rotation


def keys(*secrets: str, signing: str = "require") -> Keys:
    return Keys.of(Settings(signing=signing, signing_keys=",".join(secrets)))


def test_mode_sign_accepts_unsigned_messages_but_rejects_forged_ones() -> None:
    lenient = keys(SECRET, signing="sign").signing
    assert lenient.body("here", b"\x90") == b"\x90"
    assert keys(SECRET).signing.body("here", lenient.sign("here", b"\x90")) == b"\x90"
    with pytest.raises(Forged, match="is invalid"):
        lenient.body("there", lenient.sign("here", b"\x90"))


def test_a_process_without_keys_reads_signed_messages() -> None:
    assert PLAIN.signing.body("here", keys(SECRET).signing.sign("here", b"\x90")) == b"\x90"


def test_a_rotated_key_is_accepted_while_it_is_listed() -> None:
    old = keys(SECRET).signing.sign("here", b"\x90")
    assert keys(OTHER, SECRET).signing.body("here", old) == b"\x90"
    assert keys(SECRET, OTHER).signing.body("here", keys(OTHER, SECRET).signing.sign("here", b"\x90")) == b"\x90"
    with pytest.raises(Forged, match="not among signing_keys"):
        keys(OTHER).signing.body("here", old)


def test_keys_come_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{SECRET}\n{OTHER}\n")
    signing = Keys.of(Settings(signing_keys_file=str(path))).signing
    assert signing.body("here", keys(OTHER).signing.sign("here", b"\x90")) == b"\x90"


@pytest.mark.parametrize("given", ["short", "AAAA", SECRET + ",!!"])
def test_an_invalid_key_is_rejected_and_not_shown(given: str) -> None:
    with pytest.raises(ConfigurationError, match="signing_keys") as refused:
        keys(given)
    assert given not in str(refused.value)


def test_signing_keys_are_not_in_the_repr_of_settings() -> None:
    assert SECRET not in repr(Settings(signing_keys=SECRET))


def test_a_signed_announcement_carries_the_result(signed: System) -> None:
    worker = signed.worker()
    (handle,) = signed.dispatch()
    heard = EndListener(connect(signed.settings.redis_url), signed.keys, raw(handle))
    worker.succeed(*worker.take())
    signed.pass_seconds()
    eventually(lambda: heard.heard, "its end is announced")
    assert heard.heard[0] is not None
    assert heard.heard[0].result == ONE
    heard.announcements.close()
