"""Runs that signal each other, tick by tick: each signal arrives once, at the newest run of its target's chain."""

from __future__ import annotations

import html
import logging
import re
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator import Orchestrator, UnknownHandler, WorkflowContext, WorkflowHandle, workflow
from orchestrator.api.app import create_app
from orchestrator.cli import main
from orchestrator.domain.fleet.announced import taking
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.settings import load_settings
from tests.integration.api_client import ApiClient
from tests.integration.code_stage import act, kinds, run_row
from tests.integration.serving import serving
from tests.integration.stage import System, Worker, raw
from tests.integration.visitor import Visitor


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker("w1", knows=("job", "sends", "hears"))


@pytest.fixture
def sends(system: System) -> CodeWorkflow[..., Any]:
    job, app = system.job, system.app

    @app.workflow(name="sends")
    async def sends(ctx: WorkflowContext, to: str, last: bool = False) -> None:
        app.workflow_run(to).signal("news", 1)
        if not last:
            await job.schedule(1)
            app.workflow_run(to).signal("news", 2)

    return sends


@pytest.fixture
def hears(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="hears")
    async def hears(ctx: WorkflowContext, renewed: bool = True) -> list[int]:
        if not renewed:
            ctx.continue_as_new()
        news = ctx.signals("news", type=int)
        return [await news.get(), await news.get()]

    return hears


def turn(system: System, worker: Worker, engine: Engine, *, fresh: bool = True) -> list[Any]:
    """Take all possible turns, each replayed; return the remaining tasks."""
    left: list[Any] = []
    for _ in range(6):
        system.pass_seconds()
        for dispatch in worker.take():
            if dispatch.is_turn_task:
                worker.report(act(engine, dispatch))
                if fresh:
                    engine.evict(dispatch.id)
            else:
                left.append(dispatch)
        system.tick()
    return left


def test_a_signal_is_sent_once_however_often_its_sender_is_replayed(
    system: System, worker: Worker, engine_: Engine, sends: CodeWorkflow[..., Any], hears: CodeWorkflow[..., Any]
) -> None:
    listener: WorkflowHandle[list[int]] = hears.start()
    sender = sends.start(listener.id)
    (task,) = turn(system, worker, engine_)
    assert kinds(system, listener).count("signal_received") == 1
    worker.succeed(task)
    turn(system, worker, engine_)
    assert listener.result(0) == [1, 2]
    assert sender.status() == "success"
    assert kinds(system, sender).count("signal_sent") == 2
    assert kinds(system, listener).count("signal_received") == 2


def test_a_signal_of_the_last_turn_reaches_the_targets_successor(
    system: System, worker: Worker, engine_: Engine, sends: CodeWorkflow[..., Any], hears: CodeWorkflow[..., Any]
) -> None:
    listener = hears.start(False)
    turn(system, worker, engine_)
    assert run_row(system, listener)["reason"] == "continued"
    sends.start(listener.id, True)
    sends.start(listener.id, True)
    turn(system, worker, engine_)
    assert listener.result(0) == [1, 1]


