"""Compositions on a real Postgres and Redis; tasks run in this process as their messages arrive."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, event

from orchestrator import (
    Composition,
    CompositionHandle,
    Duplicate,
    Handle,
    InvalidTask,
    InvalidWorkflow,
    Orchestrator,
    OrchestratorError,
    PayloadError,
    ResultTimeout,
    RunFailed,
    Task,
    TaskFailed,
    WrongState,
    chain,
    chord,
    group,
)
from orchestrator.domain.dag import composed
from orchestrator.domain.dag.definition import Definition, Hook, Step
from orchestrator.domain.ids import derived_id
from orchestrator.domain.tasks.obstacles import PAYLOAD_STORE
from orchestrator.domain.tasks.outcomes import Report
from orchestrator.domain.tasks.task import Dispatch, Enqueued, Failed, NewTask, Succeeded, TaskError
from orchestrator.references import Reference
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.context import enter_task
from orchestrator.sdk.values.payload import decode_call, encode_value
from orchestrator.sealing import key_name
from orchestrator.settings import load_settings
from orchestrator.store.dag import plans as dags
from tests.integration.serving import serving
from tests.integration.stage import System, fresh_system


class Tasks:
    """Tasks of an application, and a worker that runs them in this process."""

    def __init__(self, system: System, app: Orchestrator | None = None) -> None:
        self.system = system
        self.app = app or system.app
        task = self.app.task
        self.add: Task[[int, int], int] = task(name="shop.add")(lambda one, two: one + two)
        self.double: Task[[int], int] = task(name="shop.double")(lambda number: 2 * number)
        self.length: Task[..., int] = task(name="shop.length")(len)
        self.total: Task[[list[int]], int] = task(name="shop.total")(sum)
        self.join: Task[..., list[Any]] = task(name="shop.join")(
            lambda *parts, **named: [*parts, *sorted(named.items())]
        )
        self.fail: Task[..., None] = task(name="shop.fail", retries=0)(self._fail)
        self.odd: Task[..., Any]
        self.nothing: Task[..., None]
        self.calls: list[tuple[str, Any]] = []
        self.broken = True
        self.worker = system.worker(knows=[*self.app.tasks, key_name(PAYLOAD_STORE)], slots=1_000)
        system.pass_seconds()

    def _fail(self, value: Any = None) -> Any:
        if self.broken:
            raise ValueError(f"no {value}")
        return value

    def run(self, dispatch: Dispatch) -> Report:
        """Call the function of a task as a worker does."""
        task = self.app.tasks[dispatch.name]
        arguments, keywords, *_ = decode_call(dispatch.payload)
        self.calls.append((dispatch.name, [*arguments, *keywords.values()]))
        try:
            value = task.function(*arguments, **keywords)
        except Exception as error:  # noqa: BLE001
            return Failed(dispatch.id, dispatch.attempt, 0.1, TaskError(type(error).__name__, str(error)), True)
        return Succeeded(dispatch.id, dispatch.attempt, 0.1, encode_value(value, "it", 10**6))

    def until_ended(self, *runs: CompositionHandle[Any]) -> None:
        """Run tasks until these runs have ended."""
        for _ in range(200):
            self.system.pass_seconds()
            if taken := self.worker.take():
                self.worker.report(*map(self.run, taken))
            elif all(run.status() in ("success", "failed", "cancelled") for run in runs):
                return
        raise AssertionError([run.status() for run in runs])

    def result(self, composition: Composition[Any]) -> Any:
        run = composition.start()
        self.until_ended(run)
        return run.result()


class FakeRuntime(Mock):
    """A fake task runtime: it reports enqueued tasks at once and waits for the leader's answers."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__()
        self.tasks = tasks
        self.number = 0

    def next_id(self) -> bytes:
        self.number += 1
        return bytes(15) + bytes([self.number])

    def enqueue(self, tasks: Sequence[NewTask]) -> Mapping[bytes, bytes]:
        self.tasks.worker.report(Enqueued(list(tasks)))
        self.tasks.system.pass_seconds(2)
        answers = self.tasks.worker._streams.key_holders([task.id for task in tasks])
        assert all(answer.error is None for answer in answers.values()), answers
        return {task: answer.id for task, answer in answers.items()}


@pytest.fixture
def tasks(system: System) -> Tasks:
    return Tasks(system)


