"""Histories too large for one message, sent in pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from redis.exceptions import ConnectionError
from sqlalchemy import Connection

from orchestrator import WorkflowContext, WorkflowHandle
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.history import SignalReceived
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.store.code import turns
from orchestrator.transport.pages import Pages
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from tests.integration.code_stage import activation, run_row
from tests.integration.planning import Leader, nodes, rows_read
from tests.integration.stage import KEYS, System, raw


class Code:
    """A worker, and the workflow code in its memory."""

    def __init__(self, system: System, name: str) -> None:
        self.worker = system.worker(name, knows=("job", "gathering"), slots=100)
        self._pages = Pages(system.redis, KEYS)
        self._runner = Runner(system.app, self, Allowed(system.app, ()))  # type: ignore[arg-type]

    def close(self) -> None:
        self._runner._engine.close()

    def page(self, job: Job, number: int) -> bytes | None:
        return self._pages.read(job.dispatch.id, job.dispatch.attempt, number)

    def turns(self) -> list[Dispatch]:
        return [task for task in self.worker.take() if task.is_turn_task]

    def act(self, dispatch: Dispatch) -> Activated:
        """Run a turn as a worker process does, and report it."""
        job = Job(dispatch, Bundle("", "", "", 1), 0, 0.0)
        job.begin(0.0)
        report = self._runner.run(job)
        assert isinstance(report, Activated)
        self.worker.report(report)
        return report


@pytest.fixture
def code(system: System) -> Iterator[Code]:
    with closing(Code(system, "w1")) as code:
        yield code


@pytest.fixture
def gathering(system: System) -> CodeWorkflow[..., Any]:
    job = system.job

    @system.app.workflow(name="gathering")
    async def gathering(ctx: WorkflowContext, count: int) -> list[int]:
        results = await asyncio.gather(*(job.schedule(number) for number in range(count)))
        return [len(str(result)) for result in results]

    return gathering


@pytest.fixture
def pages_of_a_thousand_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.domain.code.activation.PAGE", 1_000)
    monkeypatch.setattr("orchestrator.scheduler.code.paging.PAGE", 1_000)


def result(size: int) -> bytes:
    return msgspec.msgpack.encode("x" * size)


def begin(
    system: System, code: Code, workflow: CodeWorkflow[..., Any], *, results: int, size: int, runs: int = 1
) -> list[WorkflowHandle[Any]]:
    """Start runs, and let all their tasks end while their code has no turn."""
    handles = [workflow.start(results) for _ in range(runs)]
    system.pass_seconds()
    for turn in code.turns():
        code.act(turn)
    system.tick()
    tasks = code.worker.take()
    assert len(tasks) == results * runs
    for start in range(0, len(tasks), 10):
        code.worker.succeed(*tasks[start : start + 10], result=result(size))
    system.tick()
    return handles


def pages(system: System) -> list[bytes]:
    return list(system.redis.scan_iter(match="*:pages:*"))


def pass_time(system: System) -> None:
    """Make postponed turns due."""
    system.sql("UPDATE orchestrator.tasks SET wake_at = now() WHERE wake_at IS NOT NULL")


def next_turn(system: System, code: Code) -> Dispatch:
    """Tick until the code has a turn."""
    found: list[Dispatch] = []

    def has_turn() -> bool:
        found.extend(code.turns())
        return bool(found)

    system.tick_until(has_turn)
    (turn,) = found
    return turn


@pytest.mark.long
def test_a_history_of_fifty_megabytes_outlives_its_worker(
    system: System, gathering: CodeWorkflow[..., Any], code: Code
) -> None:
    first, second = code, Code(system, "w2")
    second.worker.draining = True
    (handle,) = begin(system, first, gathering, results=50, size=990_000)
    turn = next_turn(system, first)
    assert activation(turn).after > 0
    assert 5 < activation(turn).pages <= 50, "as many as a tick takes in"
    assert len(turn.payload) < 1_000
    first.worker.die()
    second.worker.draining = False
    system.make_old()
    system.tick_until(lambda: system.row(turn.id)["attempt"] > turn.attempt)
    turn = next_turn(system, second)
    assert activation(turn).after == 0
    assert activation(turn).pages >= 50
    assert len(pages(system)) == 1
    second.act(turn)
    system.tick()
    assert handle.result(0) == [990_000] * 50
    assert pages(system) == []


def test_a_history_too_large_for_redis_is_removed_and_sent_later(
    system: System, gathering: CodeWorkflow[..., Any], code: Code, caplog: pytest.LogCaptureFixture
) -> None:
    (handle,) = begin(system, code, gathering, results=20, size=990_000)
    turn = next_turn(system, code)
    code.worker.report(Activated(turn.id, turn.attempt, 0.1, missing=True))
    system.tick()
    assert pages(system) == []
    used: Any = system.redis.info("memory")
    try:
        system.redis.config_set("maxmemory", used["used_memory"] + 10_000_000)
        pass_time(system)
        system.tick_until(lambda: "run.history_too_large" in caplog.text)
        system.tick_until(lambda: system.row(raw(handle))["attempt"] > turn.attempt and not pages(system))
        system.make_old()
        system.tick_until(lambda: system.row(raw(handle))["attempt"] > turn.attempt + 1)
        assert code.turns() == []
    finally:
        system.redis.config_set("maxmemory", 0)
    system.make_old()
    code.act(next_turn(system, code))
    system.tick()
    assert handle.result(0) == [990_000] * 20


# -- the same with small pages

small_pages = pytest.mark.usefixtures("pages_of_a_thousand_bytes")


@pytest.fixture
def handle(system: System, gathering: CodeWorkflow[..., Any], code: Code) -> WorkflowHandle[Any]:
    (handle,) = begin(system, code, gathering, results=20, size=600)
    return handle


def finish(system: System, code: Code, handle: WorkflowHandle[Any]) -> None:
    code.act(next_turn(system, code))
    system.tick()
    assert handle.result(0) == [600] * 20
    assert pages(system) == []


@small_pages
def test_a_page_holds_several_events(system: System, gathering: CodeWorkflow[..., Any], code: Code) -> None:
    (handle,) = begin(system, code, gathering, results=20, size=200)
    turn = next_turn(system, code)
    assert 4 <= activation(turn).pages <= 7
    code.act(turn)
    system.tick()
    assert handle.result(0) == [200] * 20


@small_pages
def test_sending_pages_over_many_ticks_keeps_the_attempt(
    system: System, gathering: CodeWorkflow[..., Any], code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduler.code.paging._MAX_BYTES_PER_TICK", 1)
    (handle,) = begin(system, code, gathering, results=20, size=600)
    system.make_old()
    attempt = system.row(raw(handle))["attempt"]
    system.pass_seconds(15)  # three times the TTL
    assert code.turns() == []
    assert system.scheduler.term.due_in == 0.0
    assert system.row(raw(handle))["attempt"] == attempt
    finish(system, code, handle)
    assert system.row(raw(handle))["attempt"] == attempt


def check_sent_again(system: System, code: Code, handle: WorkflowHandle[Any], turn: Dispatch) -> None:
    assert code.act(turn).missing
    system.pass_seconds(2)
    assert code.turns() == []  # not at once
    pass_time(system)
    finish(system, code, handle)


@small_pages
@pytest.mark.parametrize("rubbish", [None, b"", b"\xc1", b"\x93\x01\x02\x03"])
def test_a_missing_or_overwritten_page_is_sent_again(
    system: System, code: Code, handle: WorkflowHandle[Any], rubbish: bytes | None
) -> None:
    turn = next_turn(system, code)
    (key,) = pages(system)
    if rubbish is None:
        system.redis.hdel(key, "3")
    else:
        system.redis.hset(key, "3", rubbish)
    check_sent_again(system, code, handle, turn)


@small_pages
def test_pages_whose_key_was_overwritten_are_sent_again(
    system: System, gathering: CodeWorkflow[..., Any], code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduler.code.paging._MAX_BYTES_PER_TICK", 1)
    (handle,) = begin(system, code, gathering, results=20, size=600)
    (key,) = pages(system)
    system.redis.set(key, "mine")
    turn = next_turn(system, code)
    check_sent_again(system, code, handle, turn)


@small_pages
def test_pages_are_sent_again_after_redis_lost_all_data(
    system: System, code: Code, handle: WorkflowHandle[Any]
) -> None:
    next_turn(system, code)
    code.worker.held.clear()
    system.redis.flushall()
    system.pass_seconds()
    finish(system, code, handle)


@small_pages
def test_a_redis_failure_between_two_pages_is_retried(
    system: System,
    gathering: CodeWorkflow[..., Any],
    code: Code,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page whose write got no answer may or may not have been written."""
    really, failures = Pages.write, iter([False, False, True, False, True])

    def write(self: Pages, *arguments: Any) -> None:
        really(self, *arguments)
        if next(failures, False):
            raise ConnectionError

    monkeypatch.setattr(Pages, "write", write)
    (handle,) = begin(system, code, gathering, results=20, size=600)
    finish(system, code, handle)
    assert next(failures, None) is None


