"""Unique and idempotency keys: one task at a time, whichever client enqueues, and whatever transactions are open."""

from __future__ import annotations

import math
import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator import Duplicate, Handle, InvalidTask
from orchestrator.domain.tasks.task import Enqueued, KeyHolder, NewTask, Succeeded, UniqueKey
from orchestrator.store.tasks import unique as store
from tests.integration.stage import KEYS, ONE, System, raw


def keys(system: System) -> list[str]:
    return [row["key"] for row in system.sql("SELECT key FROM orchestrator.unique_keys ORDER BY key")]


def unique(system: System, **options: Any) -> Any:
    return system.job.options(unique_key="k", **options)


# -- scopes


def test_a_unique_key_is_held_until_the_task_ends(system: System) -> None:
    worker = system.worker()
    first = unique(system).enqueue(1)
    assert unique(system).enqueue(2) == first
    system.pass_seconds()
    (task,) = worker.take()
    worker.start(task)
    system.tick()
    assert unique(system).enqueue(3) == first
    worker.succeed(task)
    system.tick()
    assert keys(system) == []
    assert unique(system).enqueue(4) != first


def test_unique_for_pending_releases_the_key_at_dispatch(system: System) -> None:
    worker = system.worker()
    first = unique(system, unique_for="pending").enqueue(1)
    assert unique(system, unique_for="pending").enqueue(2) == first
    system.pass_seconds()
    (task,) = worker.take()
    second = unique(system, unique_for="pending").enqueue(3)
    assert second != first
    worker.succeed(task)
    system.tick()
    assert first.status() == "success"
    assert system.states(second) == ["dispatched"]


def test_unique_for_a_period_outlasts_the_task(system: System) -> None:
    worker = system.worker()
    options: dict[str, Any] = {"unique_for": timedelta(hours=1)}
    first = unique(system, **options).enqueue(1)
    system.pass_seconds()
    worker.succeed(*worker.take())
    system.tick()
    assert first.status() == "success"
    assert unique(system, **options).enqueue(2) == first
    system.sql("UPDATE orchestrator.unique_keys SET until = now() - interval '1 second'")
    assert unique(system, **options).enqueue(3) != first
    assert len(keys(system)) == 1


def test_cancelled_and_failed_tasks_release_their_key(system: System) -> None:
    worker = system.worker()
    first = unique(system).enqueue(1)
    first.cancel()
    system.pass_seconds()
    second = unique(system).enqueue(2)
    assert second != first
    system.pass_seconds()
    worker.fail(*worker.take())
    system.tick()
    assert second.status() == "failed"
    assert keys(system) == []


def test_a_retry_keeps_the_key_but_a_manual_retry_may_lose_it(system: System) -> None:
    worker = system.worker()
    first = unique(system, retries=1).enqueue(1)
    system.pass_seconds()
    worker.fail(*worker.take())
    system.tick()
    assert first.status() == "pending"
    assert unique(system).enqueue(2) == first
    first.cancel()
    system.pass_seconds()
    failed = unique(system).enqueue(3)
    system.pass_seconds()
    worker.fail(*worker.take())
    system.tick()
    other = unique(system).enqueue(4)
    with pytest.raises(Duplicate, match=f"Cannot retry task {failed.id}: task {other.id} has its key") as caught:
        failed.retry()
    assert caught.value.task_id == other.id
    system.pass_seconds()
    assert system.states(failed, other) == ["failed", "dispatched"]


# -- manual retries


def failed(system: System, **options: Any) -> Handle[Any]:
    """Return a failed task that had the key."""
    handle: Handle[Any] = unique(system, **options).enqueue(0)
    (worker,) = system.workers or [system.worker()]
    system.pass_seconds()
    worker.fail(*worker.take())
    system.tick()
    assert handle.status() == "failed"
    return handle


@pytest.mark.parametrize("scope", ["pending", "running"])
def test_a_retried_task_takes_its_key_again(system: System, scope: str) -> None:
    first = failed(system, unique_for=scope)
    assert keys(system) == []
    system.app.queue("default").pause()
    first.retry()
    system.pass_seconds()
    assert unique(system).enqueue(1) == first
    system.app.queue("default").resume()
    system.pass_seconds()
    (task,) = system.workers[0].take()
    assert keys(system) == ([] if scope == "pending" else ["unique:job:k"])
    system.workers[0].succeed(task)
    system.tick()
    assert (first.status(), keys(system)) == ("success", [])


