"""All enqueue methods write the same row, whatever the options."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from orchestrator import InvalidTask, Orchestrator, SchemaError, Unavailable
from orchestrator.sdk.tasks.task import Task
from orchestrator.store import copying, database
from tests.emptying import empty

Enqueue = Callable[[Task[..., Any], Any], str]


@pytest.fixture
def app(database_url: str, redis_url: str) -> Iterator[Orchestrator]:
    app = Orchestrator(database_url=database_url, redis_url=redis_url)
    yield app
    app.close()


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine_for(database_url)
    yield engine
    with engine.begin() as connection:
        empty(connection)
    engine.dispose()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"queue": "a/b", "priority": -5},
    {"delay": 60},
    {"eta": datetime(2020, 1, 1, tzinfo=UTC), "expires": 60},
    {"timeout": 3, "retries": 2},
    {"concurrency_key": "100% 'o\\' :name %(id)s"},
    {"concurrency_key": "acme", "concurrency": 2, "delay": 60},
    {"expires": 60, "store_result": False, "priority": 3, "concurrency": 1, "rate": "5/s"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "none")
def test_all_enqueue_methods_write_the_same_row(app: Orchestrator, engine: Engine, options: dict[str, Any]) -> None:
    follower = app.task(name="follower")(lambda value: value)
    task = app.task(name="job")(lambda value: value)

    def alone(task: Task[..., Any], value: Any) -> str:
        return task.enqueue(value).id

    def in_transaction(task: Task[..., Any], value: Any) -> str:
        with engine.begin() as connection:
            return task.enqueue_in(connection, value).id

    def among_many(task: Task[..., Any], value: Any) -> str:
        return app.enqueue_many(task, [(value,)])[0].id

    for chosen in (options, options | {"on_success": follower}):
        rows = [_row(engine, way(task.options(**chosen), b"\0\\x\t")) for way in (alone, in_transaction, among_many)]
        assert rows[0] == rows[1] == rows[2]


_SELECT = text(
    """
    SELECT name, queue, priority, status, blockers, payload, options, lane, callbacks, run_id, position, unique_key,
           round(extract(epoch FROM wake_at - created_at)) AS delay,
           round(extract(epoch FROM expires_at - created_at)) AS expires,
           (SELECT count(*) FROM orchestrator.inbox WHERE kind = 'arrival' AND target = t.id) AS arrivals
      FROM orchestrator.tasks t WHERE id = CAST(:id AS uuid)
    """
)


def _row(engine: Engine, identifier: str) -> dict[str, Any]:
    with engine.connect() as connection:
        found = dict(connection.execute(_SELECT, {"id": identifier}).mappings().one())
    found["payload"] = bytes(found["payload"])
    return found


def test_a_statement_timeout_is_reported_by_every_enqueue_method(
    database_url: str, redis_url: str, engine: Engine
) -> None:
    app = Orchestrator(database_url=f"{database_url}&options=-cstatement_timeout%3D100", redis_url=redis_url)
    task = app.task(name="job")(lambda: None)
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE orchestrator.tasks"))
        for enqueue in (task.enqueue, lambda: app.enqueue_many(task, [()]), lambda: app.start_many(task, [()])):
            with pytest.raises(Unavailable, match="statement timeout.* `orchestrator status` shows which"):
                enqueue()
    for enqueue in (task.enqueue, lambda: app.enqueue_many(task, [()]), lambda: app.start_many(task, [()])):
        enqueue()
    app.close()


def test_bulk_enqueue_of_limited_tasks_needs_few_extra_statements(
    app: Orchestrator, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly each task notified the leader, which took ten times as long."""
    count, copied, sent = 1_000, list[int](), list[str]()
    limits: dict[str, dict[str, Any]] = {
        "plain": {},
        "limited": {"concurrency": 2, "rate": "5/s"},
        "few-keys": {"concurrency": 1, "concurrency_key": lambda value: f"k{value % 50}"},
        "many-keys": {"concurrency": 1, "rate": "5/s", "concurrency_key": lambda value: f"k{value}"},
    }
    copy = copying.copy

    def note_copy(connection: Connection, sql: str, texts: Iterable[str]) -> None:
        made = [*texts]
        copied.append(sum(text.count("\n") for text in made))
        copy(connection, sql, made)

    def note(_: object, __: object, statement: str, *___: object) -> None:
        sent.append(statement)

    monkeypatch.setattr(copying, "copy", note_copy)
    event.listen(Engine, "before_cursor_execute", note)
    found = {}
    try:
        for name, options in limits.items():
            task = app.task(name=name, **options)(lambda value: value)
            copied.clear()
            sent.clear()
            app.enqueue_many(task, [(number,) for number in range(count)])
            with engine.begin() as connection:
                taken = (len(sent), connection.execute(text("DELETE FROM orchestrator.inbox")).rowcount)
            assert copied == [count]
            found[name] = taken
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    plain = found["plain"][0]
    assert found == {
        "plain": (plain, 0),
        "limited": (plain + 1, 1),
        "few-keys": (plain + 1, 50),
        "many-keys": (plain + 1, 1),
    }


