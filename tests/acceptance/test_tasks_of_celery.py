"""The checks of Celery's integration tests of tasks, inspection and canvas, made on `orchestrator.compat.celery`.

`ASKED` has the tests of `test_tasks` and `test_inspect` of Celery's main branch; `canvases` has shapes of its canvas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from multiprocessing.pool import ThreadPool
from typing import Any
from uuid import UUID, uuid4

import pytest

from orchestrator.compat.celery import chain, chord, group, signals, signature
from orchestrator.compat.celery.exceptions import (
    ChordError,
    EncodeError,
    NotCovered,
    Reject,
    SoftTimeLimitExceeded,
    TaskRevokedError,
    TimeLimitExceeded,
    TimeoutError,
    WorkerLostError,
)
from orchestrator.compat.celery.result import AsyncResult, GroupResult
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import HERE, Stack, using
from tests.waiting import eventually

PROGRAMS = HERE / "celery_programs"
sys.path.insert(0, str(PROGRAMS))

import canvas_tasks as tasks  # noqa: E402  # as the workers see it: a top-level module
from canvas_tasks import add, app, fail, identity, redis_echo, tsum  # noqa: E402
from canvases import ERROR_CALLBACKS, FAILING, ONCE, SAME  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def running(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with fresh_stack(database_url, redis_url, folder) as stack, using(app.orchestrator, stack):
        stack.scheduler()
        stack.worker("--app", "canvas_tasks:app", processes=2, folder=PROGRAMS)
        eventually(lambda: app.control.inspect().ping(), "the worker is seen")
        yield stack


@pytest.fixture(autouse=True)
def on_redis(running: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", running.environment["ORCHESTRATOR_REDIS_URL"])


def get(result: Any) -> Any:
    return result.get(timeout=30)


def ended(result: Any, state: str) -> None:
    """Assert that a result has ended in a state, by all of Celery's methods."""
    assert result.status == state
    assert result.ready()
    assert result.failed() == (state == "FAILURE")
    assert result.successful() == (state == "SUCCESS")


# -- tasks


def basic_task() -> None:
    for result, expected in [(add.delay(i, i), 2 * i) for i in range(10)] + [
        (add.delay(i, i, z=i), 3 * i) for i in range(10)
    ]:
        assert get(result) == expected
        ended(result, "SUCCESS")


def simple_call() -> None:
    assert (add(1, 1), add(1, 1, z=1)) == (2, 3)


def multithread_producer() -> None:
    with ThreadPool(8) as pool:
        assert pool.map(lambda i: get(add.delay(i, 1)), range(40)) == list(range(1, 41))


def ignore_result() -> None:
    result = add.apply_async((1, 2), ignore_result=True)
    assert get(result) is None
    assert result.result is None
    assert tasks.add_ignore_result.delay(1, 2).ignored


def rejects() -> None:
    result = tasks.reject_without_requeue.delay()
    with pytest.raises(Reject):
        get(result)
    ended(result, "FAILURE")


def rejects_and_requeues() -> None:
    result = tasks.reject_then_succeed.delay()
    assert get(result) == "second-pass"
    ended(result, "SUCCESS")


def timeout() -> None:
    result = tasks.sleeping.delay(3)
    for waiting in (result, group(tasks.sleeping.si(3), tasks.sleeping.si(3)).delay()):
        with pytest.raises(TimeoutError):
            waiting.get(timeout=0.5)
        waiting.revoke(terminate=True)


def expired() -> None:
    for expires in (0.001, datetime.now(UTC) - timedelta(seconds=1)):
        result = add.apply_async((1, 1), countdown=1, expires=expires)
        with pytest.raises(TaskRevokedError):
            get(result)
        ended(result, "REVOKED")


def eta() -> None:
    for when in ({"countdown": 1}, {"eta": datetime.now(UTC) + timedelta(seconds=2)}):
        result = add.apply_async((1, 1), **when)
        assert result.status == "PENDING"
        assert not result.ready()
        assert get(result) == 2
        ended(result, "SUCCESS")


