"""Command output about runs of workflows as code, such as `runs show`."""

from __future__ import annotations

import asyncio
import json
import re
import time
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from orchestrator import NotFound, ResultTimeout, WorkflowContext
from orchestrator.api.app import create_app
from orchestrator.cli import main
from orchestrator.domain.code.activation import Activated, Violation
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.values.payload import decode_value
from tests.integration.code_stage import act, kinds, run_row
from tests.integration.stage import System, Worker
from tests.integration.visitor import Visitor
from tests.waiting import eventually

KNOWS = ("job", "order", "parcel")
pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.fixture
def order(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="parcel")
    async def parcel(ctx: WorkflowContext, item: str) -> None:
        if await ctx.signals("posted").get() == "lost":
            raise ValueError(f"{item} was lost")

    @system.app.workflow(name="order")
    async def order(ctx: WorkflowContext, number: str, items: list[str]) -> str:
        ctx.set("items", len(items))
        ctx.set("gone", 1)
        ctx.clear("gone")
        charging = system.job.schedule(number)
        sending = [parcel.options(name=f"parcel with {item}").schedule(item) for item in items]
        reminder = ctx.sleep(hours=24, name="reminder")
        by = await ctx.promise("approval", type=str)
        reminder.cancel()
        await charging
        for one in sending:
            await one
        return by

    return order


def turn(system: System, worker: Worker, engine_: Engine) -> None:
    """Let the code of every run take one turn."""
    system.pass_seconds()
    taken = worker.take()
    for dispatch in taken:
        if dispatch.is_turn_task:
            worker.report(act(engine_, dispatch))
    system.tick()


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, [*words], catch_exceptions=False)


def refusal(*words: str) -> str:
    """Run a command that fails; return its output in one line."""
    refused = CliRunner().invoke(main, [*words])
    assert refused.exit_code == 1
    return " ".join(refused.output.split())


def show(run: str) -> str:
    return invoke("runs", "show", run).output


def test_an_open_run_shows_its_pending_waits_and_code_position(
    system: System, engine_: Engine, order: CodeWorkflow[..., Any]
) -> None:
    worker = system.worker(knows=KNOWS)
    handle = order.starting(id="o-17").start("o-17", items=["tea", "milk"])
    assert "a worker, to process new events" in show(handle.id)
    turn(system, worker, engine_)
    worker.die()  # no live worker is needed
    shown = show(handle.id)
    for expected in (
        'order("o-17", items=["tea", "milk"])',
        "items = 2",
        "promise approval",
        "timer reminder due",
        "task job",
        "child parcel with tea",
        "in order: by = await ctx.promise(",
        "test_cli_code_runs.py, line ",
        "own id",
    ):
        assert expected in shown, shown
    assert "gone" not in shown
    document = json.loads(invoke("runs", "show", handle.id, "--json").output)
    assert (document["args"], document["kwargs"]) == (["o-17"], {"items": ["tea", "milk"]})
    assert document["state"] == {"items": 2}
    assert {view["kind"] for view in document["waits_for"]} == {"promise", "timer", "task", "child"}
    assert document["key"] == "o-17"
    listed = json.loads(invoke("runs", "list", "--workflow", "order", "--json").output)["runs"]
    assert [run["key"] for run in listed] == ["o-17"]
    assert {child["name"] for child in document["children"]} == {"parcel with tea", "parcel with milk"}
    assert (document["unseen"], "unseen messages" in shown) == (0, False)
    for _ in range(2):
        handle.signal("hurry")
    system.pass_seconds()
    assert json.loads(invoke("runs", "show", handle.id, "--json").output)["unseen"] == 2
    assert re.search(r"unseen messages +2\n", show(handle.id))


def test_a_run_that_waits_for_a_signal_names_the_signal(
    system: System, engine_: Engine, order: CodeWorkflow[..., Any]
) -> None:
    worker = system.worker(knows=KNOWS)
    handle = system.app.code_workflows["parcel"].start("tea")
    turn(system, worker, engine_)
    assert "signal posted" in show(handle.id)


