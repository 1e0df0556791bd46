"""`orchestrator bridge celery`, with a real producer and a real worker of Celery."""

# ruff: noqa: E402  # Celery is importable only after `require_celery`

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.celery_packages import require_celery

require_celery()

from celery import chain, chord, group
from celery.exceptions import TaskRevokedError

from orchestrator.compat.bridge.transit import Transit
from orchestrator.errors import Unavailable
from orchestrator.sdk.backend.tasks import TaskBackend
from tests.acceptance.bridge_shop import CELERY_WARNINGS, WAIT, Shop, shop_fixture  # noqa: F401
from tests.waiting import eventually

pytestmark = CELERY_WARNINGS


@pytest.fixture
def running(shop: Shop) -> Shop:
    shop.stack.scheduler()
    shop.stack.worker("--app", "bridged:app")
    return shop


def test_celery_producers_get_the_results_of_bridged_tasks(running: Shop) -> None:
    running.bridge()
    when = datetime(2026, 11, 15, 12, tzinfo=UTC)

    assert running.send("add", 1, 2).get(timeout=WAIT) == 3
    assert running.send("year", when).get(timeout=WAIT) == when.replace(year=2000)
    failing = running.send("fail", retries=2)
    with pytest.raises(ZeroDivisionError, match="attempt 2"):  # two of its three retries were made by Celery
        failing.get(timeout=WAIT)
    assert "in fail" in failing.traceback
    with pytest.raises(TaskRevokedError):
        running.send("add", 1, 2, expires=datetime.now(UTC) - timedelta(1)).get(timeout=WAIT)
    eventually(lambda: not running.left(), "nothing is left on the way")


def test_chains_callbacks_and_chords_continue_through_the_bridge(running: Shop) -> None:
    running.bridge()
    add, total, note = (running.celery.signature(f"shop.{name}") for name in ("add", "total", "note"))

    assert chain(add.clone((1, 2)), add.clone((10,)), add.clone((100,))).apply_async().get(timeout=WAIT) == 113
    assert chord(group(add.clone((one, one)) for one in range(5)), total).apply_async().get(timeout=WAIT) == 20
    assert (add.clone((1, 1)) | group(add.clone((1,)), add.clone((2,))) | total).apply_async().get(timeout=WAIT) == 7
    running.send("note", "first", link=note).get(timeout=WAIT)
    eventually(lambda: running.journal() == ["ours first"] * 2, "the callback has run")
    failing = chain(running.celery.signature("shop.fail"), add.clone((1,))).apply_async()
    with pytest.raises(ZeroDivisionError):
        failing.get(timeout=WAIT)
    eventually(lambda: not running.left(), "nothing is left on the way")