def test_a_retry_does_not_restart_the_period_of_a_key(system: System) -> None:
    first = failed(system, unique_for=timedelta(hours=1))
    until = system.sql("SELECT until FROM orchestrator.unique_keys")
    first.retry()
    system.pass_seconds()
    assert system.sql("SELECT until FROM orchestrator.unique_keys") == until
    assert system.states(first) == ["dispatched"]


def test_an_expired_key_does_not_prevent_a_retry(system: System) -> None:
    first = failed(system)
    unique(system, unique_for=30.0).enqueue(1)
    system.sql("UPDATE orchestrator.unique_keys SET until = now() - interval '1 second'")
    first.retry()
    system.pass_seconds()
    assert system.sql("SELECT scope, task_id::text FROM orchestrator.unique_keys") == [
        {"scope": "running", "task_id": first.id}
    ]


@pytest.mark.parametrize("scope", ["pending", "running"])
def test_who_enqueues_before_a_retry_is_applied_gets_the_retried_task(system: System, scope: str) -> None:
    first = failed(system, unique_for=scope)
    first.retry()
    assert unique(system, unique_for=scope).enqueue(1) == first
    system.pass_seconds()
    system.workers[0].succeed(*system.workers[0].take())
    system.tick()
    assert (first.status(), keys(system)) == ("success", [])


def test_a_retry_that_is_not_applied_frees_the_key(system: System) -> None:
    first = failed(system)
    first.retry()
    system.sql("UPDATE orchestrator.inbox SET body = body || '{\"attempt\": 7}'")
    system.pass_seconds()
    assert (first.status(), keys(system)) == ("failed", [])


def test_a_retry_whose_key_another_task_has_by_now_is_logged(system: System, caplog: pytest.LogCaptureFixture) -> None:
    """A client of an earlier release asks without taking the key."""
    first = failed(system)
    first.retry()
    system.sql("DELETE FROM orchestrator.unique_keys")
    other = unique(system).enqueue(1)
    system.pass_seconds()
    assert system.states(first, other) == ["failed", "dispatched"]
    assert f"task.not_retried holder={other.id}" in caplog.text


def test_the_first_of_two_retries_takes_the_key(system: System) -> None:
    first, second = failed(system), failed(system)
    first.retry()
    with pytest.raises(Duplicate, match=f"Cannot retry task {second.id}: task {first.id} has its key") as caught:
        second.retry()
    assert caught.value.task_id == first.id
    system.pass_seconds()
    assert system.states(first, second) == ["dispatched", "failed"]
    assert keys(system) == ["unique:job:k"]


