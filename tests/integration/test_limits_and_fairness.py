"""Limits, fairness, expiry and the settings of queues, tick by tick."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from orchestrator import InvalidTask, Rate, TaskFailed
from orchestrator.domain.limits import lanes as domain_lanes
from orchestrator.domain.tasks.task import Dispatch, Enqueued, Failed, Returned, Succeeded
from orchestrator.scheduler import requests
from tests.integration.stage import ERROR, ONE, System, Worker, raw
from tests.waiting import eventually


def by_customer(system: System, **options: Any) -> Any:
    """Register a task with the customer as its concurrency key."""
    return system.app.task(name="mail", concurrency_key=lambda customer, **_: customer, **options)(
        lambda customer, number=0: (customer, number)
    )


def customers(tasks: list[Dispatch]) -> Counter[str]:
    """Count tasks by the customer in their arguments."""
    from orchestrator.sdk.values.payload import decode_value

    return Counter(decode_value(task.payload)[0][0] for task in tasks)


def take(system: System, worker: Worker) -> list[Dispatch]:
    """Tick a few times and return the dispatched tasks."""
    system.pass_seconds()
    system.tick(3)
    return worker.take()


# -- lanes


def test_thousands_of_tasks_of_one_key_do_not_delay_another(system: System) -> None:
    mail = by_customer(system)
    worker = system.worker(knows=["mail"], slots=10)
    system.app.enqueue_many(mail, [("big", number) for number in range(2_000)])
    first = take(system, worker)
    assert customers(first) == {"big": 10}
    system.app.enqueue_many(mail, [("small", number) for number in range(5)])
    worker.succeed(*first)
    system.tick()
    assert customers(worker.take())["small"] == 5


def test_the_limit_of_a_key_holds_across_leaders(system: System) -> None:
    mail = by_customer(system, concurrency=2)
    worker = system.worker(knows=["mail"], slots=50)
    for customer in ("a", "b", "c"):
        system.app.enqueue_many(mail, [(customer, number) for number in range(10)])
    held = take(system, worker)
    assert customers(held) == {"a": 2, "b": 2, "c": 2}
    system.lead()
    system.settle()
    assert take(system, worker) == []
    worker.succeed(held[0])
    assert customers(take(system, worker)).total() == 1


def test_a_retried_task_that_goes_first_blocks_no_other_task(system: System) -> None:
    """The retried task is older than the counted ones, and is claimed in the tick that makes it ready."""
    mail = by_customer(system, concurrency=1)
    worker = system.worker(knows=["mail"], slots=10)
    failed = mail.enqueue("a", 0)
    worker.report(*(Failed(task.id, task.attempt, 0.1, ERROR, False) for task in take(system, worker)))
    system.tick(2)
    waiting = system.app.enqueue_many(mail, [("a", number) for number in range(1, 4)])
    system.lead()
    system.settle()
    for _ in range(4):
        held = take(system, worker)
        if failed is not None:
            failed.retry()
            failed = None
        worker.succeed(*held)
        system.tick()
    worker.succeed(*take(system, worker))
    system.tick(2)
    assert [one.status() for one in waiting] == ["success"] * 3


def test_the_limit_of_a_task_holds_for_all_its_keys_and_queues(system: System) -> None:
    mail = by_customer(system, total_concurrency=4)
    one = system.worker("one", knows=["mail"], slots=50)
    two = system.worker("two", knows=["mail"], slots=50, queue="other")
    for customer in range(10):
        mail.enqueue(str(customer))
        mail.options(queue="other").enqueue(str(customer))
    held = take(system, one) + two.take()
    assert len(held) == 4
    one.succeed(*[task for task in held if task.queue == "default"])
    two.succeed(*[task for task in held if task.queue == "other"])
    assert len(take(system, one) + two.take()) == 4


def test_a_limit_holds_without_a_key(system: System) -> None:
    lonely = system.app.task(name="lonely", concurrency=1)(lambda: None)
    worker = system.worker(knows=["lonely", "job"], slots=50)
    system.app.enqueue_many(lonely, [()] * 5)
    system.job.enqueue()
    held = take(system, worker)
    assert Counter(task.name for task in held) == {"lonely": 1, "job": 1}


def test_a_concurrency_limit_is_freed_when_a_worker_is_lost(system: System) -> None:
    mail = by_customer(system, concurrency=1)
    worker, other = system.worker(knows=["mail"]), system.worker("other", knows=["mail"])
    system.settle()
    system.app.enqueue_many(mail, [("a", 1), ("a", 2)])
    system.pass_seconds()
    (held,) = worker.take() or other.take()
    owner, heir = (worker, other) if worker.held else (other, worker)
    owner.die()
    system.make_old()
    system.tick_until(lambda: heir.take())
    again = system.sql("SELECT id::text, attempt, status FROM orchestrator.tasks ORDER BY seq")
    assert [row["status"] for row in again] == ["dispatched", "pending"]
    assert again[0]["attempt"] == held.attempt + 1


def test_a_cancelled_task_occupies_its_limit_until_its_code_stops(system: System) -> None:
    mail = by_customer(system, concurrency=1)
    worker = system.worker(knows=["mail"])
    system.pass_seconds()
    first, _ = mail.enqueue("a"), mail.enqueue("a")
    (task,) = take(system, worker)
    worker.start(task)
    first.cancel()
    assert take(system, worker) == []
    assert first.status() == "cancelled"
    system.lead()  # a new leader learns from the workers what still runs
    system.settle()
    assert take(system, worker) == []
    worker.held.clear()
    assert len(take(system, worker)) == 1


def test_a_cancelled_task_occupies_its_limit_before_a_heartbeat_lists_it(system: System) -> None:
    """Its worker has just received it and lists it in its next heartbeat; or it never received it, and never does."""
    mail = by_customer(system, concurrency=1)
    worker = system.worker(knows=["mail"])
    system.settle()
    first, second, _ = mail.enqueue("a"), mail.enqueue("a"), mail.enqueue("a")
    (task,) = take(system, worker)
    worker.held.clear()
    first.cancel()
    assert take(system, worker) + take(system, worker) == []
    worker.held.append((task.id, task.attempt))
    assert take(system, worker) == []
    worker.held.clear()
    assert len(take(system, worker)) == 1
    worker.held.clear()
    system.lead()
    second.cancel()
    assert take(system, worker) + take(system, worker) == []
    system.tick_until(lambda: worker.take())


def test_a_lingering_failed_attempt_occupies_its_limit(system: System) -> None:
    mail = by_customer(system, concurrency=1)
    worker = system.worker(knows=["mail"])
    system.pass_seconds()
    first, _ = mail.enqueue("a"), mail.enqueue("a")
    (task,) = take(system, worker)
    worker.report(Failed(task.id, task.attempt, 9.0, ERROR, False, lingering=True))
    worker.held.append((task.id, task.attempt))
    assert take(system, worker) == []
    assert first.status() == "failed"
    worker.held.clear()
    assert len(take(system, worker)) == 1


@pytest.mark.parametrize("how", ["at once", "after a delay", "by a task", "given back", "by hand"])
def test_the_leader_notices_every_way_into_a_lane(system: System, how: str) -> None:
    mail = by_customer(system, concurrency=1)
    worker = system.worker(knows=["mail", "job"])
    if how == "at once":
        mail.enqueue("a")
    elif how == "after a delay":
        mail.options(delay=60).enqueue("a")
        assert take(system, worker) == []
        system.lead(offset=61)
    elif how == "by a task":
        system.dispatch()
        (parent,) = worker.take()
        child = mail._new(("a",), {})
        worker.report(Enqueued([child]), Succeeded(parent.id, 1, 0.1, ONE))
    elif how == "given back":
        mail.enqueue("a")
        (task,) = take(system, worker)
        worker.report(Returned(task.id, task.attempt, "worker stops"))
    else:
        handle = mail.enqueue("a")
        (task,) = take(system, worker)
        worker.fail(task)
        system.tick()
        handle.retry()
    (found,) = take(system, worker)
    assert found.name == "mail"
    assert system.count("inbox") == 0


def test_a_new_leader_finds_thousands_of_lanes(system: System) -> None:
    mail = by_customer(system, concurrency=1)
    worker = system.worker(knows=["mail"], slots=1_000)
    system.app.enqueue_many(mail, [(str(number // 2),) for number in range(5_000)])
    system.lead()
    system.settle()
    seen: set[str] = set()
    for _ in range(20):
        system.tick()
        tasks = worker.take()
        found = customers(tasks)
        assert set(found.values()) <= {1}
        seen |= set(found)
        worker.succeed(*tasks)
    assert len(seen) == 2_500
    system.tick_until(lambda: worker.succeed(*worker.take()) or system.count("tasks") == 0)


def test_lanes_beyond_the_remembered_number_are_served(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain_lanes, "MAX_LANES", 50)
    mail = by_customer(system)
    worker = system.worker(knows=["mail"], slots=20)
    system.app.enqueue_many(mail, [(str(number),) for number in range(300)])
    system.pass_seconds()
    system.tick_until(lambda: [worker.succeed(*worker.take()), system.tick()] and system.count("tasks") == 0)


def test_a_rolled_back_tick_forgets_no_lane(system: System) -> None:
    mail = by_customer(system, concurrency=1)
    worker = system.worker(knows=["mail"], slots=10)
    system.app.enqueue_many(mail, [(str(number % 4),) for number in range(8)])
    system.sql(
        "CREATE FUNCTION pg_temp_refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END'"
    )
    system.sql(
        "CREATE TRIGGER refuse BEFORE UPDATE ON orchestrator.tasks FOR EACH ROW WHEN (new.status = 'dispatched')"
        " EXECUTE FUNCTION pg_temp_refuse()"
    )
    try:
        system.pass_seconds()
        assert worker.take() == []
    finally:
        system.sql("DROP TRIGGER refuse ON orchestrator.tasks")
        system.sql("DROP FUNCTION pg_temp_refuse")
    assert sorted(customers(take(system, worker)).values()) == [1, 1, 1, 1]


def test_priority_counts_across_lanes(system: System) -> None:
    mail = by_customer(system)
    worker = system.worker(knows=["mail", "job"], slots=3)
    for customer in "abc":
        system.app.enqueue_many(mail, [(customer, number) for number in range(3)])
    urgent = mail.options(priority=10).enqueue("z")
    plain = system.job.options(priority=20).enqueue()
    tasks = take(system, worker)
    assert [task.id for task in tasks[:2]] == [raw(plain), raw(urgent)]


# -- rates


def test_a_rate_limit_survives_a_change_of_leader(system: System) -> None:
    mail = by_customer(system, rate=Rate(3, per=3_600))
    worker = system.worker(knows=["mail"], slots=50)
    system.app.enqueue_many(mail, [(customer, number) for customer in "ab" for number in range(10)])
    first = take(system, worker)
    assert customers(first) == {"a": 3, "b": 3}
    worker.start(*first)
    system.lead()
    system.settle()
    assert take(system, worker) == []
    system.lead(offset=1_300)
    system.settle()
    assert customers(take(system, worker)) == {"a": 1, "b": 1}


def test_the_leader_wakes_when_a_rate_allows_more(system: System) -> None:
    quick = system.app.task(name="quick", rate=Rate(20, per=1, burst=1))(lambda: None)
    worker = system.worker(knows=["quick"], slots=50)
    system.app.enqueue_many(quick, [()] * 3)
    system.pass_seconds()
    system.tick(3)
    tasks = worker.take()
    while len(tasks) < 3:  # each tick blocks until the rate allows one more
        worker.start(*tasks)
        system.tick()
        tasks += worker.take()
    assert len(tasks) == 3


@pytest.mark.parametrize("limit", ["rate", "total_rate", "queue"])
def test_a_rate_limit_bounds_dispatched_tasks_that_have_not_started(system: System, limit: str) -> None:
    """Under any leader. A stalled or dead worker would otherwise begin all of them at once."""
    rate = Rate(100, per=1, burst=2)
    most = 25 if limit == "queue" else 10
    options: Any = {} if limit == "queue" else {limit: rate}
    mail = by_customer(system, **options)
    if limit == "queue":
        system.app.queue("default").limit(rate=rate)
    worker = system.worker(knows=["mail"], slots=500)
    system.app.enqueue_many(mail, [("a", number) for number in range(200)])

    def handed_out() -> int:
        return int(system.sql("SELECT count(*) FROM orchestrator.tasks WHERE status = 'dispatched'")[0]["count"])

    def wait_in_vain() -> None:
        """Tick until the allowed tasks are dispatched, then check that later ticks dispatch no more."""
        eventually(lambda: [system.pass_seconds(), handed_out() >= most][-1], "as much as may be unheard of")
        system.pass_seconds(5)
        assert handed_out() == most

    wait_in_vain()
    system.lead(offset=3_600)
    system.settle()
    system.pass_seconds(5)
    assert handed_out() == most
    taken = worker.take()
    assert len(taken) == most
    worker.start(*taken)
    wait_in_vain()
    worker.report(*(Returned(task.id, task.attempt, "no free slot") for task in worker.take()))
    wait_in_vain()


def test_late_starts_consume_rate_tokens_gained_meanwhile(system: System) -> None:
    mail = by_customer(system, rate=Rate(5, per=1_000))
    worker = system.worker(knows=["mail"], slots=50)
    system.app.enqueue_many(mail, [("a", number) for number in range(50)])
    first = take(system, worker)
    assert len(first) == 5
    system.lead(offset=10_000)
    system.settle()
    system.pass_seconds(5)
    assert worker.take() == [], "five are unheard of, and the bucket is full again"
    worker.start(*first)
    system.pass_seconds(5)
    assert worker.take() == [], "five have begun just now"
    system.lead(offset=10_500)
    system.settle()
    assert len(take(system, worker)) == 2


def test_a_rate_limit_works_after_the_clock_is_set_back(system: System) -> None:
    mail = by_customer(system, rate=Rate(20, per=1, burst=1))
    shared = system.app.task(name="shared", total_rate=Rate(20, per=1, burst=1))(lambda: None)
    system.app.queue("default").limit(rate="40/s")
    worker = system.worker(knows=["mail", "shared"], slots=50)
    system.app.enqueue_many(mail, [("a", number) for number in range(10)])
    system.app.enqueue_many(shared, [()] * 10)
    system.pass_seconds()
    first = worker.take()
    assert first
    worker.start(*first)
    system.scheduler._leadership._clock_offset = timedelta(hours=-1)
    started: Counter[str] = Counter()

    def go_on() -> bool:
        system.tick()
        if tasks := worker.take():
            started.update(task.name for task in tasks)
            worker.start(*tasks)
        return min(started["mail"], started["shared"]) >= 3

    eventually(go_on, "both go on")


def test_rate_limits_without_waiting_tasks_are_forgotten(system: System) -> None:
    mail = by_customer(system, rate="1000/s")
    worker = system.worker(knows=["mail"], slots=50)
    system.app.enqueue_many(mail, [(str(number),) for number in range(50)])
    assert len(take(system, worker)) == 50
    system.tick_until(lambda: not system.scheduler.term.lanes.buckets.due)


# -- expiry


def test_a_task_that_has_not_started_in_time_expires(system: System, caplog: pytest.LogCaptureFixture) -> None:
    late = system.job.options(expires=60).enqueue(1)
    delayed = system.job.options(delay=120, expires=60).enqueue(2)
    never = system.job.options(expires=600).enqueue(3)
    system.pass_seconds()
    system.lead(offset=61)
    system.pass_seconds(2)
    assert system.states(late, delayed, never) == ["failed", "failed", "pending"]
    (told,) = (record for record in caplog.records if "TaskExpired" in record.getMessage())
    assert vars(told)["task_name"] == "job"
    assert vars(told)["task_id"] in (late.id, delayed.id)
    assert system.row(late)["reason"] == "expired"
    with pytest.raises(TaskFailed, match="had not started when it expired"):
        late.result(timeout=1)


def test_a_task_that_has_started_does_not_expire(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch(expires=60, retries=3)
    (task,) = worker.take()
    worker.start(task)
    system.lead(offset=61)
    system.pass_seconds()
    assert handle.status() == "running"
    worker.fail(task)
    system.tick()
    assert handle.status() == "pending"
    assert system.row(handle)["expires_at"] is None


# -- queues


def test_a_paused_queue_dispatches_nothing_until_resumed(system: System) -> None:
    worker = system.worker(slots=5)
    system.app.queue("default").pause()
    handle = system.job.enqueue()
    assert take(system, worker) == []
    system.lead()
    system.settle()
    assert (take(system, worker), handle.status()) == ([], "pending")
    system.app.queue("default").resume()
    assert [task.id for task in take(system, worker)] == [raw(handle)]


def test_a_queue_enforces_its_concurrency_and_rate_limits(system: System) -> None:
    worker = system.worker(slots=50)
    queue = system.app.queue("default")
    queue.limit(concurrency=3)
    system.app.enqueue_many(system.job, [(number,) for number in range(20)])
    held = take(system, worker)
    assert len(held) == 3
    worker.succeed(held[0])
    assert len(take(system, worker)) == 1
    queue.limit(rate="5/h")
    assert len(take(system, worker)) == 5
    queue.limit()
    assert len(take(system, worker)) == 11


def test_a_purge_cancels_only_waiting_tasks(system: System) -> None:
    worker = system.worker(slots=2)
    (running,) = system.dispatch()
    system.app.queue("default").pause()
    waiting = [system.job.options(delay=delay).enqueue() for delay in (0, 3600)]
    elsewhere = system.job.options(queue="other").enqueue()
    system.app.queue("default").purge()
    system.pass_seconds()
    assert system.states(running, *waiting, elsewhere) == ["dispatched", "cancelled", "cancelled", "pending"]
    assert worker.take()[0].id == raw(running)


def test_a_purge_cancels_dispatched_tasks_of_an_unserved_queue(system: System) -> None:
    """Formerly these tasks stayed until a worker came, and then ran."""
    worker = system.worker()
    tasks = system.dispatch(3)
    worker.leave()
    system.tick_until(lambda: not system.scheduler.term.fleet.slots("default"))
    system.app.queue("default").purge()
    system.tick_until(lambda: set(system.states(*tasks)) == {"cancelled"})


def test_a_large_purge_is_spread_over_ticks(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formerly other work waited for seconds. Here cancelling 250 tasks takes 0.05 s of the clock."""
    cancel = requests.cancel_by_id

    def slowly(tx: Any, ids: list[bytes]) -> None:
        system.clock.now += 0.05 * len(ids) / 250
        cancel(tx, ids)

    monkeypatch.setattr(requests, "cancel_by_id", slowly)
    system.app.queue("default").pause()
    system.sql(
        "INSERT INTO orchestrator.tasks (id, name, queue, payload, lane) "
        "SELECT gen_random_uuid(), 'job', 'default', '', 'job|' || n FROM generate_series(1, 1000) AS n"
    )
    system.app.queue("default").purge()
    ended = []
    while system.count("inbox"):
        system.tick()
        ended.append(system.count("ended_tasks"))
    assert ended[:4] == [250, 500, 750, 1000]


