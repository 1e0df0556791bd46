"""Through the bridge, Celery producers get the answers that a Celery worker would give."""

# ruff: noqa: E402  # Celery is importable only after `require_celery`

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.celery_packages import require_celery

require_celery()

from celery import chain, chord, group
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded
from kombu.exceptions import EncodeError

from tests.acceptance.bridge_shop import CELERY_WARNINGS, WAIT, Shop, shop_fixture  # noqa: F401
from tests.waiting import eventually

pytestmark = CELERY_WARNINGS


@pytest.fixture
def moved(shop: Shop) -> Shop:
    """A shop whose tasks have changed their import, with a scheduler and a worker."""
    shop.app = "bridged_import:app"
    shop.stack.scheduler()
    shop.stack.worker("--app", shop.app)
    return shop


def signature(shop: Shop, name: str, *args: Any, **options: Any) -> Any:
    return shop.celery.signature(f"shop.{name}", args, **options)


def test_one_bridge_serves_thirty_queues(moved: Shop) -> None:
    queues = [f"queue{number}" for number in range(30)]
    bridge = moved.bridge(*(word for queue in queues for word in ("--queue", queue)))

    def has_beaten_since(last: float) -> bool:
        return beat() > last + 3

    def beat() -> float:
        found: Any = moved.redis.zrange("orchestrator:bridge:queue29:bridges", 0, -1, withscores=True)
        return float(found[0][1])

    for _ in range(2):
        sent = [moved.send("add", number, 1, queue=queue, priority=number % 10) for number, queue in enumerate(queues)]
        assert [one.get(timeout=WAIT) for one in sent] == [number + 1 for number in range(30)]
        eventually(partial(has_beaten_since, beat()), "the bridge waits for messages, and lives")

    bridge.stop()
    assert bridge.logged("bridge.stopped moved=60")
    assert not bridge.logged("service.unavailable")


def test_the_body_of_a_chord_may_be_a_composition(moved: Shop) -> None:
    moved.bridge()
    header = [signature(moved, "add", 1, 1), signature(moved, "add", 2, 2)]
    total, plus = signature(moved, "total"), signature(moved, "add", 1)

    assert chord(header, chain(total, plus)).apply_async().get(timeout=WAIT) == 7
    assert chord(header, chain(total, plus, group(plus, plus.clone()))).apply_async().get(timeout=WAIT) == [8, 8]
    assert chord(header, group(total, total.clone())).apply_async().get(timeout=WAIT) == [6, 6]
    assert chord(header, chord([total, total.clone()], total)).apply_async().get(timeout=WAIT) == 12
    eventually(lambda: not moved.left(), "nothing is left on the way")


def test_a_replaced_task_has_the_result_of_its_replacement(moved: Shop) -> None:
    moved.bridge()

    assert moved.send("factorial", 5).get(timeout=WAIT) == 120
    assert chain(signature(moved, "factorial", 3), signature(moved, "add", 1)).apply_async().get(timeout=WAIT) == 7
    assert moved.send("replace_by_chain", 1).get(timeout=WAIT) == 4
    with pytest.raises(KeyError, match="missing"):
        moved.send("replace_by_failure").get(timeout=WAIT)


def has_state(result: Any, state: str) -> bool:
    return bool(result.state == state)


def test_an_ignored_task_keeps_the_state_that_it_set(moved: Shop) -> None:
    moved.bridge()

    for state in ("CUSTOM", "FAILURE"):
        ignored = chain(signature(moved, "ignore", state), signature(moved, "note", "after")).apply_async().parent
        eventually(partial(has_state, ignored, state), "the state is written")
        assert ignored.backend.get_task_meta(ignored.id)["result"] != {}
    silent = moved.send("ignore")
    eventually(lambda: not moved.left(), "nothing is left on the way")
    assert silent.state == "PENDING"
    assert moved.journal() == [], "nothing follows"


def test_errbacks_get_the_arguments_that_celery_passes(moved: Shop) -> None:
    moved.bridge()
    miss, add, total = signature(moved, "miss"), signature(moved, "add", 1, 1), signature(moved, "total")

    failing = moved.send("miss", link_error=[signature(moved, name) for name in ("by_error", "by_id", "by_bound")])
    eventually(lambda: len(moved.journal()) == 3, "all errbacks have run")
    assert sorted(moved.journal()) == [
        f"by_bound {failing.id}",
        f"by_error {failing.id} shop.miss KeyError('missing') True",
        f"by_id {failing.id}",
    ]
    body = chord([add, miss], total.on_error(signature(moved, "by_error"))).apply_async()
    eventually(lambda: len(moved.journal()) == 4, "the errback of the chord has run")
    assert moved.journal()[-1].startswith(f"by_error {body.id} shop.total ChordError(")
    eventually(lambda: not moved.left(), "nothing is left on the way")


def test_a_native_errback_gets_id_name_and_error(shop: Shop) -> None:
    shop.stack.scheduler()
    shop.stack.worker("--app", shop.app)
    shop.bridge("--task", "shop.old_errback=shop.on_error")

    failing = shop.send("fail", retries=3, link_error=signature(shop, "old_errback"))
    eventually(shop.journal, "the errback has run")
    assert shop.journal() == [f"ours {failing.id} shop.fail ZeroDivisionError('attempt 1')"]


def test_an_invalid_call_is_answered_with_its_error(moved: Shop) -> None:
    moved.bridge()

    failing = chain(signature(moved, "add", 1, 2, 3), signature(moved, "add", 1)).apply_async()
    for result in (failing.parent, failing):
        with pytest.raises(TypeError, match="too many positional arguments"):
            result.get(timeout=WAIT)
    with pytest.raises(EncodeError, match="cannot be serialised"):
        moved.send("add", 1, 2**70).get(timeout=WAIT)
    eventually(lambda: not moved.left(), "nothing is left on the way")

    unanswered = moved.send("add", 1, 2, 3, ignore_result=True)
    aside = "orchestrator:bridge:celery:aside"
    eventually(lambda: moved.redis.hlen(aside) == 1, "nobody waits for it")
    assert unanswered.state == "PENDING"


def test_time_limits_raise_celerys_exceptions(moved: Shop) -> None:
    moved.bridge()

    with pytest.raises(SoftTimeLimitExceeded):
        moved.send("sleep", 20, soft_time_limit=1, time_limit=19).get(timeout=WAIT)
    with pytest.raises(TimeLimitExceeded):
        moved.send("sleep", 20, time_limit=1).get(timeout=WAIT)