def fails() -> None:
    result = fail.delay(5)
    with pytest.raises(tasks.ExpectedException) as raised:
        get(result)
    assert raised.value.args == ("Task expected to fail", 5)
    ended(result, "FAILURE")
    assert "ExpectedException" in str(result.traceback)


def revoked() -> None:
    result = add.apply_async((1, 1), countdown=60)
    result.revoke()
    with pytest.raises(TaskRevokedError):
        get(result)
    ended(result, "REVOKED")


def wrong_arguments() -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: add(5),
        lambda: add(5, 5, wrong=5),
        lambda: add.delay(5),
        lambda: add.delay(5, wrong=5),
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()
    for result in (tasks.add_not_typed.delay(5), tasks.add_not_typed.delay(5, wrong=5)):
        with pytest.raises(TypeError):
            get(result)
        ended(result, "FAILURE")


def retry() -> None:
    result = tasks.waits_for_retry.delay()
    eventually(lambda: result.status == "RETRY", "it is to be tried again")
    assert result.result == tasks.ExpectedException("later")
    assert get(result) == "done"
    ended(result, "SUCCESS")
    failing = tasks.retry_always.delay()
    with pytest.raises(tasks.ExpectedException) as raised:
        get(failing)
    assert raised.value.args == ("again", 2)
    assert tasks.redis().get(f"retries-{failing.id}") == "3"


def unpicklable() -> None:
    result = tasks.fail_with_other_arguments.delay()
    error = result.get(timeout=30, propagate=False)
    assert isinstance(error, tasks.UnpicklableError)
    assert (error.args, error.foo) == (("bar",), "foo")


def retried_once() -> None:
    assert get(tasks.retry_once.delay()) == 1
    assert get(tasks.retry_once.apply_async(expires=60)) == 1
    assert get(tasks.retry_with_other_arguments.delay(5)) == 7


def retry_keeps() -> None:
    assert get(tasks.retry_keeps.apply_async(priority=7, headers={"x-test": "value"})) == [7, {"x-test": "value"}]


def unicode_task() -> None:
    assert get(group(identity.s("hå它 valmuefrø") for _ in range(5))()) == ["hå它 valmuefrø"] * 5


def properties() -> None:
    assert get(tasks.properties.apply_async(app_id="1234")) == {"app_id": "1234"}


def limits() -> None:
    assert get(tasks.limits.apply_async(time_limit=30, soft_time_limit=20)) == [30, 20]
    assert get(tasks.limits.delay()) == [None, None]
    assert get(tasks.declared_limits.delay()) == [60, 45]
    assert get(tasks.declared_limits.apply_async(time_limit=10, soft_time_limit=5)) == [10, 5]
    with pytest.raises(ValueError, match="soft_time_limit"):
        tasks.limits.apply_async(time_limit=1, soft_time_limit=5)


def eager_ids() -> None:
    outer: list[Any] = []

    @app.task(bind=True, name="canvas_tasks.inner")
    def inner(self: Any) -> list[Any]:
        return [self.request.id, self.request.parent_id, self.request.root_id]

    @app.task(bind=True, name="canvas_tasks.outer")
    def around(self: Any) -> list[Any]:
        outer.extend([self.request.id, self.request.parent_id, self.request.root_id])
        found: list[Any] = inner.apply().get()
        return found

    _, parent, root = around.apply().get()
    assert outer[1:] == [None, outer[0]]
    assert (parent, root) == (outer[0], outer[0])


def replaced() -> None:
    tasks.redis().delete("replace")
    get(tasks.second_order_replace1.delay())
    assert tasks.redis().lrange("replace", 0, -1) == ["In A", "Entering/Exiting", "In A", "Out A"]
    tasks.redis().delete("replace")
    assert get((tasks.second_order_replace1.si() | add.si(4, 2)).delay()) == 6
    assert tasks.redis().lrange("replace", 0, -1) == ["In A", "Entering/Exiting", "In A", "Out A"]


