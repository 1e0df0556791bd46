"""Two runs beside each other in the dashboard."""

from __future__ import annotations

import html
import re
from uuid import UUID

import pytest

from orchestrator.api import access
from orchestrator.api.app import create_app
from orchestrator.api.dashboard.pages import compare
from orchestrator.domain.access import Scope
from orchestrator.sdk.dag.definitions import loads
from orchestrator.sdk.values.payload import encode_value
from orchestrator.transport.codec import LogLine
from tests.integration.api_client import make_key
from tests.integration.stage import System, Worker
from tests.integration.visitor import Visitor
from tests.said import say

FIRST = """
name: nightly
params: {region: {type: string, default: eu}}
tasks:
  fetch: {task: job}
  load: {task: job, depends_on: [fetch]}
"""
SECOND = FIRST.replace("load: {task: job,", "load: {task: job, retries: 0,")


def play(system: System, worker: Worker, region: str, result: object, *, fails: bool = False) -> str:
    """Run the workflow to its end; return the id of the run."""
    run = system.app.workflows["nightly"].start(region=region)
    for step in range(2):
        system.pass_seconds()
        taken = worker.take()
        if fails and step:
            worker.fail(*taken, retryable=False)
        else:
            worker.succeed(*taken, result=encode_value(result, "a result", 10_000))
    system.pass_seconds()
    assert run.progress().status == ("failed" if fails else "success")
    return str(run.id)


@pytest.fixture
def visitor_and_runs(system: System) -> tuple[Visitor, str, str]:
    worker = system.worker(knows=("job",), slots=10)
    system.app.workflows.apply(loads(FIRST))
    good = play(system, worker, "eu", {"rows": 7})
    system.app.workflows.apply(loads(SECOND))
    bad = play(system, worker, "us", {"rows": 8}, fails=True)
    return Visitor(create_app(system.settings)), good, bad


def visible_text(page: str) -> str:
    """Return the visible text of a page, without ages."""
    return re.sub(r"\d+s ago", "", html.unescape(re.sub(r"<[^>]+>", " ", page.partition("<main")[2])))


def test_a_failed_run_links_to_a_comparison_with_the_last_success(visitor_and_runs: tuple[Visitor, str, str]) -> None:
    visitor, good, bad = visitor_and_runs
    link = f"/ui/compare?run={bad}"
    assert f'href="{link}"' in visitor.get(f"/ui/runs/{bad}").text
    page = visitor.get(link).text
    for run in (good, bad):
        assert f'href="/ui/runs/{run}"' in page
    text = visible_text(page)
    for line in ('-  "region": "eu"', '+  "region": "us"', "+    retries: 0", '-  "rows": 7', '+  "rows": 8'):
        assert line in text, (line, text)
    assert re.search(r"load\s+✓\s+success\s+100ms\s+✗\s+failed\s+100ms", text), text