def test_a_purge_scans_the_open_tasks_once(system: System) -> None:
    """It resumes where it stopped, also under another leader, and spares tasks enqueued after the request."""
    for name in ("default", "other"):
        system.app.queue(name).pause()
    system.tick()
    object.__setattr__(system.settings, "batch", 1)
    tasks = [system.job.options(queue=name).enqueue() for name in ("default", "other") * 10]
    system.app.queue("default").purge()
    late = system.job.enqueue()
    system.tick()
    cancelled = system.count("ended_tasks")
    assert 0 < cancelled < 10
    system.lead()
    system.tick(6)
    assert system.states(*tasks) == ["cancelled", "pending"] * 10
    assert late.status() == "pending"
    assert system.count("inbox") == 0


def test_tasks_being_purged_do_not_start(system: System) -> None:
    """Formerly scanning other queues took seconds, and a queue resumed at once ran all its tasks."""
    worker = system.worker(slots=50)
    system.app.queue("default").pause()
    system.tick()
    object.__setattr__(system.settings, "batch", 1)
    system.app.enqueue_many(system.job.options(queue="other", delay=3600), [()] * 20)
    waiting = system.app.enqueue_many(system.job, [()] * 20)
    system.app.queue("default").purge()
    system.app.queue("default").resume()
    late = system.job.enqueue()
    system.tick(2)
    assert system.count("inbox")
    assert not worker.take()
    system.lead()  # the next leader does not start the tasks either
    system.tick_until(lambda: not system.count("inbox"))
    assert system.states(*waiting) == ["cancelled"] * 20
    system.tick_until(lambda: late.status() == "dispatched")