def class_based() -> None:
    assert get(tasks.auto_retry.delay()) == 1
    assert get(tasks.class_based.delay(5)) == 15


# -- inspection


def only(found: Any) -> Any:
    (value,) = found.values()
    return value


def inspect() -> Any:
    return app.control.inspect()


def ping() -> None:
    assert only(inspect().ping()) == {"ok": "pong"}


def registered() -> None:
    assert "canvas_tasks.add" in only(inspect().registered())
    assert "canvas_tasks.add [name=canvas_tasks.add]" in only(inspect().registered("name"))


def active_queues() -> None:
    assert [queue["name"] for queue in only(inspect().active_queues())] == ["celery"]


def active() -> None:
    result = tasks.sleeping.delay(20)
    (found,) = eventually(lambda: only(inspect().active()), "it runs")
    assert (found["id"], found["name"], found["args"]) == (result.id, "canvas_tasks.sleeping", [20])
    assert only(inspect().query_task(result.id))[result.id][0] == "active"
    assert only(inspect().query_task(str(uuid4()))) == {}
    result.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        get(result)


def scheduled() -> None:
    when = datetime.now(UTC) + timedelta(seconds=60)
    result = add.apply_async([1, 2], {"z": 3}, eta=when)
    (found,) = [one for one in only(inspect().scheduled()) if one["request"]["id"] == result.id]
    assert abs(datetime.fromisoformat(found["eta"]) - when) < timedelta(seconds=1)
    assert (found["request"]["args"], found["request"]["kwargs"]) == ([1, 2], {"z": 3})
    result.revoke()
    eventually(lambda: result.id in only(inspect().revoked()), "it is revoked")


def stats() -> None:
    found = only(inspect().stats())
    assert len(found["pool"]["processes"]) == 2
    assert found["pool"]["max-concurrency"] == 20
    assert "ok" in only(inspect().report())
    assert only(inspect().conf())["task_track_started"] is True


ASKED: dict[str, Callable[[], None]] = {
    "tasks.simple_call": simple_call,
    "tasks.basic_task": basic_task,
    "tasks.multithread_producer": multithread_producer,
    "tasks.ignore_result": ignore_result,
    "tasks.reject_without_requeue_stores_failure": rejects,
    "tasks.reject_with_requeue_redelivers_and_succeeds": rejects_and_requeues,
    "tasks.timeout": timeout,
    "tasks.expired": expired,
    "tasks.eta": eta,
    "tasks.fail": fails,
    "tasks.revoked": revoked,
    "tasks.wrong_arguments": wrong_arguments,
    "tasks.retry": retry,
    "tasks.retry_with_unpickleable_exception": retry,
    "tasks.fail_with_unpickleable_exception": unpicklable,
    "tasks.task_retried_once": retried_once,
    "tasks.task_retried_once_with_expires": retried_once,
    "tasks.task_retried_priority": retry_keeps,
    "tasks.task_retried_headers": retry_keeps,
    "tasks.unicode_task": unicode_task,
    "tasks.properties": properties,
    "tasks.soft_time_limit_exceeding_time_limit": limits,
    "tasks.request_time_limits_set_via_apply_async": limits,
    "tasks.request_time_limits_none_when_not_configured": limits,
    "tasks.request_time_limits_from_task_declaration": limits,
    "tasks.apply_async_time_limits_override_task_declaration": limits,
    "class_based_tasks.class_based_task_retried": class_based,
    "apply_tasks.apply_single_task_ids": eager_ids,
    "apply_tasks.apply_nested_parent_child_relationship": eager_ids,
    "task_redis_result_backend.ignoring_result_no_subscriptions": ignore_result,
    "pool_acquire_timeout.concurrent_apply_async_with_timeout": multithread_producer,
    "task_replacement.replaced_task_nesting_level_1": replaced,
    "task_replacement.replaced_task_nesting_chain": replaced,
    "inspect.ping": ping,
    "inspect.registered": registered,
    "inspect.active_queues": active_queues,
    "inspect.active": active,
    "inspect.query_task": active,
    "inspect.scheduled": scheduled,
    "inspect.revoked": scheduled,
    "inspect.stats": stats,
    "inspect.report": stats,
    "inspect.conf": stats,
}