CASES: dict[str, tuple[Callable[[Tasks], Composition[Any]], Any]] = {
    "one call": (lambda t: t.add.s(1, 2), 3),
    "chain": (lambda t: chain(t.add.s(1, 2), t.add.s(10), t.double.s()), 26),
    "operator": (lambda t: t.add.s(1, 2) | t.double.s() | t.double.s(), 12),
    "immutable": (lambda t: chain(t.add.s(1, 2), t.add.si(3, 4), t.double.s()), 14),
    "names": (
        lambda t: chain(t.join.s(1, b=2), t.join.s(2, c=b"x", a=None)), [[1, ["b", 2]], 2, ["a", None], ["c", b"x"]],
    ),
    "alike": (lambda t: group(t.add.s(1, 2), t.add.s(3, 4)), [3, 7]),
    "unlike": (lambda t: group(t.add.s(1, 2), t.double.s(4)), [3, 8]),
    "group of one": (lambda t: group(t.double.s(4)), [8]),
    "chord": (lambda t: chord(group(t.double.s(n) for n in range(5)), t.total.s()), 20),
    "chord of unlike": (lambda t: chord([t.double.s(1), t.add.s(1, 2)], t.total.s()), 5),
    "upgraded": (lambda t: chain(t.double.s(2), group(t.add.s(1), t.double.s()), t.total.s()), 13),
    "fed alike": (lambda t: chain(t.double.s(2), group(t.add.s(1), t.add.s(2)), t.total.s()), 11),
    "two groups": (
        lambda t: chain(group(t.double.s(1), t.double.s(2)), group(t.total.s(), t.join.s(5))), [6, [[2, 4], 5]],
    ),
    "chains": (lambda t: group(chain(t.double.s(n), t.add.s(1)) for n in range(3)), [1, 3, 5]),
    "fed chains": (
        lambda t: chain(t.double.s(1), group(chain(t.add.s(n), t.double.s()) for n in range(3)), t.total.s()), 18,
    ),
    "chords": (lambda t: group(chord([t.double.s(n), t.add.s(n, 1)], t.total.s()) for n in range(3)), [1, 4, 7]),
    "nested groups": (lambda t: group(t.double.s(1), group(t.double.s(2), t.add.s(1, 1))), [2, [4, 2]]),
    "groups of groups": (lambda t: group(group(t.double.s(n) for n in range(m)) for m in (1, 2)), [[0], [0, 2]]),
    "map": (lambda t: t.double.map([1, 2, 3]), [2, 4, 6]),
    "map in a chord": (lambda t: chord(t.double.map(range(3)), t.total.s()), 6),
    "fed map": (lambda t: chain(t.double.s(1), t.add.map([1, 2])), [3, 4]),
    "starmap": (lambda t: t.add.starmap([(1, 2), {"one": 3, "two": 4}]), [3, 7]),
    "chunks": (lambda t: chord(t.total.chunks(range(5), 2), t.total.s()), 10),
    "nothing to go through": (lambda t: chord(group([]), t.total.s()), 0),
    "no items": (lambda t: chord(t.double.map([]), t.total.s()), 0),
    "maps of no items": (lambda t: group(t.double.map([]), t.double.map([])), [[], []]),
    "groups of nothing": (lambda t: chain(group(group([]), group([])), t.join.s()), [[[], []]]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_compositions_return_the_expected_results(tasks: Tasks, case: str) -> None:
    make, expected = CASES[case]
    assert tasks.result(make(tasks)) == expected


def test_a_definition_is_stored_once_for_all_arguments(tasks: Tasks) -> None:
    def stored_definitions() -> list[str]:
        return [row["name"] for row in tasks.system.sql("SELECT name FROM orchestrator.workflows")]

    runs = [chord(group(tasks.double.s(n) for n in range(size)), tasks.total.s()).start() for size in (1, 2, 5)]
    assert len(stored_definitions()) == 1
    tasks.until_ended(*runs)
    assert [run.result() for run in runs] == [0, 2, 20]
    assert tasks.system.app.workflows.names() == []
    other = chord(group(tasks.double.options(queue="other").s(n) for n in range(3)), tasks.total.s()).start()
    assert len(stored_definitions()) == 2
    other.cancel()


def test_a_start_is_one_statement_once_its_definition_is_stored(tasks: Tasks) -> None:
    statements: list[str] = []

    def note(*given: Any) -> None:
        statements.append(given[2])

    (tasks.double.s(1) | tasks.double.s()).start()
    event.listen(Engine, "before_cursor_execute", note)
    try:
        (tasks.double.s(2) | tasks.double.s()).start()
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert [re.findall(r"/\* (\S+) \*/", text) for text in statements] == [["runs.create_defined"]]


def test_a_deleted_definition_is_stored_again(tasks: Tasks) -> None:
    (tasks.double.s(1) | tasks.double.s()).start()
    tasks.system.sql("DELETE FROM orchestrator.workflows")
    assert tasks.result(tasks.double.s(2) | tasks.double.s()) == 8


def test_the_error_names_the_failed_task_and_tasks_not_run(tasks: Tasks) -> None:
    run = chain(tasks.double.s(1), tasks.fail.s(), tasks.double.s(), tasks.total.s()).start()
    tasks.until_ended(run)
    with pytest.raises(RunFailed) as caught:
        run.result()
    assert "ended as failed: step 2 of 4, shop.fail: ValueError: no 2. Not run: shop.double, shop.total." in str(
        caught.value
    )
    assert caught.value.kind == "ValueError"
    assert caught.value.data == {"step": "fail", "task": "shop.fail", "not_run": ["shop.double", "shop.total"]}


def test_the_error_of_a_child_run_names_its_failed_task(tasks: Tasks) -> None:
    run = group(chain(tasks.double.s(n), tasks.fail.s(), tasks.double.s()) for n in range(3)).start()
    tasks.until_ended(run)
    with pytest.raises(RunFailed, match=r"step 1 of 1, double-fail, 3 of 3\. In run \S+: step 2 of 3, shop.fail: Val"):
        run.result()


def test_a_retry_runs_failed_tasks_and_their_successors(tasks: Tasks) -> None:
    run = chain(tasks.double.s(1), group(tasks.fail.s(), tasks.double.s()), tasks.total.s()).start()
    tasks.until_ended(run)
    assert run.status() == "failed"
    tasks.broken = False
    tasks.calls.clear()
    run.retry()
    tasks.system.pass_seconds(2)
    tasks.until_ended(run)
    assert run.result() == 6
    assert tasks.calls == [("shop.fail", [2]), ("shop.total", [[2, 4]])]


@pytest.mark.parametrize("is_map", [False, True])
def test_a_retry_of_a_task_reopens_its_run_at_once(tasks: Tasks, is_map: bool) -> None:
    """A client that waits for the result must not get the old failure before the leader has read the request."""
    run = (tasks.fail.map([1, 2]) if is_map else tasks.double.s(1) | tasks.fail.s()).start()
    tasks.until_ended(run)
    failed = next(one for one in run.children() if one.status() == "failed")
    tasks.broken = False
    failed.retry()
    assert run.status() == "running"
    with pytest.raises(ResultTimeout):
        run.result(timeout=0)
    tasks.system.pass_seconds()
    assert run.status() == "running"
    with pytest.raises(ResultTimeout):
        run.result(timeout=0)
    tasks.until_ended(run)
    assert run.status() == ("failed" if is_map else "success")


def test_a_retry_goes_on_in_child_runs(tasks: Tasks) -> None:
    run = chord(group(chain(tasks.double.s(n), tasks.fail.s()) for n in range(2)), tasks.total.s()).start()
    tasks.until_ended(run)
    tasks.broken = False
    tasks.calls.clear()
    run.retry()
    tasks.system.pass_seconds(2)
    tasks.until_ended(run)
    assert run.result() == 2
    assert sorted(tasks.calls[:2]) == [("shop.fail", [0]), ("shop.fail", [2])]
    assert tasks.calls[2:] == [("shop.total", [[0, 2]])]


def test_a_cancel_ends_child_runs(tasks: Tasks) -> None:
    run = chord(group(chain(tasks.double.s(n), tasks.double.s()) for n in range(2)), tasks.total.s()).start()
    tasks.system.pass_seconds(2)
    run.cancel()
    tasks.until_ended(run)
    assert {row["status"] for row in tasks.system.sql("SELECT status FROM orchestrator.runs")} == {"cancelled"}
    assert tasks.calls == []


def test_the_error_of_a_map_names_the_first_failed_task(tasks: Tasks) -> None:
    run = tasks.fail.map([1, 2]).start()
    tasks.until_ended(run)
    with pytest.raises(
        RunFailed, match="2 failed and 0 were cancelled, the first shop.fail at position 0: ValueError: no 1"
    ):
        run.result()


def test_a_cancelled_run_can_be_rerun_but_not_retried(tasks: Tasks) -> None:
    run = chain(tasks.double.s(1), tasks.double.s(), tasks.double.s()).start()
    tasks.system.pass_seconds()
    run.cancel()
    tasks.until_ended(run)
    assert run.status() == "cancelled"
    with pytest.raises(RunFailed, match=r"ended as cancelled. Not run: (.*double){3}. `rerun\(\)` starts"):
        run.result()
    with pytest.raises(WrongState):
        run.retry()
    again = run.rerun()
    tasks.until_ended(again)
    assert again.result() == 8


def test_a_run_that_is_withheld_lets_running_tasks_end_and_starts_no_others(tasks: Tasks) -> None:
    withhold = tasks.app._client.backend.runs.withhold
    chained = chain(tasks.double.s(1), tasks.double.s(), tasks.double.s()).start()
    nested = group(chain(tasks.double.s(n), tasks.double.s()) for n in range(2)).start()
    both = group(tasks.double.s(5), tasks.double.s(6)).start()
    tasks.system.pass_seconds(3)
    taken = tasks.worker.take()
    tasks.worker.start(*taken)
    pending = group(chain(tasks.double.s(7), tasks.double.s()) for n in range(2)).start()
    for run in (chained, nested, both, pending):
        withhold(run._id, None)
        withhold(run._id, None)
    tasks.system.pass_seconds()
    tasks.worker.report(*map(tasks.run, taken))
    tasks.until_ended(chained, nested, both, pending)
    assert len(tasks.calls) == 5
    assert both.result() == [10, 12]
    assert [run.status() for run in (chained, nested, pending)] == ["failed", "failed", "cancelled"]
    withhold(both._id, None)
    tasks.system.pass_seconds()
    assert tasks.system.count("inbox") == 0


def test_a_step_that_is_withheld_is_so_for_later_leaders_and_before_its_run_begins(tasks: Tasks) -> None:
    withhold = tasks.app._client.backend.runs.withhold
    run = chain(tasks.double.s(1), tasks.double.s(), tasks.double.s()).start()
    definition = run._definition()
    assert definition is not None
    withhold(run._id, definition.steps[1].name)
    withhold(run._id, "no such step")
    tasks.system.pass_seconds(2)
    tasks.system.scheduler.term.runs.forget([run._id])  # as in another leader, which reads the stored plan
    tasks.until_ended(run)
    assert tasks.calls == [("shop.double", [1])]
    assert run.status() == "failed"
    assert tasks.system.count("inbox") == 0
    run.retry()
    tasks.until_ended(run)
    assert [name for name, _ in tasks.calls] == ["shop.double"] * 3


def test_tasks_not_run_exclude_a_task_cancelled_while_running(tasks: Tasks) -> None:
    run = chain(tasks.double.s(1), tasks.total.s()).start()
    tasks.system.pass_seconds(2)
    tasks.worker.start(*tasks.worker.take())
    tasks.system.pass_seconds()
    run.cancel()
    tasks.until_ended(run)
    with pytest.raises(RunFailed, match=r"ended as cancelled. Not run: shop.total. "):
        run.result()


def test_options_of_a_part_apply_to_its_tasks(tasks: Tasks) -> None:
    late = tasks.double.options(priority=7, retries=4, timeout=9, queue="other")
    group(late.s(1), late.s(2)).start()
    (tasks.double.s(1) | late.s()).start()
    tasks.worker.take()
    tasks.system.pass_seconds(2)
    tasks.worker.succeed(*tasks.worker.take())
    tasks.system.pass_seconds(2)
    rows = tasks.system.sql("SELECT * FROM orchestrator.tasks WHERE queue = 'other'")
    assert [row["priority"] for row in rows] == [7, 7, 7]
    assert all(row["options"]["retry"]["max"] == 4 and row["options"]["timeout"] == 9 for row in rows)


def test_each_call_computes_its_own_concurrency_key(tasks: Tasks) -> None:
    keyed = tasks.add.options(concurrency=1, concurrency_key=lambda one, **_: f"k{one}")
    assert tasks.result(group(keyed.s(1, 2), keyed.s(3, 4))) == [3, 7]
    lanes = tasks.system.sql("SELECT lane FROM orchestrator.ended_tasks ORDER BY lane")
    assert [row["lane"].partition("|")[2] for row in lanes] == ["k1", "k3"]
    with pytest.raises(InvalidTask, match="known only when the part before has ended"):
        (tasks.double.s(1) | keyed.s(2)).start()


def test_an_idempotency_key_starts_one_run(tasks: Tasks) -> None:
    composition = tasks.double.s(1) | tasks.double.s()
    first, second = (composition.start(key="once", name="mine", tags=["a"]) for _ in range(2))
    assert first.id == second.id
    (row,) = tasks.system.sql("SELECT name, tags FROM orchestrator.runs")
    assert (row["name"], row["tags"]) == ("mine", ["a"])
    with pytest.raises(Duplicate, match="with different parameters"):
        (tasks.double.s(2) | tasks.double.s()).start(key="once")


def test_handles_find_parents_and_children(tasks: Tasks) -> None:
    run = group(chain(tasks.double.s(n), tasks.double.s()) for n in range(2)).start()
    tasks.until_ended(run)
    assert run.parent() is None
    names = tasks.system.sql("SELECT name FROM orchestrator.runs ORDER BY name")
    assert [row["name"] for row in names] == ["chain:double", "chain:double", "group:double"]
    one, two = run.children()
    assert isinstance(one, CompositionHandle)
    assert one.result() in (0, 4)
    assert one.parent() is not None
    assert one.parent().id == run.id  # type: ignore[union-attr]
    first, second = two.children()
    assert isinstance(first, Handle)
    assert first.parent().id == two.id  # type: ignore[union-attr]
    assert second.children() == []


def test_children_of_a_task_include_a_composition_with_its_result(tasks: Tasks) -> None:
    spawn = tasks.app.task(name="shop.spawn")(lambda: None)
    parent = spawn.enqueue()
    tasks.worker.learn("shop.spawn")
    tasks.system.pass_seconds(2)
    (dispatch,) = tasks.worker.take()
    inside = FakeRuntime(tasks)
    inside.next_id = lambda: derived_id(dispatch.id, dispatch.attempt, 1)  # type: ignore[method-assign]
    enter_task(inside)
    try:
        run = chord([tasks.double.s(1), tasks.add.s(1, 2)], tasks.total.s()).start()
    finally:
        enter_task(None)
    tasks.until_ended(run)
    (found,) = parent.children()
    assert isinstance(found, CompositionHandle)
    assert (found.id, found.result(), found.results()) == (run.id, 5, [5])
    (part, *_) = (one for one in run.children() if isinstance(one, Handle))
    assert part.parent().result() == 5  # type: ignore[union-attr]


def test_a_handle_made_from_an_id_has_the_result(tasks: Tasks) -> None:
    run = chain(group(tasks.double.s(1), tasks.add.s(1, 2)), tasks.join.s("x")).start()
    tasks.until_ended(run)
    found = tasks.system.app.run(run.id)
    assert found.result() == [[2, 3], "x"]
    assert found.results() == [[2, 3], "x"]


def test_results_can_return_exceptions(tasks: Tasks) -> None:
    run = group(tasks.fail.s(n) for n in range(2)).start()
    tasks.until_ended(run)
    assert [type(one) for one in run.results(return_exceptions=True)] == [TaskFailed, TaskFailed]
    with pytest.raises(RunFailed, match="step 1 of 1, shop.fail, 2 of 2: ValueError: no 0"):
        run.results()


WITH_ERRORS: dict[str, tuple[Callable[[Tasks], Composition[Any]], list[Any]]] = {
    "unlike": (lambda t: group(t.fail.s(1), t.double.s(2)), ["shop.fail|Task .* failed: ValueError: no 1", 4]),
    "nested": (lambda t: group(t.add.s(1, 2), group(t.fail.s(1), t.double.s(2))), [3, ["no 1", 4]]),
    "unlike chains": (
        lambda t: group(t.fail.s(1) | t.double.s(), t.double.s(3), t.fail.s(2) | t.total.s()),
        ["shop.double was not run: step 1 of 5, shop.fail: ValueError: no 1", 6, "not run: step 4 of 5, .* no 2"],
    ),
    "chains": (
        lambda t: group(t.join.s(n) | t.odd.s() for n in range(2)), [0, "step 2 of 2, shop.odd: .* no 1"],
    ),
    "at the end": (lambda t: t.double.s(1) | group(t.fail.s(), t.double.s()), ["no 2", 4]),
    "alike at the end": (lambda t: t.double.s(1) | group(t.fail.s(), t.fail.s()), ["no 2", "no 2"]),
    "not begun": (lambda t: t.fail.s(1) | group(t.total.s(), t.double.s()), ["total was not run: .* no 1", "double"]),
    "not begun within": (
        lambda t: group(t.double.s(1), t.fail.s(2) | group(t.double.s(), t.double.s())), [2, "double was not run: "],
    ),
    "None": (lambda t: group(t.fail.s(1), t.nothing.s()), ["no 1", None]),
}  # fmt: skip


def check_errors(tasks: Tasks, case: str) -> None:
    def odd(given: list[int]) -> int:
        if given[0] % 2:
            raise ValueError(f"no {given[0]}")
        return given[0]

    tasks.odd = tasks.app.task(name="shop.odd", retries=0)(odd)
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    tasks.nothing = tasks.app.task(name="shop.nothing")(nothing)
    tasks.worker.learn("shop.odd", "shop.nothing")
    make, expected = WITH_ERRORS[case]
    run = make(tasks).start()
    tasks.until_ended(run)
    for handle in (run, tasks.app.run(run.id)):
        compare(handle.results(return_exceptions=True), expected)


def compare(found: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, two in zip(found, expected, strict=True):
            compare(one, two)
    elif isinstance(expected, str):
        assert isinstance(found, OrchestratorError)
        assert re.search(expected, str(found))
    else:
        assert found == expected


@pytest.mark.parametrize("case", WITH_ERRORS)
def test_errors_take_the_place_of_missing_results(tasks: Tasks, case: str) -> None:
    check_errors(tasks, case)


def test_results_of_an_unstarted_fan_out_raise_run_failed(tasks: Tasks) -> None:
    run = (tasks.fail.s(1) | group(tasks.double.s(), tasks.double.s())).start()
    tasks.until_ended(run)
    with pytest.raises(RunFailed, match="step 1 of 2, shop.fail: ValueError: no 1. Not run: shop.double"):
        run.results(return_exceptions=True)


@pytest.mark.parametrize("start", ["start", "again"])
def test_a_task_starts_a_composition_once(tasks: Tasks, start: str) -> None:
    composition = group(chain(tasks.double.s(n), tasks.double.s()) for n in range(2))
    outbox = FakeRuntime(tasks)
    enter_task(outbox)
    try:
        run = composition.start()
        if start == "again":  # as a repeated attempt does
            outbox.number = 0
            assert composition.start().id == run.id
    finally:
        enter_task(None)
    tasks.until_ended(run)
    assert tasks.system.count("runs") == 3
    assert run.result() == [0, 4]


def test_the_leader_reads_small_runs_once(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: Counter[bytes] = Counter()
    load = dags.load

    def note(connection: Connection, ids: Sequence[bytes]) -> Any:
        loaded.update(ids)
        return load(connection, ids)

    monkeypatch.setattr(dags, "load", note)
    run = group(chain(tasks.double.s(n), tasks.double.s()) for n in range(700)).start()
    tasks.until_ended(run)
    monkeypatch.undo()
    assert run.result() == [4 * n for n in range(700)]
    assert len(loaded) == 701
    assert max(loaded.values()) == 1


# -- over HTTP, encrypted, large and redacted


@contextmanager
def over_http(system: System, **given: Any) -> Iterator[Tasks]:
    with serving(system.settings) as url, Orchestrator(load_settings(environ={}), api_url=url, **given) as app:
        yield Tasks(system, app)


def test_compositions_run_over_http(system: System) -> None:
    with over_http(system) as tasks:
        for case in ("chain", "names", "fed chains", "chord of unlike", "two groups", "map", "starmap", "no items"):
            make, expected = CASES[case]
            assert tasks.result(make(tasks)) == expected, case
        run = chain(tasks.double.s(1), tasks.fail.s(), tasks.double.s()).start(key="once")
        tasks.until_ended(run)
        assert chain(tasks.double.s(1), tasks.fail.s(), tasks.double.s()).start(key="once").id == run.id
        with pytest.raises(RunFailed, match="step 2 of 3, shop.fail: ValueError: no 2. Not run: shop.double."):
            run.result()
        assert len(run.children()) == 2
        assert run.parent() is None
        for case in ("unlike", "unlike chains", "chains", "alike at the end"):
            check_errors(tasks, case)


def test_compositions_over_http_reject_anything_but_calls(system: System) -> None:
    with over_http(system) as tasks:
        step = Step(name="a", task="shop.double")
        compose = partial(
            tasks.app._client.backend.workflows.compose, run_id=new_id(), name="it", key=None, tags=(), args="kA=="
        )
        named = composed.named(Definition(name="", steps=(step,)))
        compose([named])
        wrong = [
            msgspec.structs.replace(named, name="shop.orders"),
            msgspec.structs.replace(named, name="composed:" + "0" * 32),
            composed.named(Definition(name="", steps=(step,), on_success=(Hook(webhook="https://example.com"),))),
            composed.named(Definition(name="", steps=(step,), schedule={"cron": "* * * * *"})),
            composed.named(Definition(name="", steps=(Step(name="a", workflow="shop.orders"),))),
            composed.named(Definition(name="", steps=(Step(name="a", executor="process"),))),
        ]
        for definition in wrong:
            with pytest.raises(InvalidWorkflow):
                compose([definition])
        with pytest.raises(InvalidWorkflow):
            compose([])
        with pytest.raises(PayloadError, match="cannot be read"):
            compose([named], args="no")
        stored = Reference(
            owner=bytes(16), task=bytes(16), attempt=0, what="c", key=bytes(16), size=1, directory=0, length=1,
            digest=bytes(32),
        )  # fmt: skip
        with pytest.raises(PayloadError, match="names a stored payload"):
            compose([named], args=composed.packed(stored.encoded()))
        with pytest.raises(InvalidWorkflow, match="reserved for compositions"):
            tasks.app._client.backend.workflows.apply(named)
    assert [row["name"] for row in system.sql("SELECT name FROM orchestrator.workflows")] == [named.name]


@pytest.mark.parametrize("case", ["names", "fed chains", "chord", "map in a chord"])
def test_compositions_run_with_encrypted_payloads(engine: Engine, database_url: str, redis_url: str, case: str) -> None:
    keys = f"composed:{base64.b64encode(bytes(32)).decode()}"
    with fresh_system(engine, database_url, redis_url, data_keys=keys) as system:
        tasks = Tasks(system)
        make, expected = CASES[case]
        assert tasks.result(make(tasks)) == expected
        (row, *_) = system.sql("SELECT params FROM orchestrator.runs")
        assert "sealed:" in row["params"]
        first = make(tasks).start(key="once")
        assert make(tasks).start(key="once").id == first.id


def test_large_arguments_go_to_the_payload_store(
    engine: Engine, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    more = {"payload_store": str(tmp_path), "inline_payload": 1_000}
    with fresh_system(engine, database_url, redis_url, **more) as system:
        tasks = Tasks(system)
        large, larger = "x" * 2_000, "y" * 1_500_000
        composition = chain(
            tasks.join.s(large, 1),
            group(chain(tasks.length.si(larger), tasks.join.s(large, n)) for n in range(2)),
            group(tasks.join.s(large), tasks.length.s()),
        )
        fans = [[1_500_000, large, 0], [1_500_000, large, 1]]
        assert tasks.result(composition) == [[fans, large], 2]
        assert composition.start(key="once").id == composition.start(key="once").id
        run = chord(tasks.double.map(range(1_000)), tasks.total.s()).start()
        again = run.rerun()
        tasks.until_ended(run, again)
        assert run.result() == again.result() == 999_000
        owner, keeper = UUID(run.id), UUID(again.id)
        assert {"owner": owner, "keeper": keeper} in system.sql("SELECT owner, keeper FROM orchestrator.payload_keeps")
        large_ones = [large] * 5
        assert tasks.result(chain(tasks.double.s(1), tasks.join.map(large_ones))) == [[2, large]] * 5


def test_redacted_values_of_compositions_appear_in_no_response(system: System) -> None:
    tasks = Tasks(system)

    @tasks.app.task(name="shop.login", redact=("password", "session"))
    def login(user: str, password: str) -> dict[str, str]:
        return {"session": f"of {user} {password}"}

    tasks.worker.learn("shop.login")
    run = chord(login.starmap([("ann", "s3cret"), ("bob", "s3cret")]), tasks.join.s(1)).start()
    chained = (tasks.join.s("ann") | login.s("s3cret")).start()
    tasks.until_ended(run, chained)
    assert "s3cret" in str(run.result())
    with serving(system.settings) as url, httpx.Client(base_url=f"{url}/api/v1") as http:
        paths = [f"/runs/{one.id}{more}" for one in (run, chained) for more in ("", "/outputs")]
        paths += [f"/tasks/{task.id}" for one in (run, chained) for task in one.children()]
        for path in paths:
            answer = http.get(path)
            assert answer.status_code == 200, path
            assert "s3cret" not in answer.text, path


def test_results_have_the_types_of_their_tasks(system: System) -> None:
    tasks = Tasks(system)

    @tasks.app.task(name="shop.when")
    def when(day: date) -> date:
        return day

    tasks.worker.learn("shop.when")
    day = date(2026, 1, 2)
    assert tasks.result(when.s(day) | group(when.s(), when.s())) == [day, day]
    assert tasks.result(when.map([day])) == [day]


# -- invalid compositions


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: t.double.s(), r"Task 'shop.double': missing a required argument: 'number'"),
        (lambda t: t.add.s(1, 2) | t.add.s(1, 2), "Task 'shop.add': too many positional arguments"),
        (lambda t: t.double.s(1) | t.double.s(nmber=1), "unexpected keyword argument 'nmber'"),
        (
            lambda t: group(t.double.options(store_result=False).s(1), t.add.s(1, 2)) | t.total.s(),
            "'shop.double' keeps no result",
        ),
        (
            lambda t: group(t.double.s(n) | t.double.options(store_result=False).s() for n in "12") | t.total.s(),
            "'shop.double' keeps no result",
        ),
        (lambda t: t.double.s(object()), "Argument 1 of task 'shop.double' cannot be serialised"),
        (lambda _: group([]), "An empty composition"),
        (lambda _: chain([]), "An empty composition"),
        (lambda t: t.double.options(unique_key="a").s(1), "has the option unique_key, and a run needs all its tasks"),
        (lambda t: group(t.double.s("x" * 10**6), t.add.s(1, 2)), "bytes, and at most 1,000,000 are allowed"),
        (lambda t: chain(t.double, t.double.s()), "chain, part 1: expected a call .* found shop.double without .s"),
        (lambda _: group([1]), "expected a call such as .* found 1"),  # type: ignore[arg-type]
        (lambda t: t.double.map("abc"), "expected items to go through, found 'abc'"),
        (lambda t: t.total.chunks([1], 0), "expected a size of 1 or more, found 0"),
        (lambda t: t.add.starmap([1]), r"calls\[0\]: expected the arguments of one call"),
    ],
)
def test_invalid_compositions_are_rejected_before_anything_is_stored(
    tasks: Tasks, make: Callable[[Tasks], Composition[Any]], words: str
) -> None:
    with pytest.raises(OrchestratorError, match=words):
        make(tasks).start()
    assert tasks.system.count("runs") == 0


@pytest.mark.parametrize("key", [None, "once"])
def test_a_map_over_an_iterator_starts_only_once(tasks: Tasks, key: str | None) -> None:
    """A second start would find no items, or only those that a rejected first start had not read."""
    maps: list[Composition[Any]] = [
        tasks.double.map(iter([1, 2])),
        tasks.total.chunks(iter([1, 2]), 1),
        tasks.add.starmap(zip([1], [2], strict=True)),
    ]
    for one in maps:
        one.start()
        with pytest.raises(InvalidWorkflow, match="come from an iterator, which an earlier start has consumed. Pass a"):
            one.start()
    calls: Any = iter([(1, 2), 3, (4, 5)])
    broken = tasks.add.starmap(calls)
    for words in (r"calls\[1\]", "come from an iterator"):
        with pytest.raises(OrchestratorError, match=words):
            broken.start(key=key)
    twice = chord(tasks.double.map(iter([1, 2])), tasks.total.s())
    assert [tasks.result(twice), tasks.result(twice)] == [6, 6]
    again = tasks.double.map([1, 2])
    assert [tasks.result(again), tasks.result(again)] == [[2, 4], [2, 4]]


def test_bound_arguments_of_a_later_part_are_type_checked(tasks: Tasks) -> None:
    @tasks.app.task(name="shop.typed")
    def typed(one: int, day: date, *rest: int) -> int: ...

    (tasks.double.s(1) | typed.s(date(2026, 1, 2), 3)).start()
    part: Any = typed.s
    for wrong in (part("no"), part(date(2026, 1, 2), "no"), part(day=3)):
        with pytest.raises(InvalidTask, match="expected"):
            (tasks.double.s(1) | wrong).start()


# -- random compositions return what plain calls return


VALUES = st.one_of(st.integers(-5, 5), st.text("ab", max_size=2), st.binary(max_size=2), st.none())


@dataclass
class Node:
    """A description of a random composition."""

    kind: str
    parts: list[Node] = field(default_factory=list)
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def made(self, tasks: Tasks) -> Composition[Any]:
        if self.kind in ("s", "si"):
            return getattr(tasks.join, self.kind)(*self.args, **self.kwargs)
        if self.kind == "map":
            return tasks.join.map(self.args)
        parts = [part.made(tasks) for part in self.parts]
        return chain(parts) if self.kind == "chain" else group(parts)

    def value(self, *previous: Any) -> Any:
        """Return the result that plain function calls give."""
        if self.kind in ("s", "si"):
            given = previous if self.kind == "s" else ()
            return [*given, *self.args, *map(list, sorted(self.kwargs.items()))]
        if self.kind == "map":
            return [[*previous, one] for one in self.args]
        if self.kind == "group":
            return [part.value(*previous) for part in self.parts]
        for part in self.parts:
            previous = (part.value(*previous),)
        return previous[0]


LEAVES = st.one_of(
    st.builds(
        Node,
        st.sampled_from(["s", "si"]),
        args=st.lists(VALUES, max_size=2),
        kwargs=st.dictionaries(st.sampled_from(["x", "y"]), VALUES, max_size=2),
    ),
    st.builds(Node, st.just("map"), args=st.lists(VALUES, max_size=3)),
)


def nested_nodes(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    """Return chains and groups of `inner`, and groups that repeat one part, which become fan-outs over child runs."""
    return st.one_of(
        st.builds(Node, st.sampled_from(["chain", "group"]), parts=st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda part, times: Node("group", [part] * times), inner, st.integers(2, 3)),
    )


@settings(max_examples=max(15, settings().max_examples // 4), suppress_health_check=[*HealthCheck], deadline=None)
@given(st.lists(st.recursive(LEAVES, nested_nodes, max_leaves=8), min_size=3, max_size=3))
def test_random_compositions_return_what_plain_calls_return(tasks: Tasks, nodes: list[Node]) -> None:
    runs = [node.made(tasks).start(tags=["x"]) for node in nodes]
    tasks.until_ended(*runs)
    assert [run.result() for run in runs] == [node.value() for node in nodes]