def test_a_failed_purge_releases_its_queue(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(requests, "purge", fail)
    worker = system.worker()
    system.app.queue("default").purge()
    task = system.job.enqueue()
    system.tick_until(lambda: task.status() == "dispatched")
    assert worker.take()


def test_a_purge_spares_later_tasks_despite_clock_skew(system: System) -> None:
    """Between answers from Postgres the leader estimates the time, and may be slightly ahead."""
    system.app.queue("default").pause()
    system.tick()
    early = system.job.enqueue()
    system.app.queue("default").purge()
    late = system.job.enqueue()
    system.lead(offset=1.0)
    system.tick(2)
    assert system.states(early, late) == ["cancelled", "pending"]


def test_draining_waits_for_the_last_task(system: System) -> None:
    queue = system.app.queue("default")
    shown: list[int] = []
    queue.drain(timeout=1, show=shown.append)
    assert shown == [0]
    system.job.enqueue()
    with pytest.raises(TimeoutError, match=r"'default' still holds 1 tasks after 0.01 s\.$"):
        queue.drain(timeout=0.01)
    system.job.options(eta=datetime(2099, 12, 30, 12, tzinfo=UTC)).enqueue()
    with pytest.raises(TimeoutError, match="1 of them are delayed, the first until 2099-12-30 "):
        queue.drain(timeout=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "Option concurrency: expected a whole number above zero, found 0"),
        ({"total_concurrency": True}, "Option total_concurrency"),
        ({"rate": "often"}, "Option rate: expected a rate like '10/s'"),
        ({"weight": 0}, "Option weight: expected a number from 0.001 to 1000, found 0"),
        ({"concurrency_key": ""}, "Option concurrency_key: expected printable text"),
        ({"expires": -1}, "Option expires: expected more than zero seconds"),
        ({"eta": "tomorrow"}, "Option eta: expected a datetime with a time zone"),
        ({"eta": datetime.max.replace(tzinfo=timezone(timedelta(hours=-14)))}, "Option eta: expected a time before"),
        ({"expires": datetime.max.replace(tzinfo=UTC)}, "Option expires: expected a time before the year 9999"),
        ({"priority": 101}, "Option priority: expected a whole number from -100 to 100"),
    ],
)
def test_invalid_options_are_rejected(system: System, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTask, match=message):
        system.job.options(**options)


def test_an_invalid_computed_key_is_rejected_and_nothing_stored(system: System) -> None:
    mail = by_customer(system)
    with pytest.raises(InvalidTask, match="Option concurrency_key: expected printable text"):
        mail.enqueue("a\x00b")
    assert system.count("tasks") == 0