@pytest.mark.parametrize("ask", dict.fromkeys(ASKED.values()), ids=lambda ask: ask.__name__)
def test_celerys_own_check_passes(ask: Callable[[], None]) -> None:
    ask()


# -- canvas


@pytest.mark.parametrize("name", SAME)
def test_a_canvas_has_celerys_result(name: str) -> None:
    build, expected = SAME[name]
    assert get(signature(build().__json__()).apply_async()) == expected


@pytest.mark.parametrize("name", ONCE)
def test_every_task_of_a_canvas_runs_once(running: Stack, name: str) -> None:
    key = f"{name}-{uuid4()}"
    get(ONCE[name](key).apply_async())
    words = [int(word) for word in tasks.redis().lrange(key, 0, -1)]
    assert sorted(words) == list(range(1, len(words) + 1))


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_in_a_canvas_reaches_the_caller(name: str) -> None:
    key = f"{name}-{uuid4()}"
    result = FAILING[name](key).apply_async()
    with pytest.raises((tasks.ExpectedException, ChordError), match="expected to fail"):
        get(result)
    assert result.state == "FAILURE" if isinstance(result, AsyncResult) else result.failed()
    assert tasks.redis().lrange(key, 0, -1) == []


@pytest.mark.parametrize("name", ERROR_CALLBACKS)
def test_an_error_callback_in_a_canvas_is_called_once(name: str) -> None:
    key = f"{name}-{uuid4()}"
    part = fail.si().on_error(tasks.errback_new_style.s(key=key))
    result = ERROR_CALLBACKS[name](part).apply_async()
    with pytest.raises((tasks.ExpectedException, ChordError)):
        get(result)
    noted = ["canvas_tasks.fail ExpectedException Task expected to fail"]
    eventually(lambda: tasks.redis().lrange(key, 0, -1) == noted, "the callback")


def test_a_failed_chord_header_fails_the_body_with_a_chord_error() -> None:
    key = f"errors-{uuid4()}"
    result = chord([fail.s(), identity.s(1)], identity.s().on_error(tasks.errback_new_style.s(key=key))).apply_async()
    with pytest.raises(tasks.ExpectedException, match="Task expected to fail"):
        get(result)
    assert (result.state, type(result.result)) == ("FAILURE", ChordError)
    with pytest.raises(ChordError, match="Task expected to fail"):
        get(AsyncResult(result.id, app=app))
    eventually(lambda: tasks.redis().llen(key) == 1, "the callback")
    [noted] = tasks.redis().lrange(key, 0, -1)
    assert noted.startswith("canvas_tasks.fail ChordError Dependency ")
    old = fail.apply_async(link_error=tasks.errback_old_style.s())
    eventually(lambda: tasks.redis().lrange(f"old-errback-{old.id}", 0, -1) == [old.id], "the callback by id")


VALUES = [
    Decimal("1.10"),
    UUID(int=7),
    date(2026, 1, 2),
    datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime(2026, 1, 2, tzinfo=UTC),
    clock(3, 4),
    b"\xff",
    {"in": [Decimal("0.5")]},
]