def test_an_undeliverable_signal_is_logged_and_its_sender_continues(
    system: System,
    worker: Worker,
    engine_: Engine,
    sends: CodeWorkflow[..., Any],
    hears: CodeWorkflow[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = hears.start()
    listener.terminate()
    turn(system, worker, engine_)
    lost, nobody = sends.start(listener.id, True), sends.start("0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17", True)
    with caplog.at_level(logging.WARNING):
        turn(system, worker, engine_)
    assert [lost.status(), nobody.status()] == ["success", "success"]
    assert f"run.signal_late run={listener.id} signal=news" in caplog.text
    assert "signal_received" not in kinds(system, listener)
    assert system.row(raw(lost))["status"] == "success"


def test_a_signal_to_a_failing_run_is_in_its_history(system: System, worker: Worker, engine_: Engine) -> None:
    job = system.job

    @system.app.workflow(name="hears")
    async def fails(ctx: WorkflowContext) -> int:
        await job.schedule(1)
        return await ctx.signals("news", type=int).get()

    handle = fails.start()
    (task,) = turn(system, worker, engine_, fresh=False)
    worker.fail(task, retryable=False)
    system.pass_seconds()
    worker.report(act(engine_, *worker.take()))  # the run fails, unknown to the leader
    handle.signal("news", 7)
    turn(system, worker, engine_)
    assert handle.status() == "failed"
    assert "signal_received" in kinds(system, handle)
    assert kinds(system, handle)[-1] == "run_failed", "its code was shown the signal first"


def test_signal_many_signals_open_runs_and_names_missed_runs(
    system: System, worker: Worker, engine_: Engine, hears: CodeWorkflow[..., Any], sends: CodeWorkflow[..., Any]
) -> None:
    open_runs = [hears.start() for _ in range(3)]
    renewed, ended, stranger = hears.start(renewed=False), hears.start(), sends.start(open_runs[0].id)
    ended.terminate()
    turn(system, worker, engine_)
    both = [(run, number) for number in (1, 2) for run in (*open_runs, renewed, ended, stranger)]
    nobody = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"
    missed = hears.signal_many("news", [*both, (nobody, 1)])
    assert set(missed) == {ended.id, stranger.id, nobody}
    assert set(missed.unknown) == {stranger.id, nobody}
    assert system.sql("SELECT count(*) AS n FROM orchestrator.inbox WHERE kind = 'signal'")[0]["n"] == 8
    turn(system, worker, engine_)
    assert [run.result(0) for run in open_runs[1:]] == [[1, 2], [1, 2]]
    assert renewed.result(0) == [1, 2]
    (entry,) = system.sql("SELECT target, detail FROM orchestrator.audit WHERE kind = 'runs'")
    assert (entry["target"], entry["detail"]) == ("hears", {"name": "news", "runs": 4})


@pytest.fixture
def counter(system: System) -> Any:
    @system.app.workflow(name="counter")
    class Counter:
        def __init__(self, ctx: WorkflowContext) -> None:
            self.ctx, self.heard = ctx, list[int]()

        @workflow.run
        async def run(self) -> list[int]:
            await self.ctx.wait_condition(lambda: self.heard)
            return self.heard

        @workflow.signal
        def push(self, number: int) -> None:
            self.heard.append(number)

    return Counter


def announce(system: System, *signals: str) -> Worker:
    """Add a worker that has the workflow and announces these signals; a function announces none."""
    said = (taking("counter", signals),) if signals else ()
    worker = system.worker(f"w{len(system.workers)}", knows=("job", "counter", "counter@1", *said))
    system.pass_seconds()
    return worker


REFUSED = "'counter' has no handler for signal 'pusch'. Did you mean 'push'? It handles: push, stop. Nothing was sent."


@pytest.mark.usefixtures("in_empty_folder")
def test_a_signal_that_no_worker_announces_is_rejected_for_every_client(system: System, counter: Any) -> None:
    run = counter.run.start()
    by_id = system.app.workflow_run(run.id)
    by_id.signal("anything", 1)  # nothing is announced yet
    system.pass_seconds()
    announce(system, "push", "stop")
    with pytest.raises(UnknownHandler, match=re.escape(REFUSED)):
        by_id.signal("pusch", 1)
    with serving(system.app.settings) as url, Orchestrator(load_settings(environ={}), api_url=url) as app:
        with pytest.raises(UnknownHandler, match=re.escape(REFUSED)):
            app.workflow_run(run.id).signal("pusch", 1)
        app.workflow_run(run.id).signal("push", 1)
        app.workflow_run(run.id, counter.run).signal(counter.push, 2)
    system.pass_seconds()

    answer = ApiClient(system.settings).send("POST", f"/api/v1/runs/{run.id}/signals/pusch", json={"value": 1})
    assert (answer.status_code, answer.json()["detail"]) == (400, f"Workflow {REFUSED}")
    assert answer.json()["type"].endswith(":UnknownHandler")
    visitor = Visitor(create_app(system.settings))
    visitor.get(f"/ui/runs/{run.id}")
    page = visitor.get(visitor.post(f"/ui/runs/{run.id}/signals/pusch", value="1").headers["location"])
    assert "The signal is sent" not in page.text
    assert REFUSED in html.unescape(page.text)

    said = CliRunner().invoke(main, ["runs", "signal", run.id, "pusch", "1"])
    assert said.exit_code == 1
    assert REFUSED in said.output
    heard = [kind for kind in kinds(system, run) if kind == "signal_received"]
    assert len(heard) == 3, "the one before, and two of a known name"


def test_a_signal_is_accepted_if_any_release_announces_it(system: System, counter: Any) -> None:
    run = system.app.workflow_run(counter.run.start().id)
    announce(system, "push")
    with pytest.raises(UnknownHandler):
        run.signal("stop")
    newer = announce(system, "push", "stop")
    run.signal("stop")
    newer.leave()
    system.pass_seconds()
    with pytest.raises(UnknownHandler):
        run.signal("stop")
    announce(system)  # a worker of a release that announces nothing, or one with a function
    run.signal("stop")


def test_a_sender_with_newer_code_than_the_workers_is_accepted(system: System, counter: Any) -> None:
    run = counter.run.start()
    announce(system, "stop")
    run.signal(counter.push, 1)
    run.signal("push", 1)
    with serving(system.app.settings) as url, Orchestrator(load_settings(environ={}), api_url=url) as app:
        app.workflow_run(run.id, counter.run).signal(counter.push, 2)
    assert len(system.sql("SELECT 1 FROM orchestrator.inbox WHERE kind = 'signal'")) == 3


def test_a_run_that_sends_an_unknown_signal_gets_an_error(
    system: System, counter: Any, engine_: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    @system.app.workflow(name="asks")
    async def asks(ctx: WorkflowContext, to: str) -> str:
        handle = system.app.workflow_run(to)
        handle.signal("pusch", 1)
        try:
            await handle.asignal("pusch", 1)
        except UnknownHandler as error:
            await handle.asignal("push", 1)
            return str(error)
        return "sent"

    worker = system.worker("w1", knows=("job", "counter", "counter@1", "asks", taking("counter", ["push", "stop"])))
    run = counter.run.start()
    asking = asks.start(run.id)
    for _ in range(3):
        turn(system, worker, engine_)
    assert asking.result(0) == f"Workflow {REFUSED}"
    assert run.result(0) == [1]
    assert f"run.signal_unknown run={run.id} signal=pusch: Workflow {REFUSED}" in caplog.text