@pytest.mark.parametrize("moment", ["Redis is away", "another bridge died"])
def test_a_chord_body_is_sent_after_an_interruption(
    running: Shop, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    add, total = running.celery.signature("shop.add"), running.celery.signature("shop.total")
    body = chord([add.clone((1, 1)), add.clone((2, 2))], total).apply_async()
    assert running.run("--once").exit_code == 0
    eventually(lambda: running.stack.scalar("SELECT count(*) FROM orchestrator.ended_tasks") == 2, "both have ended")
    follow_up, failed = Transit.follow_up, list[bytes]()

    def fail_once(transit: Transit, id: bytes, messages: Sequence[tuple[str, bytes]]) -> None:
        if messages and not failed:
            failed.append(id)
            raise RedisConnectionError("away")
        follow_up(transit, id, messages)

    if moment == "Redis is away":
        with monkeypatch.context() as patched:
            patched.setattr(Transit, "follow_up", fail_once)
            running.run("--back")
        assert failed
    else:
        claim = running.celery.backend.get_key_for_group(body.parent.id, ".c")
        running.celery.backend.client.set(claim, "until it expires")
    running.bridge()
    if moment == "another bridge died":
        eventually(lambda: body.parent.completed_count() == 2, "the results of the parts are written")
        running.celery.backend.client.delete(claim)

    assert body.get(timeout=WAIT) == 6
    eventually(lambda: not running.left(), "nothing is left on the way")


def test_tasks_with_changed_imports_see_celerys_id_and_retries(shop: Shop) -> None:
    shop.app = "bridged_import:app"
    shop.stack.scheduler()
    shop.stack.worker("--app", shop.app)
    shop.bridge()

    sent = shop.send("ask", retries=1, headers={"customer": "7"})

    assert sent.get(timeout=WAIT) == [sent.id, 2, "7"], "the first run here was tried again"
    with pytest.raises(KeyError, match="missing"):
        shop.send("miss").get(timeout=WAIT)
    values = [Decimal("1.10"), UUID(int=1), datetime(2026, 1, 2), [Decimal("2")]]
    names = ["Decimal", "UUID", "datetime", "list"]
    assert shop.send("kinds", *values).get(timeout=WAIT) == [names, *values]


def test_message_options_become_task_options(shop: Shop) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    shop.send("note", "urgent")
    shop.send("note", "minor", priority=9)
    shop.send("note", "later", eta=later, expires=later + timedelta(hours=1), time_limit=60, soft_time_limit=50)
    shop.send("note", "labelled", headers={"customer": "7"})

    assert shop.run("--once").exit_code == 0

    rows = shop.stack.sql(
        "SELECT seq, priority, wake_at, expires_at, options FROM orchestrator.tasks ORDER BY priority DESC, seq"
    )
    urgent, delayed, labelled, minor = rows
    assert [row[1] for row in rows] == [0, 0, 0, -9]
    assert urgent[2:] == (None, None, None)
    assert abs(delayed[2] - later) < timedelta(seconds=5)
    assert abs(delayed[3] - later - timedelta(hours=1)) < timedelta(seconds=5)
    assert (delayed[4]["timeout"], delayed[4]["soft_timeout"]) == (60, 50)
    assert labelled[4]["headers"] == {"customer": "7"}
    assert minor[0] == max(row[0] for row in rows), "lists of higher priority are taken first"


def test_unusable_messages_are_set_aside_and_returned_unchanged(shop: Shop) -> None:
    shop.send("note", "one")
    shop.send("unheard_of")
    shop.celery.send_task("shop.note", ("pickled",), serializer="pickle")
    shop.send("once")
    shop.send("once")
    shop.redis.lpush("celery", "no json", json.dumps({"body": "e30=", "headers": {}, "properties": {}}))
    before = shop.redis.lrange("celery", 0, -1)

    dry = shop.run("--dry-run", "--json")
    assert dry.exit_code == 0, dry.output
    found = json.loads(dry.stdout)["queues"]["celery"]
    assert (found["waiting"], found["would_move"], sum(found["would_stay"].values())) == (7, 3, 4)
    assert shop.redis.lrange("celery", 0, -1) == before

    moved = shop.run("--once")
    assert moved.stderr.count("bridge.put_aside queue=celery message=") == 5
    assert "no task is called 'shop.unheard_of'" in moved.stderr
    assert "but not pickle" in moved.stderr
    assert "already has the key" in moved.stderr
    assert shop.stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 2
    assert shop.redis.llen("celery") == 0

    shop.stack.scheduler()
    back = shop.run("--back")
    assert back.output.count("7 messages returned to Celery.") == 1, back.output
    assert sorted(shop.redis.lrange("celery", 0, -1)) == sorted(before), "as they were"
    assert not shop.left()
    assert shop.stack.sql("SELECT status FROM orchestrator.ended_tasks") == [("cancelled",)] * 2


def test_results_that_celery_cannot_store_keep_neither_the_bridge_nor_its_end(running: Shop) -> None:
    running.send("note", "odd")
    sent: Any = running.redis.rpop("celery")
    message = json.loads(sent)
    odd: list[dict[str, Any]] = [{"id": None}, {"id": 7}, {"id": "\ud800"}]
    for headers in odd:
        running.redis.lpush("celery", json.dumps({**message, "headers": {**message["headers"], **headers}}))
    body = [["odd"], {}, {"callbacks": "zz", "errbacks": None, "chain": 5, "chord": None}]
    encoded = base64.b64encode(json.dumps(body).encode()).decode()
    running.redis.lpush("celery", json.dumps({**message, "body": encoded}))
    last = running.send("note", "plain")
    process = running.bridge()
    assert last.get(timeout=WAIT) == "plain"
    eventually(lambda: len(running.journal()) == 5, "all have run")
    eventually(lambda: process.logged("bridge.result_refused", 4), "their results were refused")
    process.stop()
    assert "Waiting for the end" not in running.run("--back").stderr
    found = json.loads(running.run("--dry-run", "--json").stdout)["queues"]["celery"]
    assert (found["waiting"], found["open"], found["aside"]) == (0, 0, 0)
    assert len(running.journal()) == 5


def test_unstarted_tasks_return_to_celery_in_order(running: Shop) -> None:
    process = running.bridge()
    started = running.send("note", "started", 3)
    eventually(running.journal, "it runs")
    running.stack.output_of("queues", "pause", "default")
    late = datetime.now(UTC) + timedelta(hours=1)
    running.send("note", "later", eta=late)
    for number in range(20):
        running.send("note", str(number))
    running.send("note", "minor", priority=6)
    waiting_here = "SELECT count(*) FROM orchestrator.tasks WHERE status <> 'running'"
    eventually(lambda: running.stack.scalar(waiting_here) == 22, "all others are here")
    assert "Another bridge of queue celery runs" in running.run("--back").stderr
    process.stop()

    assert "22 messages returned" in running.run("--back").stdout
    assert started.get(timeout=WAIT) == "started"
    waiting = [json.loads(one)["headers"] for one in reversed(running.redis.lrange("celery", 0, -1))]
    assert [one["argsrepr"] for one in waiting] == ["('later',)", *(f"('{number}',)" for number in range(20))]
    assert datetime.fromisoformat(waiting[0]["eta"]) == late
    assert running.redis.llen("celery\x06\x166") == 1

    running.worker()
    eventually(lambda: len(running.journal()) == 22, "Celery does the others")


@pytest.mark.parametrize("moment", ["after taking", "after enqueueing"])
def test_messages_of_a_dead_bridge_are_moved_by_the_next_bridge(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    for number in range(5):
        shop.send("note", str(number))

    def die(*_: object) -> None:
        raise SystemExit(137)

    with monkeypatch.context() as patched:
        is_early = moment == "after taking"
        patched.setattr(TaskBackend if is_early else Transit, "enqueue_missing" if is_early else "confirm", die)
        assert shop.run("--once").exit_code == 137
    assert shop.redis.llen("celery") == 0
    assert shop.stack.scalar("SELECT count(*) FROM orchestrator.tasks") == (0 if moment == "after taking" else 5)
    shop.redis.zadd("orchestrator:bridge:celery:bridges", dict.fromkeys(bridges(shop), 1))  # ten seconds later

    assert shop.run("--once").exit_code == 0
    assert shop.stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 5
    assert shop.redis.hlen("orchestrator:bridge:celery:open") == 5
    assert shop.redis.keys("*:taken:*") == []


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (TaskBackend, "enqueue_missing", Unavailable("Postgres is away")),
        (Transit, "take", RedisConnectionError("away")),
        (Transit, "confirm", RedisConnectionError("away")),
    ],
)
def test_a_bridge_keeps_its_messages_during_an_outage(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: Exception
) -> None:
    for number in range(5):
        shop.send("note", str(number))
    work, failed = getattr(owner, name), list[str]()

    def fail_once(*arguments: Any) -> Any:
        if failed:
            return work(*arguments)
        failed.append(name)
        if name == "take":  # only its answer is lost
            work(*arguments)
        raise error

    monkeypatch.setattr(owner, name, fail_once)

    assert shop.run("--once").exit_code == 0
    assert shop.stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 5
    assert shop.redis.hlen("orchestrator:bridge:celery:open") == 5
    assert shop.redis.keys("*:taken:*") == []