def test_arguments_and_results_keep_their_types() -> None:
    kinds = [type(one).__name__ for one in (*VALUES, Decimal())]
    given = {"annotated": Decimal("3.0")}
    assert get(tasks.types_of.delay(*VALUES, **given)) == [kinds, VALUES]
    called = tasks.types_of.apply_async(VALUES, given, headers={"x": Decimal("1.0")})
    assert get(called) == called.result == [kinds, VALUES]
    assert (called.args, called.kwargs) == (VALUES, given)
    assert get(app.send_task("canvas_tasks.types_of", VALUES, given)) == [kinds, VALUES]
    assert get(group(tasks.types_of.s(*VALUES, **given) for _ in range(2))()) == [[kinds, VALUES]] * 2
    chained = add.s(Decimal("1.1"), Decimal("1")) | add.s(Decimal("2")) | add.s(1)
    assert get(chained.delay()) == Decimal("5.1")
    assert get(chord([identity.s(Decimal("1.1")), identity.s(Decimal("2.2"))])(tsum.s())) == Decimal("3.3")
    assert get(tasks.retry_with_decimal.delay(Decimal("1"))) == ["Decimal", Decimal("2.50")]
    assert tasks.types_of.apply(VALUES, given).get() == [kinds, VALUES]
    key = f"linked-{uuid4()}"
    add.apply_async((Decimal("1"), 1), link=chain(add.s(Decimal("0.50")), redis_echo.s(redis_key=key)))
    eventually(lambda: tasks.redis().lrange(key, 0, -1) == ["2.50"], "the callback")


@pytest.mark.parametrize("value", [{1, 2}, timedelta(1), [{1}], 2**70, "x" * 2_000_000])
def test_values_that_cannot_be_serialized_are_rejected(value: Any) -> None:
    for call in (identity.delay, lambda one: identity.apply_async((one,)), lambda one: group(identity.s(one))()):
        with pytest.raises(EncodeError):
            call(value)


def test_an_error_of_a_task_is_raised_in_the_caller() -> None:
    lost, many, args = (tasks.raise_base.delay(kind) for kind in ("exit", "group", "decimal"))
    with pytest.raises(WorkerLostError, match="SystemExit"):
        get(lost)
    with pytest.raises(Exception, match="many") as raised:
        get(many)
    assert type(raised.value).__name__ == "ExceptionGroup"
    with pytest.raises(ValueError, match=r"Decimal\('1.10'\), 42"):
        get(args)
    assert [one.state for one in (lost, many, args)] == ["FAILURE"] * 3


def test_publish_receivers_see_and_change_each_call() -> None:
    seen: list[tuple[Any, ...]] = []

    def publish(sender: str, headers: dict[str, Any], routing_key: str, properties: dict[str, Any], **_: Any) -> None:
        seen.append((sender, headers["id"], routing_key))
        headers["tenant"] = "acme"
        properties["priority"] = 5

    signals.before_task_publish.connect(publish)
    try:
        alone = tasks.requested.delay()
        many = group(tasks.requested.s(i) for i in range(2))()
        chained = (identity.s(1) | tasks.requested.s()).apply_async(queue="celery")
    finally:
        signals.before_task_publish.disconnect(publish)
    for found in (get(alone), *get(many), get(chained)):
        assert (found["headers"], found["delivery_info"]["priority"]) == ({"tenant": "acme"}, 5)
    assert tasks.redis().get("ready") == get(alone)["hostname"]
    requested = "canvas_tasks.requested"
    assert seen[:3] == [(requested, alone.id, "celery"), *[(requested, None, "celery")] * 2]
    assert [sender for sender, *_ in seen[3:]] == ["canvas_tasks.identity", requested]


def test_receivers_see_the_parts_of_a_composition_after_they_are_stored() -> None:
    heard: list[tuple[str, Any, Any]] = []

    def published(sender: str, headers: Any, body: Any, **_: Any) -> None:
        heard.append((sender, headers["id"], body[0]))

    signals.after_task_publish.connect(published)
    try:
        both = group(add.s(1, 1), add.s(2, 2)).delay()
        assert heard == [("canvas_tasks.add", both[0].id, (1, 1)), ("canvas_tasks.add", both[1].id, (2, 2))]
        heard.clear()
        last = chord([add.s(1, 1), tsum.s([Decimal(3)])], tsum.s()).delay()
        assert [(id, args) for _, id, args in heard][:2] == [
            (last.parent[0].id, (1, 1)),
            (last.parent[1].id, ([Decimal(3)],)),
        ]
        assert len(heard) == 3
        heard.clear()
        nested = group(chain(add.s(1, 1), add.s(1)), chain(add.s(2, 2), add.s(1))).delay()
        assert [args for *_, args in heard] == [(1, 1), (1,), (2, 2), (1,)]
    finally:
        signals.after_task_publish.disconnect(published)
    assert (get(both), get(last), get(nested)) == ([2, 4], Decimal(5), [3, 5])