def test_of_concurrent_retries_with_the_same_key_only_one_succeeds(system: System) -> None:
    handles = [failed(system) for _ in range(6)]
    start, refused = threading.Barrier(len(handles)), []

    def retry(handle: Handle[Any]) -> None:
        start.wait()
        try:
            handle.retry()
        except Duplicate:
            refused.append(handle)

    threads = [threading.Thread(target=retry, args=[handle]) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == len(handles) - 1
    system.pass_seconds()
    assert system.states(*refused) == ["failed"] * len(refused)
    assert system.states(*(set(handles) - set(refused))) == ["dispatched"]


def test_tasks_whose_key_periods_have_expired_are_both_retried(system: System) -> None:
    first = failed(system, unique_for=30.0)
    system.sql("UPDATE orchestrator.unique_keys SET until = now() - interval '1 second'")
    second = failed(system, unique_for=30.0)
    system.sql("UPDATE orchestrator.unique_keys SET until = now() - interval '1 second'")
    first.retry()
    second.retry()
    system.pass_seconds()
    assert system.states(first, second) == ["dispatched", "dispatched"]


def test_a_bulk_retry_retries_one_task_for_each_key(system: System) -> None:
    handles = [failed(system) for _ in range(3)]
    assert system.app.retry_failed(name="job") == 1
    system.pass_seconds(2)
    assert sorted(system.states(*handles)) == ["dispatched", "failed", "failed"]
    assert system.count("inbox") == 0


@pytest.mark.parametrize("committed", [False, True])
def test_a_retry_waits_for_an_open_transaction_that_takes_its_key(
    system: System, engine: Engine, caplog: pytest.LogCaptureFixture, committed: bool
) -> None:
    first = failed(system)
    with engine.connect() as connection:
        transaction = connection.begin()
        other = unique(system).enqueue_in(connection, 1)
        first.retry()
        system.app.retry_failed(name="job")
        system.pass_seconds(2)
        assert system.sql("SELECT status FROM orchestrator.ended_tasks") == [{"status": "failed"}]
        assert system.count("inbox") == 2
        transaction.commit() if committed else transaction.rollback()
    system.pass_seconds(2)
    assert system.count("inbox") == 0
    assert system.states(first) == (["failed"] if committed else ["dispatched"])
    assert (f"task.not_retried holder={other.id}" in caplog.text) is committed
    assert [row["id"].bytes for row in system.sql("SELECT id FROM orchestrator.tasks")] == [
        raw(other if committed else first)
    ]


# -- policies


def test_policy_raise_names_the_task_that_holds_the_key(system: System) -> None:
    first = unique(system).enqueue(1)
    with pytest.raises(Duplicate, match="already has the key") as caught:
        unique(system, on_duplicate="raise").enqueue(2)
    assert caught.value.task_id == first.id
    assert system.count("tasks") == 1


def test_policy_replace_changes_the_arguments_of_a_waiting_task(system: System) -> None:
    worker = system.worker(slots=1)
    first = unique(system, delay=3600).enqueue(1)
    assert unique(system, on_duplicate="replace").enqueue(2) == first
    system.pass_seconds()
    (task,) = worker.take()
    assert task.payload == system.job._new((2,), {}).payload
    with pytest.raises(Duplicate, match="is no longer waiting, so its arguments cannot be replaced") as caught:
        unique(system, on_duplicate="replace").enqueue(3)
    assert caught.value.task_id == first.id
    worker.succeed(task)
    system.tick()
    assert (first.status(), system.count("tasks")) == ("success", 0)


def test_replacing_a_task_claimed_meanwhile_creates_a_new_task(system: System) -> None:
    worker = system.worker()
    options: dict[str, Any] = {"unique_for": "pending", "on_duplicate": "replace"}
    first = unique(system, **options).enqueue(1)
    system.pass_seconds()
    worker.take()
    assert unique(system, **options).enqueue(2) != first


def test_a_concurrent_claim_and_replacement_lose_no_arguments(system: System, engine: Engine) -> None:
    """The leader may read the row before it is replaced and write afterwards; then the task is claimed a tick later."""
    worker = system.worker()
    first = unique(system).enqueue(1)
    accepted = 1
    with pytest.raises(Duplicate):  # after the claim
        for number in range(2, 30):
            unique(system, on_duplicate="replace").enqueue(number)
            accepted = number
            system.tick()
    system.pass_seconds()
    (task,) = worker.take()
    assert (task.id, task.payload) == (raw(first), system.job._new((accepted,), {}).payload)
    assert system.count("tasks") == 1
    del engine


# -- names and computed keys


def test_keys_of_different_tasks_are_independent(system: System) -> None:
    other = system.app.task(name="other", unique_key=lambda customer, **_: f"c{customer}")(lambda customer: customer)
    first, second = unique(system).enqueue(1), other.enqueue(7)
    assert other.enqueue(7) == second
    assert other.enqueue(8) != second
    assert keys(system) == ["unique:job:k", "unique:other:c7", "unique:other:c8"]
    assert first.id != second.id


def _with(option: str, value: str) -> Any:
    return {option: value}


@pytest.mark.parametrize("option", ["unique_key", "idempotency_key"])
def test_names_and_keys_with_colons_do_not_collide(system: System, option: str) -> None:
    short, long = (system.app.task(name=name)(lambda: None) for name in ("a", "a:b"))
    first = short.options(**_with(option, "b:c")).enqueue()
    second = long.options(**_with(option, "c")).enqueue()
    assert second != first
    assert long.options(**_with(option, "c")).enqueue() == second
    long.options(unique_key="d").enqueue()
    with pytest.raises(Duplicate, match="the key 'd'"):
        long.options(unique_key="d", on_duplicate="raise").enqueue()


def test_an_idempotency_key_returns_the_task_even_after_its_end(system: System) -> None:
    worker = system.worker()
    task = system.job.options(idempotency_key="order-1")
    first = task.enqueue(1)
    system.pass_seconds()
    worker.succeed(*worker.take())
    system.tick()
    again = task.enqueue(1)
    assert again == first
    assert again.result(timeout=5) == 1


def test_an_ended_task_with_a_lasting_key_cannot_be_replaced(system: System) -> None:
    worker = system.worker()
    options: dict[str, Any] = {"unique_for": 60, "on_duplicate": "replace"}
    first = unique(system, **options).enqueue(1)
    system.pass_seconds()
    worker.succeed(*worker.take())
    system.tick()
    with pytest.raises(Duplicate) as caught:
        unique(system, **options).enqueue(2)
    assert caught.value.task_id == first.id


def test_a_held_task_can_be_replaced(system: System) -> None:
    """No live worker knows the task, so it waits."""
    first = unique(system).enqueue(1)
    system.sql("UPDATE orchestrator.tasks SET hold = 'unknown'")
    assert unique(system, on_duplicate="replace").enqueue(2) == first
    assert bytes(system.row(first)["payload"]) == system.job._new((2,), {}).payload


def test_an_idempotency_key_with_other_arguments_is_rejected(system: System, engine: Engine) -> None:
    task = system.app.task(name="charge", idempotency_key="order-1")(lambda amount, note=None: (amount, note))
    first = task.enqueue(90, {"b": 1, "a": [1]})
    assert task.enqueue(note={"a": [1], "b": 1}, amount=90) == first
    for call in ((91, {"b": 1, "a": [1]}), (90,), (90, {"b": 1, "a": [2]})):
        with pytest.raises(Duplicate, match="other arguments; this task was not enqueued") as caught:
            task.enqueue(*call)
        assert caught.value.task_id == first.id
    with engine.begin() as connection, pytest.raises(Duplicate, match="other arguments"):
        task.enqueue_in(connection, 1)
    with pytest.raises(Duplicate, match="Two of these tasks have the key 'new'"):
        system.app.enqueue_many(task.options(idempotency_key="new"), [(1,), (2,)])
    assert system.count("tasks") == 1


@pytest.mark.parametrize("one", [1, {"a": [1]}, {1: "a"}, 0])
@pytest.mark.parametrize("kind", [bool, float])
def test_equal_numbers_of_another_type_are_other_arguments(system: System, one: Any, kind: type) -> None:
    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {changed(key): changed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [changed(item) for item in value]
        return value if isinstance(value, str) else kind(value)

    task = system.app.task(name="charge", idempotency_key="order-1")(lambda amount: amount)
    first = task.enqueue(one)
    with pytest.raises(Duplicate, match="other arguments"):
        task.enqueue(changed(one))
    assert task.enqueue(one) == first


def test_nan_arguments_count_as_the_same_arguments(system: System) -> None:
    task = system.app.task(name="charge", idempotency_key="order-1")(lambda amount: amount)
    assert task.enqueue({"a": math.nan, "b": 1}) == task.enqueue({"b": 1, "a": math.nan})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unique_key": "a", "idempotency_key": "b"}, "give one of them"),
        ({"unique_key": ""}, "Option unique_key: expected printable text"),
        ({"idempotency_key": "x" * 201}, "Option idempotency_key: expected printable text of 1 to 200"),
        ({"unique_key": "a", "unique_for": "ever"}, "Option unique_for"),
        ({"unique_key": "a", "on_duplicate": "shrug"}, "Option on_duplicate: expected 'return', 'replace' or 'raise'"),
    ],
)
def test_invalid_key_options_are_rejected(system: System, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTask, match=message):
        system.job.options(**options)