def bridges(shop: Shop) -> list[bytes]:
    found: Any = shop.redis.zrange("orchestrator:bridge:celery:bridges", 0, -1)
    return list(found)


def test_a_bridge_writes_the_results_of_tasks_that_ended_before(running: Shop) -> None:
    sent = running.send("add", 2, 3)
    assert running.run("--once").exit_code == 0
    eventually(lambda: running.stack.scalar("SELECT count(*) FROM orchestrator.ended_tasks"), "it has ended")
    assert sent.state == "PENDING"

    running.bridge()
    assert sent.get(timeout=WAIT) == 5


def test_another_bridge_writes_the_results_of_a_stopped_bridge(running: Shop) -> None:
    both = [running.bridge(), running.bridge()]
    sent = running.send("note", "slow", 2)
    eventually(running.journal, "it runs")
    mover = eventually(lambda: next((one for one in both if one.logged("bridge.moved")), None), "one has moved it")
    mover.stop()

    assert sent.get(timeout=WAIT) == "slow"


def test_messages_of_dead_celery_workers_are_moved_on_request(shop: Shop) -> None:
    shop.send("note", "slow", 60)
    shop.worker()
    eventually(lambda: shop.journal() == ["celery slow"], "a worker of Celery has it")
    shop.kill_workers()

    assert "1 message reserved by workers of Celery" in shop.run("--dry-run").stdout
    assert shop.run("--once", "--restore-after", "3600").exit_code == 0
    assert shop.stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 0
    assert shop.run("--once", "--restore-after", "0").exit_code == 0
    assert shop.stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 1


def test_a_wrong_broker_is_reported_without_its_password(shop: Shop) -> None:
    rabbit = shop.stack.command("bridge", "celery", "--broker", "amqp://old")
    missing = shop.stack.command("bridge", "celery")
    away = shop.stack.command("bridge", "celery", "--broker", "redis://:hunter2@127.0.0.1:1/0")

    assert "not from amqp" in rabbit.stderr
    assert "use --broker" in missing.stderr
    assert "127.0.0.1:1" in away.stderr
    assert "hunter2" not in away.stderr
    assert {rabbit.exit_code, missing.exit_code, away.exit_code} == {1}