def test_a_request_has_the_times_and_limits_of_its_call() -> None:
    when = datetime.now(UTC) - timedelta(seconds=1)
    eta, expires, limits = get(tasks.times.apply_async(eta=when, expires=60, time_limit=9, soft_time_limit=8))
    assert (datetime.fromisoformat(eta), limits) == (when, [9, 8])
    assert datetime.now(UTC) < datetime.fromisoformat(expires) < datetime.now(UTC) + timedelta(seconds=60)
    assert get(tasks.times.apply_async(countdown=0.01))[0] is not None


def test_parents_children_and_restored_groups_are_found() -> None:
    result = (add.s(1, 1) | group(add.s(1), add.s(2)) | tsum.s()).apply_async()
    assert get(result) == 7
    assert get(result.parent) == [3, 4]
    assert get(result.parent.parent) == 2
    many = group(add.s(i, i) for i in range(3)).delay()
    assert get(many) == [0, 2, 4]
    many.save()
    again = GroupResult.restore(many.id, app=app)
    assert (get(again), again.completed_count(), again.ready()) == ([0, 2, 4], 3, True)
    again.results = []  # as restored before the scheduler has created its tasks
    assert (again.ready(), get(again), many.results[0].queue) == (True, [0, 2, 4], "celery")
    parent = tasks.enqueues_child.delay()
    child = app.AsyncResult(get(parent))
    found = get(child)
    assert (found["parent_id"], found["root_id"]) == (parent.id, parent.id)
    assert [one.id for one in parent.children] == [child.id]
    assert [value for _, value in parent.collect(timeout=30)] == [child.id, found]
    assert [value for _, value in (add.s(1, 2) | add.s(6)).delay().collect(timeout=30)] == [9]
    [names] = app.control.inspect().registered().values()
    assert all(name.startswith(("canvas_tasks.", "celery.")) for name in names), names


def test_a_part_that_is_revoked_before_it_exists_does_not_run() -> None:
    key = str(uuid4())
    last = chain(
        tasks.progress.s(key), redis_echo.si("charge", key + "-ran"), redis_echo.si("receipt", key + "-ran")
    ).delay()
    eventually(lambda: last.parent.parent.state == "PROGRESS", "the first part runs")
    last.parent.revoke()
    tasks.redis().set(key, "go")
    assert get(last.parent.parent) == {"current": 10, "total": 10}
    for revoked in (last.parent, last):
        with pytest.raises(TaskRevokedError):
            get(revoked)
        assert revoked.state == "REVOKED"
    assert tasks.redis().lrange(key + "-ran", 0, -1) == []
    revokes: list[Callable[[Any], Any]] = [lambda part: part.revoke(), lambda part: app.control.revoke(part.id)]
    for revoke in revokes:
        for parts in ([add.s(1, 1).set(countdown=60), add.s(2, 2)], [add.s(1, 1).set(countdown=60), identity.s(4)]):
            both = group(parts).delay()
            revoke(both[0])  # at once: its task may not have been created
            with pytest.raises(TaskRevokedError):
                get(both[0])
            assert (get(both[1]), both[0].state) == (4, "REVOKED")


def test_revoke_of_a_composition_lets_running_parts_end() -> None:
    keys = [str(uuid4()) for _ in range(3)]
    both = group(tasks.progress.s(keys[0]), tasks.progress.s(keys[1])).delay()
    both_ended = [{"current": 10, "total": 10}] * 2
    then = chain(tasks.progress.s(keys[2]), redis_echo.si("later", keys[2] + "-ran")).apply_async(task_id=keys[2])
    running = [*both, then.parent]
    eventually(lambda: [part.state for part in running] == ["PROGRESS"] * 3, "they run")
    both.revoke()
    app.control.revoke(keys[2])
    waiting = group(tasks.sleeping.si(60).set(countdown=60), tasks.sleeping.si(60)).delay()
    eventually(lambda: waiting[0].state == "PENDING", "it is there")
    waiting.revoke(terminate=True)
    for key in keys:
        tasks.redis().set(key, "go")
    assert (get(both), get(then.parent)) == (both_ended, both_ended[0])
    for revoked in (then, waiting):
        with pytest.raises(TaskRevokedError):
            get(revoked)
    assert tasks.redis().lrange(keys[2] + "-ran", 0, -1) == []