def test_a_failed_run_shows_its_error_and_traceback(
    system: System, engine_: Engine, order: CodeWorkflow[..., Any]
) -> None:
    worker = system.worker(knows=KNOWS)
    handle = system.app.code_workflows["parcel"].start("tea")
    turn(system, worker, engine_)
    handle.signal("posted", "lost")
    turn(system, worker, engine_)
    shown = show(handle.id)
    assert "Error: ValueError: tea was lost" in shown
    assert 'raise ValueError(f"{item} was lost")' in shown
    assert "waits for" not in shown
    assert f"orchestrator runs rerun {handle.id}; to keep" in refusal("runs", "retry", handle.id)
    watched = invoke("runs", "watch", handle.id)
    assert watched.exit_code == 1
    assert 'raise ValueError(f"{item} was lost")' in watched.output


def test_history_shows_errors_in_full(system: System, engine_: Engine, order: CodeWorkflow[..., Any]) -> None:
    worker = system.worker(knows=KNOWS)
    long = "tea" * 100
    handle = system.app.code_workflows["parcel"].start(long)
    turn(system, worker, engine_)
    handle.signal("posted", "lost")
    turn(system, worker, engine_)
    assert f"error=ValueError: {long} was lost" in invoke("runs", "history", handle.id).output
    full = invoke("runs", "history", handle.id, "--full").output
    assert f'payload = [["{long}"], {{}}]' in full
    assert 'raise ValueError(f"{item} was lost")' in full


def test_a_run_is_found_by_its_custom_id(system: System, engine_: Engine, order: CodeWorkflow[..., Any]) -> None:
    parcel = system.app.code_workflows["parcel"]
    first = order.starting(id="17").start("17", items=[])
    assert order.find("17") == first
    assert first.id in show("17")
    assert first.id in show("order/17")
    with pytest.raises(NotFound, match="No run of workflow 'order' was started under the id '7'"):
        order.find("7")
    assert "No run has the id '7', nor was one started under it" in refusal("runs", "show", "7")
    second = parcel.starting(id="17").start("tea")
    assert f"order/17 is {first.id}, parcel/17 is {second.id}" in refusal("runs", "show", "17")
    assert second.id in show("parcel/17")
    assert "Sent 'posted'" in invoke("runs", "signal", "parcel/17", "posted").output
    assert "Sent 'posted'" in invoke("runs", "signal", "parcel/17", "posted", "123", "--text").output
    sent = system.sql("SELECT body->>'value' AS value FROM orchestrator.inbox WHERE kind = 'signal' ORDER BY id")
    assert [decode_value(b64decode(one["value"])) for one in sent] == [None, "123"]
    assert asyncio.run(parcel.afind("17")) == second


def test_a_workflow_with_a_slash_in_its_name_supports_custom_ids(system: System) -> None:
    @system.app.workflow(name="shop/order")
    async def slashed(ctx: WorkflowContext) -> None: ...

    run = slashed.starting(id="a/b").start()
    assert slashed.find("a/b") == run
    assert re.search(r"own id +a/b", show("a/b"))


def test_a_rerun_keeps_arguments_tags_and_timeout(
    system: System, engine_: Engine, order: CodeWorkflow[..., Any]
) -> None:
    worker = system.worker(knows=KNOWS)
    parcel = system.app.code_workflows["parcel"].options(timeout=60)
    handle = parcel.starting(id="p", tags=["red"]).start("tea")
    turn(system, worker, engine_)
    refused = refusal("runs", "rerun", handle.id, "--from", "x")
    assert "has no steps to start from" in refused
    assert f"runs reset {handle.id} --to EVENT" in refused
    new = invoke("runs", "rerun", handle.id).output.strip()
    assert new != handle.id
    document = json.loads(invoke("runs", "show", new, "--json").output)
    assert (document["args"], document["tags"], document["status"]) == (["tea"], ["red"], "running")
    assert document["key"] is None
    row = run_row(system, handle.rerun())
    assert (row["deadline"] - row["created_at"]).total_seconds() == 60
    system.sql(
        "UPDATE orchestrator.runs SET deadline = now() - interval '1 s' WHERE id = CAST(:id AS uuid)", id=handle.id
    )
    turn(system, worker, engine_)
    turn(system, worker, engine_)
    assert handle.status() == "failed"
    row = run_row(system, handle.rerun())
    assert 0 < (row["deadline"] - row["created_at"]).total_seconds() < 60  # when the run was told of its timeout


