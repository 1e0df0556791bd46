"""The guarantees, checked under random sequences of events on a real Postgres and a real Redis.

Clients enqueue in every way, workers claim, finish, fail, return and die, people cancel and retry, time passes, leaders
are replaced, transactions roll back, and Redis is wiped. After each step the database must satisfy the guarantees; at
the end every task must end.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from orchestrator import Duplicate, Handle, Retry
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.domain.tasks.task import Failed, Lost, Returned, Succeeded, TaskError
from tests.emptying import empty
from tests.integration.stage import KEYS, ONE, System

LIMITS = {"two": 2, "one": 1}
ERROR = TaskError("ValueError", "no")


class Promises:
    """A system under test, and the handles that its clients have."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.handles: list[Handle[Any]] = []
        self.offset = 0.0
        self.names = 0
        self.system.redis.flushall()
        with self.system.engine.begin() as connection:
            empty(connection)
        self.system.workers.clear()
        self.system.lead()
        self.hire()

    # -- clients

    def enqueue(self, count: int, options: dict[str, Any]) -> None:
        self.handles += [self.system.job.options(**options).enqueue(number) for number in range(count)]

    def enqueue_limited(self, name: str, key: str, queue: str) -> None:
        task = self.system.app.tasks[name].options(concurrency_key=key, queue=queue)
        self.handles.append(task.enqueue())

    def enqueue_unique(self, key: str, scope: Any, policy: Any) -> None:
        task = self.system.job.options(unique_key=key, unique_for=scope, on_duplicate=policy)
        with suppress(Duplicate):  # the task to replace was dispatched already
            handle = task.enqueue()
            if handle not in self.handles:
                self.handles.append(handle)

    def enqueue_timed(self, options: dict[str, Any]) -> None:
        self.handles.append(self.system.job.options(**options).enqueue())

    def enqueue_in_a_transaction(self, committed: bool) -> None:
        with self.system.engine.connect() as connection:
            transaction = connection.begin()
            handle = self.system.job.enqueue_in(connection)
            if committed:
                transaction.commit()
                self.handles.append(handle)
            else:
                transaction.rollback()

    def ask(self, place: int, verb: str) -> None:
        if not self.handles:
            return
        handle = self.handles[place % len(self.handles)]
        allowed = ("failed", "skipped") if verb == "retry" else ("pending", "dispatched", "running")
        if handle.status() in allowed:
            with suppress(Duplicate):  # a retry while another task holds the key
                getattr(handle, verb)()

    # -- workers

    def hire(self) -> None:
        self.names += 1
        for queue in ("default", "mail"):
            self.system.worker(f"{queue}-{self.names}", knows=["job", "one", "two"], slots=6, queue=queue)

    def work(self, place: int, outcome: str) -> None:
        workers = [worker for worker in self.system.workers if worker.alive]
        if not workers:
            return
        worker = workers[place % len(workers)]
        if self.system.redis.get(KEYS.generation) is None:
            return
        for task in worker.take()[:2]:
            reports: dict[str, list[Any]] = {
                "succeed": [Succeeded(task.id, task.attempt, 0.1, ONE)],
                "fail": [Failed(task.id, task.attempt, 0.1, ERROR)],
                "lose": [Lost(task.id, task.attempt, alone=True)],
                "return": [Returned(task.id, task.attempt, "worker stops")],
                "twice": [Failed(task.id, task.attempt, 0.1, ERROR), Succeeded(task.id, task.attempt, 0.1, ONE)],
            }
            worker.report(*reports[outcome])

    def kill_a_worker(self) -> None:
        for worker in self.system.workers[:-2]:
            worker.die()
        self.hire()
        self.system.make_old()

    # -- the leader and its stores

    def tick(self, times: int) -> None:
        self.system.pass_seconds()
        self.system.tick(times)

    def another_leader(self, seconds: float) -> None:
        self.offset += seconds
        self.system.lead(offset=self.offset)

    def roll_a_tick_back(self) -> None:
        """Make the leader forget its plans and lanes, as after a connection lost at the commit."""
        self.system.scheduler.term.lanes.rolled_back()
        self.system.scheduler.term.dags.rolled_back()

    def wipe_redis(self) -> None:
        self.system.redis.flushall()

    # -- guarantees

    def every_task_is_somewhere_once(self) -> None:
        rows = self.system.sql(
            "SELECT id::text FROM orchestrator.tasks UNION ALL SELECT id::text FROM orchestrator.ended_tasks"
        )
        found = Counter(row["id"] for row in rows)
        assert found == Counter({handle.id: 1 for handle in self.handles})

    def limits_hold(self) -> None:
        rows = self.system.sql(
            "SELECT lane, count(*) AS count FROM orchestrator.tasks"
            " WHERE status IN ('dispatched', 'running') AND lane IS NOT NULL GROUP BY lane"
        )
        for row in rows:
            assert row["count"] <= LIMITS[row["lane"].partition("|")[0]], row

    def keys_are_unique_and_owned(self) -> None:
        rows = self.system.sql(
            "SELECT k.key, k.scope, t.status FROM orchestrator.unique_keys k"
            " LEFT JOIN orchestrator.tasks t ON t.id = k.task_id"
        )
        for row in rows:
            wanted = {"pending": ["pending"], "running": ["pending", "dispatched", "running"]}.get(row["scope"])
            assert wanted is None or row["status"] in wanted, row
        self.open_tasks_have_their_keys()

    def open_tasks_have_their_keys(self) -> None:
        """An open task holds its unique key, also after a retry; with scope `pending` only until it is claimed."""
        rows = self.system.sql(
            "SELECT t.id::text, t.status, t.options->>'unique_for' AS scope, k.task_id IS NOT NULL AS has_it"
            "  FROM orchestrator.tasks t"
            "  LEFT JOIN orchestrator.unique_keys k ON k.key = t.unique_key AND k.task_id = t.id"
            " WHERE t.unique_key IS NOT NULL AND t.options->>'unique_for' IS NOT NULL"
        )
        for row in rows:
            assert row["has_it"] or row["scope"] == "pending", row

    def check(self) -> None:
        """Check the guarantees against the database."""
        self.every_task_is_somewhere_once()
        self.limits_hold()
        self.keys_are_unique_and_owned()

    def finish(self) -> None:
        """Run all tasks to their end."""
        self.another_leader(60.0)
        self.hire()

        def ended() -> bool:
            for worker in self.system.workers:
                if worker.alive:
                    worker.take()
                    worker.report(*(Succeeded(task, attempt, 0.1, ONE) for task, attempt in list(worker.held)))
            self.system.make_old()
            self.system.tick()
            return self.system.count("tasks") == 0

        self.system.pass_seconds()
        self.system.tick_until(ended)
        assert {handle.status() for handle in self.handles} <= {str(state) for state in ENDED_TASK_STATES}
        self.system.tick_until(lambda: self.system.count("inbox") == 0)
        assert self.system.sql("SELECT key FROM orchestrator.unique_keys WHERE scope <> 'period'") == []
        for scheduler in self.system.schedulers:
            scheduler._leadership.disconnect()
        self.system.schedulers.clear()