# -- transactions


def test_a_bulk_enqueue_returns_tasks_that_hold_the_keys(system: System) -> None:
    task = system.app.task(name="each", unique_key=lambda number: str(number))(lambda number: number)
    existing = task.enqueue(2)
    handles = system.app.enqueue_many(task, [(3,), (2,), (1,), (3,)])
    assert handles[1] == existing
    assert handles[0] == handles[3]
    assert len(set(handles)) == 3


@pytest.mark.parametrize("options", [{"unique_key": "k", "on_duplicate": "raise"}, {"idempotency_key": "k"}])
def test_a_duplicate_within_one_bulk_call_names_no_task(system: System, options: dict[str, Any]) -> None:
    """The error used to name a task that was rolled back."""
    with pytest.raises(Duplicate, match="Two of these tasks have the key 'k'; none of them was enqueued") as raised:
        system.app.enqueue_many(system.job.options(**options), [(1,), (2,)])
    assert (raised.value.task_id, system.count("tasks")) == ("", 0)


def test_a_bulk_enqueue_accepts_more_keys_than_postgres_has_locks(system: System) -> None:
    task = system.app.task(name="each", unique_key=lambda number: str(number))(lambda number: number)
    first = system.app.enqueue_many(task, [(number,) for number in range(15_000)])
    again = system.app.enqueue_many(task, ((number,) for number in reversed(range(14_990, 15_010))))
    assert [handle in first for handle in again] == [False] * 10 + [True] * 10
    assert len({*first, *again}) == system.count("tasks") == len(keys(system)) == 15_010