def test_terminate_asks_for_confirmation_at_a_terminal(
    system: System, order: CodeWorkflow[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = order.start("4711", ["tea"]).id
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    refused = CliRunner().invoke(main, ["runs", "terminate", run], input="n\n")
    assert (refused.exit_code, "End 1 run at once, without letting the code tidy up?" in refused.output) == (1, True)
    assert system.count("inbox") == 0
    assert CliRunner().invoke(main, ["runs", "terminate", run], input="y\n").exit_code == 0
    assert CliRunner().invoke(main, ["runs", "terminate", run, "--yes"]).exit_code == 0
    monkeypatch.undo()
    assert system.count("inbox") == 2


@pytest.mark.parametrize("what", ["run", "task"])
def test_cancelling_several_runs_or_tasks_asks_for_confirmation(
    system: System, order: CodeWorkflow[..., Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    one, two = (
        order.start("4711", ["tea"]).id if what == "run" else system.job.options(delay=60).enqueue().id for _ in "12"
    )
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    refused = CliRunner().invoke(main, [f"{what}s", "cancel", one, two], input="n\n")
    assert (refused.exit_code, f"Cancel 2 {what}s?" in refused.output) == (1, True)
    assert CliRunner().invoke(main, [f"{what}s", "cancel", one]).exit_code == 0
    assert CliRunner().invoke(main, [f"{what}s", "cancel", one, two, "--yes"]).exit_code == 0
    monkeypatch.undo()
    assert system.count("inbox") == 3


def test_waiting_for_a_stuck_run_reports_why_the_run_is_stuck(system: System, order: CodeWorkflow[..., Any]) -> None:
    worker = system.worker(knows=KNOWS)
    handle = system.app.code_workflows["parcel"].start("tea")
    with pytest.raises(ResultTimeout, match="It is in progress; ask again"):
        handle.result(timeout=0)
    system.pass_seconds()
    (dispatch,) = worker.take()
    worker.report(Activated(dispatch.id, dispatch.attempt, 0.1, stuck=Violation(1, "Misfit", "it does not fit")))
    system.tick()
    with pytest.raises(ResultTimeout, match="It is stuck: Misfit: it does not fit; ask again"):
        handle.result(timeout=0)
    with pytest.raises(ResultTimeout, match="It is stuck: Misfit: it does not fit"):
        asyncio.run(handle.aresult(timeout=0))
    with pytest.raises(ResultTimeout, match="It is stuck: Misfit: it does not fit"):
        system.app.run(handle.id).wait_ended(timeout=0)


def test_an_update_of_a_stuck_run_fails_at_once_and_stays_queued(system: System, order: CodeWorkflow[..., Any]) -> None:
    worker = system.worker(knows=KNOWS)
    handle = system.app.code_workflows["parcel"].start("tea")
    system.pass_seconds()
    (dispatch,) = worker.take()
    worker.report(Activated(dispatch.id, dispatch.attempt, 0.1, stuck=Violation(1, "Misfit", "it does not fit")))
    system.tick()
    began = time.monotonic()
    with pytest.raises(ResultTimeout, match="yet. It is stuck: Misfit: it does not fit. The update stays queued: the"):
        system.app.workflow_run(handle.id).update("add", "tea", timeout=90)
    assert time.monotonic() - began < 30
    system.tick()
    assert "update_requested" in kinds(system, handle)


def test_workflows_as_code_are_listed(system: System, engine_: Engine, order: CodeWorkflow[..., Any]) -> None:
    system.worker(knows=("job", "order", "order@1", "order@2"))
    held = order.start("o-1", [])
    system.app.code_workflows["parcel"].start("tea")
    system.pass_seconds()
    listed = json.loads(invoke("workflows", "list", "--json").output)["code"]
    (draining,) = listed[0].pop("draining")
    assert listed == [
        {"name": "order", "versions": [1, 2], "workers": 1, "open_runs": 1},
        {"name": "parcel", "versions": [1], "workers": 0, "open_runs": 1, "draining": []},
    ]
    assert draining.pop("since")
    assert draining == {"version": 1, "open_runs": 1, "oldest": held.id, "served": True}
    text = invoke("workflows", "list").output
    assert "1 live worker, 1 open run" in text
    assert "version 1 draining: 1 run" in " ".join(text.split())
    for version, expected in (("1", [held.id]), ("3", [])):
        words = ("runs", "list", "--workflow", "order", "--version", version, "--json")
        assert [run["id"] for run in json.loads(invoke(*words).output)["runs"]] == expected
    assert "no live worker, 1 open run" in text


def test_unreplayed_runs_are_listed_after_a_deploy(
    system: System, engine_: Engine, order: CodeWorkflow[..., Any]
) -> None:
    def listed() -> list[str]:
        return [run["id"] for run in json.loads(invoke("runs", "list", "--unreplayed", "--json").output)["runs"]]

    def hints() -> tuple[str, str]:
        page = Visitor(create_app(system.settings)).get("/ui").text
        checks = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)["checks"]
        said = [one["found"] for one in checks if one["check"] == "code runs"]
        return " ".join(re.findall(r'/ui/runs\?unreplayed=true">([^<]*)<', page)), " ".join(said)

    def add_worker(name: str, release: str) -> Worker:
        worker = system.worker(name, knows=("job", "parcel"))
        worker.release = release
        worker.beat()
        return worker

    old = add_worker("old", "1")
    first, second = (system.app.code_workflows["parcel"].start(item) for item in ("tea", "rice"))
    turn(system, old, engine_)
    assert (listed(), hints()) == ([], ("", "")), "the worker that has their code lives"
    old.leave()
    system.pass_seconds()
    again = add_worker("again", "1")
    system.pass_seconds()
    assert listed() == [], "the same release"
    again.leave()
    new = add_worker("new", "2")
    system.pass_seconds()
    system.sql("UPDATE orchestrator.worker_releases SET started_at = now() WHERE release = '2'")
    assert listed() == [second.id, first.id]
    overview, doctor = hints()
    assert (overview, doctor) == ("2", "2 open runs have not been replayed by the workers that are live now.")
    assert first.id in Visitor(create_app(system.settings)).get("/ui/runs?unreplayed=true").text
    first.signal("posted", "well")
    turn(system, new, engine_)
    assert listed() == [second.id], "the first has been replayed"
    add_worker("newest", "2")
    system.sql("UPDATE orchestrator.runs SET stuck = '{}' WHERE id = :id", id=second.id)
    assert listed() == [], "it is known that it does not fit"


APPLICATION = """
from orchestrator import Orchestrator, WorkflowContext
from tests.integration.serving import both_ways  # noqa: F401

app = Orchestrator()

@app.workflow
async def order(ctx: WorkflowContext, number: int) -> int:
    return number
"""


def test_runs_start_uses_the_application_of_the_settings(
    system: System, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a_little_shop.py").write_text(APPLICATION)
    missing = refusal("runs", "start", "a_little_shop.order", "number=7")
    assert "say where: --app module:app, or the setting `app`" in missing
    monkeypatch.setenv("ORCHESTRATOR_APP", "a_little_shop:app")
    started = invoke("runs", "start", "a_little_shop.order", "number=7", "--key", "o-7").output.strip()
    assert "a_little_shop.order(number=7)" in show("o-7")
    assert started in show("o-7")
    for words, problem in (
        (["number=seven"], "Expected `int`"),
        ([], "'number'"),
        (["nummer=7"], "Expected a_little_shop.order(number: int)"),
    ):
        assert problem in refusal("runs", "start", "a_little_shop.order", *words)
    nowhere = refusal("runs", "start", "ordre")
    assert "The application a_little_shop:app has no workflow as code of this name either" in nowhere
    assert "Did you mean 'a_little_shop.order'?" in refusal("runs", "start", "a_little_shop.ordre")
    assert system.count("runs") == 1


def test_status_reports_runs_whose_workflow_no_worker_knows(
    system: System, engine_: Engine, order: CodeWorkflow[..., Any]
) -> None:
    worker = system.worker(knows=KNOWS)
    parcel = system.app.code_workflows["parcel"]
    begun = parcel.start("tea")
    turn(system, worker, engine_)
    worker.leave()
    system.worker("other", knows=("job",))
    begun.signal("posted")
    parcel.start("milk")
    system.pass_seconds(2)
    said = " ".join(CliRunner().invoke(main, ["status"]).output.split())
    assert "No live worker of queue 'default' knows workflow 'parcel': 2 waiting, 1 of them started" in said
    assert "and resumes when a worker knows it again; runs that have not started fail then" in said
    assert "a worker that has its workflow: no live worker does" in show(begun.id)
    system.sql("UPDATE orchestrator.tasks SET wake_at = now() - interval '1 s' WHERE hold = 'unknown'")
    system.pass_seconds(2)
    assert begun.status() == "stuck"
    assert "knows the workflow 'parcel'" in show(begun.id)


def test_waiting_for_an_update_reports_a_missing_handler(system: System, engine_: Engine) -> None:
    @system.app.workflow(name="order")
    async def order(ctx: WorkflowContext) -> None:
        @ctx.update
        def add(item: str) -> None: ...

        await ctx.signals("end").get()

    worker = system.worker(knows=KNOWS)
    handle = order.start()
    turn(system, worker, engine_)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(system.app.workflow_run(handle.id).update, "ad", "tea", timeout=90)
        eventually(lambda: system.count("inbox") > 0)
        turn(system, worker, engine_)
        with pytest.raises(ResultTimeout, match=r"update ad, which has no handler in the code yet \(it has: add"):
            system.app.workflow_run(handle.id).update("ad", "tea", timeout=1)
        assert "update ad, which has no handler in the code yet" in show(handle.id)
        handle.terminate()
        eventually(lambda: system.pass_seconds() or asked.done(), "who asked first is told that it has ended")


def test_terminated_runs_are_distinguished_from_cancelled_runs(system: System, order: CodeWorkflow[..., Any]) -> None:
    terminated, cancelled = order.start("4711", ["tea"]), order.start("4712", ["tea"])
    terminated.terminate()
    system.pass_seconds(2)
    system.sql("UPDATE orchestrator.runs SET status = 'cancelled', ended_at = now() WHERE ended_at IS NULL")
    assert re.search("status +terminated\n", show(terminated.id))
    assert re.search("status +cancelled\n", show(cancelled.id))
    listed = {line.split()[0]: line for line in invoke("runs", "list").output.splitlines()}
    assert (" terminated " in listed[terminated.id], " cancelled " in listed[cancelled.id]) == (True, True)
    found = {state: invoke("runs", "list", "--status", state).output for state in ("terminated", "cancelled", "stuck")}
    assert (terminated.id in found["terminated"], cancelled.id in found["terminated"]) == (True, False)
    assert (terminated.id in found["cancelled"], cancelled.id in found["cancelled"]) == (True, True)
    assert found["stuck"] == "No run matches.\n"


def test_people_find_stuck_runs_by_their_state(system: System, order: CodeWorkflow[..., Any]) -> None:
    stuck, running, failed = (order.start(number, ["tea"]) for number in ("4711", "4712", "4713"))
    system.sql("UPDATE orchestrator.runs SET status = 'running'")
    system.sql('UPDATE orchestrator.runs SET stuck = \'{"kind": "K"}\' WHERE id = CAST(:id AS uuid)', id=stuck.id)
    system.sql(
        "UPDATE orchestrator.runs SET status = 'failed', ended_at = now() WHERE id = CAST(:id AS uuid)", id=failed.id
    )

    def listed(*states: str) -> set[str]:
        found = invoke("runs", "list", "--json", *(word for state in states for word in ("--status", state)))
        return {run["id"] for run in json.loads(found.stdout)["runs"]}

    assert listed("stuck") == {stuck.id}
    assert listed("stuck", "failed") == {stuck.id, failed.id}
    assert listed("running") == {stuck.id, running.id}


def test_a_cancelled_run_has_no_error_to_show(system: System, engine_: Engine, order: CodeWorkflow[..., Any]) -> None:
    worker = system.worker(knows=KNOWS)
    handle = system.app.code_workflows["parcel"].start("tea")
    turn(system, worker, engine_)
    handle.cancel()
    turn(system, worker, engine_)
    assert re.search("status +cancelled", show(handle.id))
    assert "Error" not in show(handle.id)
    watched = invoke("runs", "watch", handle.id)
    assert (watched.exit_code, watched.output) == (1, "parcel 0/0 cancelled\n")