def test_the_comparison_of_large_outputs_is_truncated(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_MAX_SHOWN", 30)
    worker = system.worker(knows=("job",), slots=10)
    system.app.workflows.apply(loads(FIRST))
    results: list[dict[str, object]] = [{"rows": [*range(start, start + 40)], "text": "x" * 600} for start in (0, 100)]
    _, last = (play(system, worker, "eu", result) for result in results)
    text = visible_text(Visitor(create_app(system.settings)).get(f"/ui/compare?run={last}").text)
    assert "more lines differ" in text
    assert "1 more output differs." in text, "of two, the first has taken the room"
    assert len(text) < 5_000


def test_a_run_without_an_earlier_success_is_compared_with_the_next(system: System) -> None:
    worker = system.worker(knows=("job",), slots=10)
    system.app.workflows.apply(loads(FIRST))
    bad = play(system, worker, "us", 1, fails=True)
    visitor = Visitor(create_app(system.settings))
    assert "No other run of this workflow has succeeded." in visitor.get(f"/ui/compare?run={bad}").text
    assert "Compare with the" not in visitor.get(f"/ui/runs/{bad}").text
    first, second = play(system, worker, "eu", 1), play(system, worker, "eu", 1)
    page = visitor.get(f"/ui/compare?run={bad}").text
    assert 0 < page.index(f'<a href="/ui/runs/{bad}"') < page.rindex(f'<a href="/ui/runs/{first}"')
    assert second not in page


def test_equal_steps_of_a_large_definition_are_left_out(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_MAX_ROWS", 1)
    worker = system.worker(knows=("job",), slots=10)
    system.app.workflows.apply(loads(FIRST))
    play(system, worker, "eu", 1)
    system.app.workflows.apply(loads(SECOND))
    last = play(system, worker, "eu", 1)
    definition = visible_text(Visitor(create_app(system.settings)).get(f"/ui/compare?run={last}").text)
    definition = definition.partition("Definition")[2].partition("Steps")[0]
    assert '+load: {"task":"job","depends_on":["fetch"],"retries":0}' in definition
    assert "fetch: " not in definition


def test_two_runs_can_be_marked_for_comparison_in_the_grid(visitor_and_runs: tuple[Visitor, str, str]) -> None:
    visitor, good, bad = visitor_and_runs
    grid = visitor.get("/ui/workflows/nightly").text
    marks = re.findall(r'type="checkbox" name="run" value="([^"]+)"', grid)
    assert marks == [good, bad]
    assert '<form action="/ui/compare">' in grid
    page = visitor.get(f"/ui/compare?run={bad}&run={good}").text
    assert visible_text(page) == visible_text(visitor.get(f"/ui/compare?run={bad}").text), (
        "the older one is the measure"
    )
    assert "Mark two runs" in visitor.get("/ui/compare").text
    assert "No other run" in visitor.get(f"/ui/compare?run={good}").text
    assert visitor.get(f"/ui/compare?run={good}&run={bad}&run={good}").status_code == 422


def test_a_restricted_key_compares_only_its_own_runs(
    visitor_and_runs: tuple[Visitor, str, str], system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    _, good, bad = visitor_and_runs
    own, other = Visitor(create_app(system.settings)), Visitor(create_app(system.settings))
    own.log_in(make_key(system.engine, Scope.READ, "ada", queues=None, workflows="night"))
    other.log_in(make_key(system.engine, Scope.READ, "bob", queues=None, workflows="mail"))
    assert own.get(f"/ui/compare?run={bad}").status_code == 200
    assert other.get(f"/ui/compare?run={bad}&run={good}").status_code == 404


def test_the_log_of_a_run_merges_all_tasks_in_order(visitor_and_runs: tuple[Visitor, str, str], system: System) -> None:
    visitor, good, _ = visitor_and_runs
    now = 1_700_000_000.0
    for step, places in (("fetch", (0, 2)), ("load", (1, 3))):
        found_by = "SELECT id FROM orchestrator.ended_tasks WHERE run_id = :run AND step = :step"
        (task,) = system.sql(found_by, run=good, step=step)
        lines = [LogLine(now + place, 1, "info", f"line <{place}>") for place in places]
        say(system.engine, UUID(str(task["id"])).bytes, *lines, run=UUID(good).bytes, step=step)
    assert f'href="/ui/runs/{good}/log"' in visitor.get(f"/ui/runs/{good}").text
    path, every = f"/ui/runs/{good}/log", [("fetch", "0"), ("load", "1"), ("fetch", "2"), ("load", "3")]

    def logged_lines(query: str = "") -> list[tuple[str, str]]:
        return re.findall(r"(fetch|load)\s+line\s+<(\d)", visible_text(visitor.get(path + query).text))

    assert logged_lines() == every
    assert logged_lines("?text=%3C1") == [("load", "1")]
    assert "<mark>&lt;1</mark>" in visitor.get(f"{path}?text=%3C1").text
    assert logged_lines("?level=warning") == []
    first, second = sorted(
        int(one.partition("-")[0]) for one in re.findall(r'data-entry="([^"]+-1)"', visitor.get(path).text)
    )
    assert logged_lines(f"?before={second}-1") == [every[0], every[2]]
    assert logged_lines(f"?after={first}-2") == [every[1], every[3]]
    kept = visitor.get(f"{path}.txt").text.splitlines()
    assert [re.sub(r" [0-9a-f-]{36} ", " ", one[30:]) for one in kept] == [
        f"{step} 1 info     line <{number}>" for step, number in sorted(every)
    ]