def test_a_chosen_id_is_kept_and_deduplicates_calls() -> None:
    for chosen in (str(uuid4()), "report-5"):
        result = tasks.requested.apply_async((1,), {"a": 2}, task_id=chosen, headers={"x": [1]})
        found = get(AsyncResult(chosen, app=app))
        assert (result.id, found["id"], found["headers"], found["args"]) == (chosen, chosen, {"x": [1]}, [1])
        assert get(tasks.requested.apply_async((1,), {"a": 2}, task_id=chosen)) == found
    whole = (add.s(1, 1) | add.s(1)).apply_async(task_id="whole")
    assert (get(whole), get(AsyncResult("whole", app=app))) == (3, 3)


def test_custom_states_hooks_and_time_limits_work_as_in_celery() -> None:
    key = str(uuid4())
    going = tasks.progress.delay(key)
    eventually(lambda: (going.state, going.info) == ("PROGRESS", {"current": 3, "total": 10}), "the state")
    tasks.redis().set(key, "go")
    assert get(going) == {"current": 10, "total": 10}
    by_state = tasks.failed_by_state.delay()
    eventually(lambda: by_state.state == "FAILURE" and repr(by_state.result) == "ValueError('by state')", "the failure")
    assert get(tasks.soft_limited.delay()) == "cleaned up"
    with pytest.raises(TimeLimitExceeded):
        get(tasks.hard_limited.delay())
    for_good = tasks.soft_limited_for_good.delay()
    with pytest.raises(SoftTimeLimitExceeded):
        get(for_good)
    assert tasks.redis().get(f"soft-{for_good.id}") == "1"
    hooks = {
        "ok": ["before_start", "on_success ok", "after_return SUCCESS"],
        "fail": ["before_start", "on_failure ValueError('no') True", "after_return FAILURE"],
        "retry": ["before_start", "on_retry KeyError('x')", "before_start", "on_success retry", "after_return SUCCESS"],
    }
    for how, expected in hooks.items():
        result = tasks.hooked.delay(how)
        result.get(timeout=30, propagate=False)
        assert tasks.redis().lrange(f"hooks-{result.id}", 0, -1) == expected
    for seconds in (0, 60):
        result = tasks.hooked_limit.delay(seconds)
        with pytest.raises(TimeLimitExceeded):
            get(result)
        eventually(lambda: tasks.redis().lrange(f"hooks-{result.id}", 3, -1), "the last hook")  # noqa: B023
        failed, *rest = tasks.redis().lrange(f"hooks-{result.id}", 1, -1)
        assert failed.startswith("on_failure TimeLimitExceeded")
        assert rest == ["task_failure TimeLimitExceeded", "after_return FAILURE"]
    with pytest.raises(RuntimeError, match="within a task"):
        get(tasks.waits_for_other.delay())


def test_uncovered_features_raise_errors_with_advice() -> None:
    with pytest.raises(NotCovered, match="Headers travel"):
        add.s(1, 1).stamp(visitor=None)
    with pytest.raises(NotCovered, match="data"):
        add.apply_async((1, 1), serializer="pickle")
    with pytest.raises(NotCovered, match="queues limit"):
        app.control.rate_limit("canvas_tasks.add", "1/s")
    with pytest.raises(TypeError, match="unknown option"):
        add.apply_async((1, 1), countdwon=3)
    with pytest.raises(TypeError, match="missing a required argument") as wrong:
        app.send_task("canvas_tasks.add", (1,))
    assert "_celery" not in str(wrong.value)