def step(method: Any, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, dict[str, Any]]]:
    return st.tuples(st.just(method), st.fixed_dictionaries(arguments))


STEPS = st.one_of(
    step(
        Promises.enqueue,
        count=st.integers(1, 3),
        options=st.sampled_from([{}, {"retries": 2}, {"priority": 5}, {"queue": "mail"}]),
    ),
    step(
        Promises.enqueue_limited,
        name=st.sampled_from(["one", "two"]),
        key=st.sampled_from("ab"),
        queue=st.sampled_from(["default", "mail"]),
    ),
    step(
        Promises.enqueue_unique,
        key=st.sampled_from("xy"),
        scope=st.sampled_from(["pending", "running", 30.0]),
        policy=st.sampled_from(["return", "replace"]),
    ),
    step(
        Promises.enqueue_timed,
        options=st.sampled_from([{"delay": 20}, {"expires": 20}, {"delay": 20, "expires": 10}]),
    ),
    step(Promises.enqueue_in_a_transaction, committed=st.booleans()),
    step(Promises.ask, place=st.integers(0, 100), verb=st.sampled_from(["cancel", "retry"])),
    *[
        step(
            Promises.work,
            place=st.integers(0, 10),
            outcome=st.sampled_from(["succeed", "fail", "lose", "return", "twice"]),
        )
    ]
    * 3,
    *[step(Promises.tick, times=st.integers(1, 4))] * 3,
    step(Promises.kill_a_worker),
    step(Promises.another_leader, seconds=st.sampled_from([0.0, 15.0])),
    step(Promises.roll_a_tick_back),
    step(Promises.wipe_redis),
)


@pytest.fixture
def promised(system: System) -> System:
    for name, limit in LIMITS.items():
        system.app.task(name=name, concurrency=limit, retries=Retry(max=1, base=0.01))(lambda: None)
    return system


@settings(
    max_examples=20,
    phases=[Phase.generate],  # an example takes a second, and its steps are printed; shrinking would take an hour
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(plan=st.lists(STEPS, min_size=10, max_size=40))
@pytest.mark.long
def test_the_guarantees_hold_in_random_sequences_of_events(
    promised: System, plan: list[tuple[Any, dict[str, Any]]]
) -> None:
    promises = Promises(promised)
    for method, arguments in plan:
        note(f"{method.__name__} {arguments}")
        method(promises, **arguments)
        promises.check()
    promises.finish()
