"""Somebody can write to Redis, and has no key: nobody acts on what they write, and nobody counts it.

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
    """Everything signs, and asks for signatures."""
    with fresh_system(engine, database_url, redis_url, signing_keys=SECRET) as system:
        yield system


def entries(system: System, stream: str) -> list[tuple[bytes, dict[Any, Any]]]:
    found: Any = system.redis.xrange(stream)
    return list(found)


def reasons(system: System) -> str:
    return " ".join(fields[b"error"].decode() for fields in system.quarantine())


def forgeries(system: System, place: str, body: bytes) -> Iterator[bytes]:
    """Unsigned, signed with another key, altered, and genuine but made for another place."""
    yield body
    yield THEIRS.signing.sign(place, body)
    genuine = system.keys.signing.sign(place, body)
    yield genuine[:-1] + bytes([genuine[-1] ^ 1])
    yield system.keys.signing.sign(f"{place}x", body)


def works(system: System) -> None:
    """Take a task from its enqueue to its end."""
    worker = system.workers[0] if system.workers else system.worker()
    handle = system.job.enqueue(1)
    system.pass_seconds()
    worker.succeed(*worker.take())
    system.pass_seconds()
    assert handle.status() == "success"


def test_signed_work_is_done(signed: System) -> None:
    works(signed)
    assert signed.quarantine() == []
    stream = signed.keys.events(signed.generation)
    assert all(fields[b"d"].startswith(b"\xc1") for _, fields in entries(signed, stream))


def test_a_forged_report_counts_for_nothing(signed: System) -> None:
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
        assert words in reasons(signed)
    worker.succeed(task)
    signed.pass_seconds()
    assert handle.result(0) == 1


def test_a_forged_dispatch_is_run_by_nobody_and_nothing_waits_for_it(signed: System) -> None:
    worker = signed.worker()
    works(signed)
    stream = signed.keys.queue(signed.generation, "default")
    body = encode([Dispatch(ID, 1, "job", encode(((), {})), "default")])
    for forged in forgeries(signed, stream, body):
        signed.redis.xadd(stream, {"d": forged})
    assert worker.take() == []
    assert len(signed.quarantine()) == 4
    assert signed.redis.xlen(stream) == 0
    works(signed)


def test_a_dispatch_that_was_altered_is_handed_out_again(signed: System) -> None:
    worker = signed.worker()
    (handle,) = signed.dispatch()
    stream = signed.keys.queue(signed.generation, "default")
    ((entry, fields),) = entries(signed, stream)
    signed.redis.xdel(stream, entry)
    signed.redis.xadd(stream, {"d": fields[b"d"].replace(b"job", b"jab")})
    assert worker.take() == []
    signed.make_old()
    signed.tick_until(lambda: worker.succeed(*worker.take()) or handle.status() == "success")


def test_a_forged_dispatch_does_not_hide_that_the_genuine_one_is_gone(signed: System) -> None:
    worker = signed.worker()
    (handle,) = signed.dispatch()
    stream = signed.keys.queue(signed.generation, "default")
    ((entry, fields),) = entries(signed, stream)
    signed.redis.xdel(stream, entry)
    signed.redis.xadd(stream, {"d": OFF.body("", fields[b"d"])})
    signed.make_old()
    signed.tick_until(lambda: len(signed.messages()) > 1)
    signed.tick_until(lambda: worker.succeed(*worker.take()) or handle.status() == "success")


def test_a_dispatch_is_taken_once_by_a_process(signed: System) -> None:
    worker = signed.worker()
    signed.dispatch()
    stream = signed.keys.queue(signed.generation, "default")
    ((_, fields),) = entries(signed, stream)
    worker.succeed(*worker.take())
    signed.redis.xadd(stream, fields)
    assert worker.take() == []
    assert "received before" in reasons(signed)


def test_a_dispatch_to_one_worker_is_none_to_another(signed: System) -> None:
    worker = signed.worker()
    signed.dispatch()
    worker.join()
    stream = signed.keys.queue(signed.generation, "default")
    ((_, fields),) = entries(signed, stream)
    signed.redis.xadd(signed.keys.queue(signed.generation, "@w1"), fields)
    assert len(worker.take()) == 1, "that of the queue"
    assert "a different place" in reasons(signed)


def test_forged_and_repeated_orders_are_not_obeyed(signed: System) -> None:
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
    assert "received before" in reasons(signed)


def test_an_order_of_long_ago_is_not_obeyed(signed: System) -> None:
    worker = signed.worker()
    place = signed.keys.orders("w1")
    kept = signed.keys.signing.sign(place, encode(Order(go_on=True)), 1)
    for _ in range(70):
        worker.beat()
    signed.redis.xadd(place, {"d": kept})
    assert worker.orders() == []
    assert "too old" in reasons(signed)


def test_a_forged_heartbeat_is_nobodys(signed: System) -> None:
    place = signed.keys.worker("stranger")
    beat = Heartbeat("stranger", "host", 1, ["default"], 10, names_digest(["job"]), "", 1.0, number=1)
    signed.redis.sadd(signed.keys.workers, "stranger")
    for forged in forgeries(signed, place, encode(beat)):
        signed.redis.set(place, forged)
        signed.pass_seconds()
        assert "stranger" not in signed.scheduler.term.fleet.beats
    assert len(signed.quarantine()) == 4
    works(signed)


def test_forged_names_are_not_known(signed: System) -> None:
    signed.redis.set(signed.keys.names("digest"), encode(["job"]))
    assert LeaderStreams(signed.redis, signed.keys).fleet.names("digest") is None


def test_nobody_else_says_that_a_worker_has_ended_in_order(signed: System) -> None:
    signed.pass_seconds()
    signed.redis.xadd(signed.keys.nudges, {"fleet": b"", "stopped": encode(["w1"])})
    leader = LeaderStreams(signed.redis, signed.keys)
    assert leader.read(signed.generation, "0-0", 10, 0.0).stopped == []
    WorkerStreams(signed.redis, signed.keys).deregister(["w2"], ["w2"])
    assert leader.read(signed.generation, "0-0", 10, 0.0).stopped == ["w2"]
    leader.close()


def test_a_worker_keeps_its_reports_whatever_somebody_says_was_applied(signed: System) -> None:
    signed.pass_seconds()
    streams = WorkerStreams(signed.redis, signed.keys)
    applied = encode(Applied(signed.generation, "9-9"))
    for forged in forgeries(signed, signed.keys.applied, applied):
        signed.redis.set(signed.keys.applied, forged)
        assert streams.flush(signed.generation, None, {}).applied is None
    signed.redis.set(signed.keys.applied, signed.keys.signing.sign(signed.keys.applied, applied))
    assert streams.flush(signed.generation, None, {}).applied == Applied(signed.generation, "9-9")


def test_a_forged_page_of_a_history_is_shown_to_no_code(signed: System) -> None:
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


def test_a_forged_key_holder_is_none(signed: System) -> None:
    streams = WorkerStreams(signed.redis, signed.keys)
    holder = KeyHolder(time_ordered_id(6, bytes(10)))
    signed.redis.set(signed.keys.key_holder(ID), encode(holder))
    assert streams.key_holders([ID]) == {}
    LeaderStreams(signed.redis, signed.keys).publish_key_holders({ID: holder})
    assert streams.key_holders([ID]) == {ID: holder}


def test_what_a_task_never_said_is_not_shown(signed: System) -> None:
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


class Ear:
    """Somebody who waits for the end of a task."""

    def __init__(self, redis: Redis, keys: Keys, task: bytes) -> None:
        self.heard: list[Ended | None] = []
        self.rang = threading.Event()
        self.announcements = Announcements(redis, keys)
        self.announcements.listen(task, self.wake)  # which waits for the subscription, but not for long
        eventually(lambda: redis.pubsub_numsub(keys.done(task))[0][1], "the subscription stands")

    def wake(self, ended: Ended | None) -> None:
        self.heard.append(ended)
        self.rang.set()


def test_a_forged_end_is_told_to_nobody_and_an_old_one_is_looked_up(signed: System) -> None:
    ear = Ear(connect(signed.settings.redis_url), signed.keys, ID)
    channel = signed.keys.done(ID)
    end = Ended(ID, "success", ONE)
    sign = signed.keys.signing.sign
    for forged in forgeries(signed, channel, encode([end])):
        signed.redis.publish(channel, forged)
    eventually(lambda: "refused" in reasons(signed), "it is set aside")
    assert ear.heard == []
    signed.redis.publish(channel, sign(channel, encode([end]), int((time.time() - 100) * 1000)))
    signed.redis.publish(channel, sign(channel, encode([end]), int(time.time() * 1000)))
    eventually(lambda: len(ear.heard) == 2, "both are heard")
    assert ear.heard == [None, end], "the old one only rings"
    ear.announcements.close()


def test_refusals_are_counted_and_logged_now_and_then(signed: System, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "orchestrator.signing"):
        for _ in range(100):
            with pytest.raises(Forged):
                signed.keys.signing.check("somewhere", b"\x90")
    assert signed.keys.signing.refused == 100
    assert len(caplog.records) == 1


# -- how it is introduced, and how keys change


def keys(*secrets: str, signing: str = "require") -> Keys:
    return Keys.of(Settings(signing=signing, signing_keys=",".join(secrets)))


def test_while_it_is_introduced_unsigned_messages_are_taken_and_forged_ones_are_not() -> None:
    lenient = keys(SECRET, signing="sign").signing
    assert lenient.body("here", b"\x90") == b"\x90"
    assert keys(SECRET).signing.body("here", lenient.sign("here", b"\x90")) == b"\x90"
    with pytest.raises(Forged, match="is invalid"):
        lenient.body("there", lenient.sign("here", b"\x90"))


def test_a_process_without_keys_reads_what_is_signed() -> None:
    assert PLAIN.signing.body("here", keys(SECRET).signing.sign("here", b"\x90")) == b"\x90"


def test_a_rotated_key_is_believed_as_long_as_it_is_listed() -> None:
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
def test_what_is_no_key_is_refused_and_not_shown(given: str) -> None:
    with pytest.raises(ConfigurationError, match="signing_keys") as refused:
        keys(given)
    assert given not in str(refused.value)


def test_secrets_are_not_shown() -> None:
    assert SECRET not in repr(Settings(signing_keys=SECRET))


def test_waiting_for_a_result_works_signed(signed: System) -> None:
    worker = signed.worker()
    (handle,) = signed.dispatch()
    heard = Ear(connect(signed.settings.redis_url), signed.keys, raw(handle))
    worker.succeed(*worker.take())
    signed.pass_seconds()
    eventually(lambda: heard.heard, "its end is announced")
    assert heard.heard[0] is not None
    assert heard.heard[0].result == ONE
    heard.announcements.close()