@small_pages
def test_a_new_leader_sends_the_pages_of_a_dead_leader_again(
    system: System, gathering: CodeWorkflow[..., Any], code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduler.code.paging._MAX_BYTES_PER_TICK", 1)
    (handle,) = begin(system, code, gathering, results=20, size=600)
    attempt = system.row(raw(handle))["attempt"]
    assert len(pages(system)) == 1
    monkeypatch.undo()
    system.lead()
    system.make_old()
    system.tick_until(lambda: system.row(raw(handle))["attempt"] > attempt)
    code.act(next_turn(system, code))
    system.tick()
    assert handle.result(0) == [600] * 20
    (left,) = pages(system)  # pages of the attempt that no worker received
    assert 0 < system.redis.ttl(left) <= 3_600


@small_pages
def test_a_run_is_terminated_while_its_pages_are_sent(
    system: System, gathering: CodeWorkflow[..., Any], code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduler.code.paging._MAX_BYTES_PER_TICK", 1)
    (handle,) = begin(system, code, gathering, results=20, size=600)
    handle.terminate()
    system.pass_seconds(30)
    assert handle.status() == "terminated"
    assert code.turns() == []
    assert pages(system) == []


@small_pages
def test_histories_without_space_wait_for_their_worker(
    system: System, gathering: CodeWorkflow[..., Any], code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.domain.code.activation.MAX_IN_PAGES", 1)
    handles = begin(system, code, gathering, results=20, size=600, runs=3)
    waiting = "SELECT worker, wake_at IS NOT NULL AS later FROM orchestrator.tasks WHERE status = 'pending'"
    for left in (2, 1, 0):
        turn = next_turn(system, code)
        assert [dict(row) for row in system.sql(waiting)] == [{"worker": "w1", "later": True}] * left
        assert len(pages(system)) == 1
        assert activation(turn).after > 0
        code.act(turn)
        pass_time(system)
    system.tick()
    assert [handle.result(0) for handle in handles] == [[600] * 20] * 3


@small_pages
def test_the_messages_of_a_tick_are_limited(
    system: System, gathering: CodeWorkflow[..., Any], code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.domain.code.activation.MAX_IN_MESSAGES", 1)
    handles = [gathering.start(0) for _ in range(3)]
    system.pass_seconds()
    assert len(code.turns()) == 1
    assert sorted(system.row(raw(handle))["status"] for handle in handles) == ["dispatched", "pending", "pending"]


@small_pages
def test_a_run_whose_history_can_never_be_sent_is_stuck(
    system: System, code: Code, handle: WorkflowHandle[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = next_turn(system, code)
    monkeypatch.setattr("orchestrator.domain.code.activation.MAX_HISTORY", 10_000)
    system.sql("UPDATE orchestrator.runs SET cached = 0")  # the whole history must be sent
    code.worker.report(Activated(turn.id, turn.attempt, 0.1, missing=True))
    system.tick()
    pass_time(system)
    system.pass_seconds()
    assert handle.status() == "stuck"
    assert run_row(system, handle)["stuck"]["kind"] == "HistoryTooLong"
    monkeypatch.undo()
    handle.retry()
    system.tick(2)
    finish(system, code, handle)


# -- query plans


def test_only_the_histories_of_the_claimed_runs_are_read(system: System) -> None:
    """Of runs in a worker's memory, only new events are read, even without statistics."""
    system.sql(
        "INSERT INTO orchestrator.runs"
        " (id, name, status, total, open, workflow, version, code, last_event, cached, shown)"
        " SELECT CAST(md5(CAST(n AS text)) AS uuid), 'r', 'running', 0, 0, 'r', 1, true, 1000, 1, 995"
        "   FROM generate_series(1, 50) AS n"
    )
    data = msgspec.msgpack.encode(SignalReceived("s", bytes(200)))
    system.sql(
        "INSERT INTO orchestrator.histories (run_id, number, at, kind, data)"
        " SELECT r.id, n, now(), 'signal_received', CAST(:data AS bytea)"
        "   FROM orchestrator.runs r, generate_series(1, 1000) AS n",
        data=data,
    )
    ids = [row["id"].bytes for row in system.sql("SELECT id FROM orchestrator.runs ORDER BY id LIMIT 10")]
    with system.scheduler._leadership.reading() as connection:
        found = turns.unshown(connection, dict.fromkeys(ids, False))
        assert [(run.id, run.after, run.through, run.cached, run.size) for run in found] == [
            (run, 995, 1000, 1, 5 * (len(data) + 32)) for run in ids
        ]
        assert [[event.number for event in run.events or ()] for run in found] == 10 * [list(range(996, 1001))]
        assert [run.events for run in turns.unshown(connection, dict.fromkeys(ids, True))] == 10 * [None]
        long = found[0]._replace(after=0)
        cases: list[tuple[Callable[[Connection], object], int]] = [
            (lambda connection: turns.unshown(connection, dict.fromkeys(ids, False)), 110),
            (lambda connection: turns.unshown(connection, dict.fromkeys(ids, True)), 10_010),
            (lambda connection: turns.events(connection, found), 50),
            (lambda connection: turns.page(connection, long, 400, 10_000), 600),
        ]
        for call, most in cases:
            reads = [node for node in nodes(Leader(connection, []).plan(call)) if node.get("Relation Name") is not None]
            assert "Seq Scan" not in {node["Node Type"] for node in reads}
            assert sum(map(rows_read, reads)) <= most