@pytest.mark.parametrize("many", [False, True])
def test_a_client_with_many_keys_delays_the_leader_no_longer_than_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    monkeypatch.setattr(store, "_MAX_LOCKS", 2 if many else 100)
    tasks = [keyed_task(f"{many}-{number}") for number in range(5)]
    late, other = keyed_task(f"{many}-3"), keyed_task(f"{many}-other")
    with engine.connect() as client, engine.connect() as leader:
        leader.exec_driver_sql("SET lock_timeout = '300ms'")
        leader.commit()
        assert store.insert_many_unique(client, tasks) == {task.id: task.id for task in tasks}
        assert store.take(leader, [late]) == (set(), {late.id}), "it asks again"
        assert store.take(leader, [other]) == ((set(), {other.id}) if many else ({other.id}, set()))
        leader.rollback()
        client.commit()
        assert store.take(leader, [late, other]) == ({other.id}, set())
        leader.rollback()


def test_concurrent_bulk_enqueues_of_the_same_keys_agree(system: System) -> None:
    task = system.app.task(name="each", unique_key=lambda number: str(number))(lambda number: number)
    handles: list[list[Handle[Any]]] = []
    barrier = threading.Barrier(4)

    def enqueue(number: int) -> None:
        barrier.wait()
        calls = [(key,) for key in range(150 if number % 2 else 90)]  # with a single lock, and with one for each key
        handles.append(system.app.enqueue_many(task, calls if number < 2 else calls[::-1])[:: 1 if number < 2 else -1])

    threads = [threading.Thread(target=enqueue, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(some) == {*max(handles, key=len)[: len(some)]} for some in handles] == [True] * 4
    assert system.count("tasks") == 150


def test_concurrent_clients_with_one_key_create_one_task(system: System) -> None:
    handles: list[Handle[Any]] = []
    barrier = threading.Barrier(8)

    def enqueue() -> None:
        barrier.wait()
        handles.append(unique(system).enqueue(1))

    threads = [threading.Thread(target=enqueue) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(handles)) == 1
    assert (system.count("tasks"), len(handles)) == (1, 8)


def test_an_open_transaction_with_a_key_does_not_stop_the_leader(system: System, engine: Engine) -> None:
    """A running task enqueues with the key that an open transaction is taking; the leader waits for neither."""
    worker = system.worker()
    (parent,) = system.dispatch()
    (task,) = worker.take()
    system.tick()
    with engine.begin() as connection:
        mine = unique(system).enqueue_in(connection, 1)
        worker.report(Enqueued([unique(system)._new((2,), {})]), Succeeded(task.id, 1, 0.1, ONE))
        system.pass_seconds(2)
        assert parent.status() == "success"
        assert system.count("inbox") == 1
    system.pass_seconds(2)
    assert system.count("inbox") == 0
    assert [row["id"].bytes for row in system.sql("SELECT id FROM orchestrator.tasks")] == [raw(mine)]


def test_a_running_task_gets_the_key_once_the_transaction_is_rolled_back(system: System, engine: Engine) -> None:
    worker = system.worker()
    system.dispatch()
    (task,) = worker.take()
    child = unique(system)._new((2,), {})
    with engine.connect() as connection:
        transaction = connection.begin()
        unique(system).enqueue_in(connection, 1)
        worker.report(Enqueued([child]), Enqueued([child]), Succeeded(task.id, 1, 0.1, ONE))
        system.pass_seconds()
        transaction.rollback()
    system.pass_seconds(2)
    assert [(d.id, d.attempt) for d in worker.take()] == [(child.id, 1)]
    worker.report(Succeeded(child.id, 1, 0.1, ONE))
    worker.report(Enqueued([child]))  # sent again after its end
    system.pass_seconds(2)
    assert (system.count("tasks"), keys(system)) == (0, [])


def test_a_running_task_receives_the_key_holder_after_each_request(system: System) -> None:
    worker = system.worker()
    holder, key = unique(system, delay=3600).enqueue(1), "mine"
    taken, own = unique(system)._new((2,), {}), system.job.options(unique_key=key, delay=3600)._new((3,), {})
    system.pass_seconds()
    for _ in range(2):  # Redis or the leader may lose the answer
        worker.report(Enqueued([taken, own]))
        system.pass_seconds(2)
        told = worker._streams.key_holders([taken.id, own.id])
        assert told == {taken.id: KeyHolder(raw(holder)), own.id: KeyHolder(own.id)}
        system.redis.delete(KEYS.key_holder(taken.id), KEYS.key_holder(own.id))
    assert system.count("tasks") == 2
    system.redis.set(KEYS.key_holder(taken.id), b"a stranger's")
    assert worker._streams.key_holders([taken.id]) == {}


def keyed_task(key: str) -> NewTask:
    return NewTask(uuid.uuid4().bytes, "job", "default", b"", unique=UniqueKey(key, "running"))


def test_two_leaders_that_swap_keys_do_not_deadlock(engine: Engine) -> None:
    """Each takes a key that a task of the other shard holds, and then releases its own: no order of the two is safe."""
    mine, other = keyed_task("mine"), keyed_task("other")
    with engine.connect() as one, engine.connect() as two:
        for connection in (one, two):
            connection.exec_driver_sql("SET lock_timeout = '300ms'")
            connection.commit()
        assert store.take(one, [mine, other]) == ({mine.id, other.id}, set())
        one.commit()
        assert store.take(one, [keyed_task("other")]) == (set(), set())
        assert store.take(two, [keyed_task("mine")]) == (set(), set())
        store.free(one, [("mine", mine.id)], ended=True)
        store.free(two, [("other", other.id)], ended=True)
        late = keyed_task("mine")
        assert store.take(two, [late])[0] == set(), "it is not free before the first one commits"
        one.commit()
        two.commit()
        assert store.take(two, [late]) == ({late.id}, set())
        two.rollback()


def test_two_leaders_that_take_keys_in_opposite_order_do_not_deadlock(engine: Engine) -> None:
    first, second = [keyed_task("a"), keyed_task("b")], [keyed_task("b"), keyed_task("a")]
    with engine.connect() as one, engine.connect() as two:
        assert store.take(one, first[:1])[0] == {first[0].id}
        assert store.take(two, second[:1])[0] == {second[0].id}
        assert store.take(one, first[1:]) == (set(), {first[1].id}), "it asks again"
        assert store.take(two, second[1:]) == (set(), {second[1].id})
        one.rollback()
        two.rollback()


def test_incompatible_uses_of_keys_are_rejected(system: System, engine: Engine) -> None:
    with engine.begin() as connection, pytest.raises(InvalidTask, match="'replace' cannot be combined with enqueue_in"):
        unique(system, on_duplicate="replace").enqueue_in(connection, 1)
    with pytest.raises(InvalidTask, match="a run needs all its tasks"):
        system.app.start_many(unique(system), [1, 2])
