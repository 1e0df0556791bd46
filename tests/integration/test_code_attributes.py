"""Attributes of runs: set by code and at the start, kept across turns, runs and resets, shown, and used as filters."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from orchestrator import InvalidWorkflow, Orchestrator, WorkflowContext, WorkflowHandle
from orchestrator.domain.code import history
from orchestrator.domain.code.attributes import MAX_ATTRIBUTES, parse_filters, ranges
from orchestrator.sdk.code.engine import Engine
from orchestrator.store.insights import RunFilter, list_runs, run_lists, show_run
from orchestrator.testing import Recording, WorkflowTest, replay
from tests.integration.api_client import ApiClient
from tests.integration.code_stage import rest
from tests.integration.stage import System

DUE = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def workflow_of(app: Orchestrator) -> Any:
    @app.workflow(name="order")
    async def order(ctx: WorkflowContext, renewed: bool = False) -> dict[str, Any]:
        if not renewed:
            ctx.set("note", "state is another thing")
            ctx.set_attributes(stage="new", total=12.5, count=3, paid=False, due=DUE, gone="soon")
            await ctx.signals("go").get()
            ctx.set_attributes(stage="paid", paid=True, gone=None)
            ctx.continue_as_new(True)
        await ctx.signals("end").get()
        ctx.set_attributes(stage="done")
        return ctx.attributes

    return order


SET = {"stage": "paid", "total": 12.5, "count": 3, "paid": True, "due": "2026-01-02T03:04:00+00:00", "customer": "acme"}


def listed(system: System, *attributes: str, **more: Any) -> set[UUID]:
    with system.engine.connect() as connection:
        return {run.id for run in list_runs(connection, RunFilter(attributes=attributes, **more)).runs}


def test_attributes_are_set_kept_and_used_as_filters(system: System, engine_: Engine) -> None:
    order = workflow_of(system.app)
    worker = system.worker("w1", knows=("order",))
    handle: WorkflowHandle[Any] = order.starting(attributes={"customer": "acme", "stage": "asked"}).start()
    other = order.start()
    assert handle.attributes() == {"customer": "acme", "stage": "asked"}  # before the code runs
    assert listed(system, "stage=asked") == {UUID(handle.id)}
    rest(system, worker, engine_)
    engine_.close()  # the worker is gone: another worker replays
    for run in (handle, other):
        run.signal("go")
    rest(system, worker, engine_)
    engine_.close()
    assert handle.attributes() == SET
    assert handle.state() == {}
    found = listed(system, "stage=paid", "total=12.5", "paid=true", "customer=acme")
    assert len(found) == 2  # the run and its continuation
    assert listed(system, "stage=paid", 'count="3"') == set()
    assert listed(system, "stage=paid", workflow="order") == listed(system, "stage=paid")
    assert listed(system, "gone=soon") == set()
    handle.signal("end")
    rest(system, worker, engine_)
    assert handle.result(0) == SET | {"stage": "done"}
    assert listed(system, "stage=done") < found  # set in the last turn
    assert other.attributes()["stage"] == "paid"
    last = next(iter(listed(system, "stage=done")))
    with system.engine.connect() as connection:
        shown = show_run(connection, last)
    assert shown is not None
    assert shown.attributes == SET | {"stage": "done"}


def test_a_rerun_begins_with_the_attributes_of_the_start(system: System) -> None:
    order = workflow_of(system.app)
    handle = order.starting(attributes={"customer": "acme"}).start()
    again = handle.rerun()
    assert again.attributes() == {"customer": "acme"}


def test_an_attribute_filter_uses_the_index(system: System) -> None:
    statement = (
        'SELECT id FROM orchestrator.runs WHERE attributes IS NOT NULL AND attributes @> \'{"stage": "paid"}\'::jsonb'
    )
    with system.engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        plan = "\n".join(row[0] for row in connection.exec_driver_sql(f"EXPLAIN {statement}"))
    assert "runs_by_attributes" in plan


RANGES = [
    ((), "abcd"),
    (("total>=100",), "bc"),
    (("total>100",), "c"),
    (("total<100",), "a"),
    (("total<=1e2",), "ab"),
    (("total>-5", "total<150"), "ab"),
    (("total>50", "stage=paid"), "b"),
    (("due>=2026-01-02",), "bc"),
    (("due>2026-01-02T04:00+01:00",), "bc"),
    (("due<2026-01-02T04:04+01:00",), "a"),
    (('stage>"new"',), "b"),
    (("stage>=1",), ""),
    (("nothing>1",), ""),
    (("stage!=paid",), "a"),
    (("stage != 5",), "ab"),
    (("total!=100", "stage=new"), "a"),
    (("due!=2026-01-02T04:04+01:00",), "ac"),
    (("total >= 100",), "bc"),
    (('stage>\u00e9"\\',), ""),
]


@pytest.mark.parametrize(("filters", "expected"), RANGES)
@pytest.mark.parametrize("more", [{}, {"workflow": "order"}])
def test_runs_are_listed_by_ranges_of_attributes(
    system: System, filters: tuple[str, ...], expected: str, more: dict[str, Any]
) -> None:
    order = workflow_of(system.app)
    given: dict[str, dict[str, Any]] = {
        "a": {"total": 99.5, "stage": "new", "due": DUE - timedelta(days=1)},
        "b": {"total": 100, "stage": "paid", "due": DUE},
        "c": {"total": 250, "due": DUE + timedelta(microseconds=1)},
        "d": {},
    }
    runs = {UUID(order.starting(attributes=one).start().id): name for name, one in given.items()}
    assert "".join(sorted(runs[found] for found in listed(system, *filters, **more))) == expected


def test_a_range_filter_scans_a_bounded_number_of_runs(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lists, "MAX_SCANNED", 2)
    order = workflow_of(system.app)
    first = order.starting(attributes={"total": 100}).start()
    for number in range(5):
        order.starting(attributes={"total": number}).start()
    with system.engine.connect() as connection:
        page = run_lists.page_of_runs(connection, RunFilter(attributes=("total>=100",)), limit=50)
    assert (page.runs, page.next is None) == ([], False)
    assert listed(system, "total>=100") == {UUID(first.id)}  # page by page, within a second


def test_workflow_test_replays_and_carries_over_attributes() -> None:
    app = Orchestrator()
    order = workflow_of(app)

    async def play() -> Recording:
        async with WorkflowTest() as test:
            run = await test.start(order)
            first = run.history
            await run.signal("go")
            assert run.attributes == {name: value for name, value in SET.items() if name != "customer"}
            assert run.state == {}
            await run.signal("end")
            assert (await run.result())["stage"] == "done"
            return first

    first = asyncio.run(play())
    replay(order, Recording.from_json(first.to_json()))
    assert [one.what.attribute for one in first.events if isinstance(one.what, history.StateSet)][:2] == ["", '"new"']


@pytest.mark.parametrize(
    "value", [object(), [1], {"a": 1}, 2**60, float("nan"), "x" * 300, "a\nb", datetime(2026, 1, 1)]
)
def test_an_invalid_attribute_value_is_rejected(value: Any) -> None:
    app = Orchestrator()
    with pytest.raises(InvalidWorkflow, match="Attribute 'a': expected a string of at most 255"):
        workflow_of(app).starting(attributes={"a": value})


def test_the_number_and_the_names_of_attributes_are_limited() -> None:
    order = workflow_of(Orchestrator())
    with pytest.raises(InvalidWorkflow, match="at most 32, found 33"):
        order.starting(attributes={f"a{n}": n for n in range(MAX_ATTRIBUTES + 1)})
    with pytest.raises(InvalidWorkflow, match="An attribute name has"):
        order.starting(attributes={"a=b": 1})


def test_attribute_filters_are_parsed_with_their_types() -> None:
    assert parse_filters(["a=1", "b=1.5", "c=true", 'd="1"', "e=x=y", "f=null", "g=01"]) == {
        **{"a": 1, "b": 1.5, "c": True, "d": "1", "e": "x=y", "f": "null", "g": "01"}
    }
    assert parse_filters(["a = x y ", 'b="=x"', "a=x y", 'c=""']) == {"a": "x y", "b": "=x", "c": ""}
    for odd in ("stage", "=1", "st\u00e4ge=1", "stage<\x00", "stage=\ud800", "stage=\n"):
        with pytest.raises(InvalidWorkflow, match="expected NAME=VALUE"):
            parse_filters([odd])
    with pytest.raises(InvalidWorkflow, match="printable characters"):
        ranges(['stage<"\\u0000"'])


@pytest.mark.parametrize(
    ("odd", "meant"),
    [
        ("stage==paid", "stage=paid"),
        ("total=>100", "total>=100"),
        ("total=<100", "total<=100"),
        ("stage<>paid", "stage!=paid"),
        ("stage=!paid", "stage!=paid"),
        ("stage=", 'stage=""'),
        ("total>=", 'total>=""'),
        ("stage='paid'", "stage=paid"),
        ('stage="paid', "stage=paid"),
        ("paid=True", "paid=true"),
        ("paid>=true", "paid=true"),
        ("stage=~paid", 'stage="~paid"'),
        ("tags=[1, 2]", 'tags="[1, 2]"'),
    ],
)
def test_an_invalid_filter_is_rejected_with_a_suggestion(system: System, odd: str, meant: str) -> None:
    said = f"such as stage=paid, stage!=paid or total>=100; found {odd!r}. Did you mean {meant!r}?"
    with pytest.raises(InvalidWorkflow) as refused:
        listed(system, odd)
    assert str(refused.value).endswith(said)
    answer = ApiClient(system.settings).send("GET", "/api/v1/runs", params={"attribute": odd})
    assert (answer.status_code, answer.json()["detail"].endswith(said)) == (422, True)


def test_two_values_of_an_attribute_in_a_filter_are_rejected(system: System) -> None:
    with pytest.raises(InvalidWorkflow, match="Attribute 'stage': a run has one value, found 'new' and 'paid'"):
        listed(system, "stage=new", "stage=paid")
    assert listed(system, "stage=new", "stage=new") == set()


def test_http_shows_attributes_and_filters_by_them(system: System) -> None:
    ask = ApiClient(system.settings).send
    order = workflow_of(system.app)
    handle = order.starting(attributes={"customer": "acme", "total": 3}).start()
    order.start()
    found = ask("GET", "/api/v1/runs?attribute=customer=acme&attribute=total=3").json()["items"]
    assert [run["id"] for run in found] == [handle.id]
    shown = ask("GET", f"/api/v1/runs/{handle.id}").json()["run"]
    assert shown["attributes"] == {"customer": "acme", "total": 3}
    assert ask("GET", "/api/v1/runs?attribute=customer").status_code in (400, 422)
    for asked, found in (
        ("total>=3", [handle.id]),
        ("total%3E3", []),
        ("total<4", [handle.id]),
        ("total!=3", []),
        ("total!=4", [handle.id]),
    ):
        assert [run["id"] for run in ask("GET", f"/api/v1/runs?attribute={asked}").json()["items"]] == found