def test_a_wrong_number_of_shards_is_reported(app: Orchestrator) -> None:
    many = app.at(shards=3)
    task = app.task(name="add")(len)
    calls: list[Callable[[], object]] = [
        lambda: task.via(many).enqueue("x"),
        lambda: asyncio.run(task.via(many).aenqueue("x")),
        lambda: many.enqueue_many(task, [("x",)]),
        lambda: many.handle("01a1ef17-d649-78a4-8ae4-9af0c05439bc").status(),
        lambda: many.queue("default").resume(),
    ]
    try:
        for call in calls:
            with pytest.raises(SchemaError, match=r"^Setting shards is 3, and the database has 1\..*at\(…, shards=1\)"):
                call()
    finally:
        many.close()
    empty_database = app.at(shards=3, namespace="nowhere")
    with pytest.raises(SchemaError, match="no orchestrator tables in the namespace 'nowhere'"):
        task.via(empty_database).enqueue("x")
    empty_database.close()


@pytest.mark.parametrize("lasts", [copying._MAX_DURATION, 0.0], ids=["one", "many"])
def test_bulk_enqueue_keeps_order_and_options_across_copies(
    app: Orchestrator, engine: Engine, monkeypatch: pytest.MonkeyPatch, lasts: float
) -> None:
    monkeypatch.setattr(copying, "_MAX_DURATION", lasts)
    task = app.task(name="job")(lambda value: value)
    kinds: list[dict[str, Any]] = [{}, {"delay": 60}, {"expires": 60}, {"unique_key": "a"}, {"concurrency_key": "acme"}]
    made = [task.options(**kinds[number // 200])._new((number,), {}, None, None, None) for number in range(1_000)]
    created = app._client.backend.tasks.enqueue_many(iter(made))
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT id, wake_at, expires_at, unique_key, lane, created_at FROM orchestrator.tasks")
        )
        found = {row.id.bytes: row for row in rows}
    assert created == [task.id if number // 200 != 3 else made[600].id for number, task in enumerate(made)]
    assert {*created} == found.keys()
    for number, id_ in enumerate(created):
        row, kind = found[id_], kinds[number // 200]
        assert (row.unique_key is not None, row.lane is not None) == ("unique_key" in kind, "concurrency_key" in kind)
        assert (row.wake_at and (row.wake_at - row.created_at).total_seconds()) == kind.get("delay")
        assert (row.expires_at and (row.expires_at - row.created_at).total_seconds()) == kind.get("expires")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("after", [0, 100, 2_000])
def test_an_error_of_the_callers_iterator_is_raised_unchanged(
    app: Orchestrator, engine: Engine, error: type[BaseException], after: int
) -> None:
    task = app.task(name="job")(lambda value: value)

    def items() -> Iterator[int]:
        yield from range(after)
        raise error("stop")

    with pytest.raises(error, match="stop"):
        app.start_many(task, items())
    assert app.start_many(task, [1]).progress().counters.total == 1
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM orchestrator.tasks")).scalar_one() == 1


@pytest.fixture
def _interrupts_raise() -> Iterator[None]:
    """Install Python's own handler: a command that another test ran in this process may have left its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts_raise")
def test_an_interrupt_during_bulk_enqueue_raises_keyboard_interrupt(app: Orchestrator, engine: Engine) -> None:
    """Python runs signal handlers when the driver returns from Postgres, to read the next calls."""
    task = app.task(name="job")(lambda value: value)
    for seconds in (0.01, 0.02, 0.03, 0.05, 0.08, 0.13):
        handler = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            with pytest.raises(KeyboardInterrupt):
                app.enqueue_many(task, [("x" * 1_000,)] * 200_000)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
    app.enqueue_many(task, [(1,)])
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM orchestrator.tasks")).scalar_one() == 1


@pytest.mark.parametrize("calls", [None, 5])
def test_bulk_enqueue_rejects_a_value_that_is_not_a_list(app: Orchestrator, calls: Any) -> None:
    task = app.task(name="job")(lambda value: value)
    for enqueue in (app.enqueue_many, app.start_many):
        with pytest.raises(InvalidTask, match="expected a list of calls"):
            enqueue(task, calls)


def test_an_invalid_call_in_a_bulk_enqueue_stores_nothing(app: Orchestrator, engine: Engine) -> None:
    task = app.task(name="job")(lambda value: value)
    with pytest.raises(InvalidTask, match=r"calls\[2000\]: Task 'job': too many positional"):
        app.enqueue_many(task, [*((number,) for number in range(2_000)), (1, 2)])
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM orchestrator.tasks")).scalar_one() == 0


def test_a_slow_iterator_does_not_count_as_database_time(database_url: str, redis_url: str) -> None:
    app = Orchestrator(database_url=database_url, redis_url=redis_url, database_timeout=1)
    task = app.task(name="job")(lambda value: value)

    def items() -> Iterator[int]:
        for number in range(1_000):
            if number in (300, 600):
                time.sleep(1.5)  # longer than `database_timeout`
            yield number

    assert app.start_many(task, items()).progress().counters.total == 1_000
    app.close()
