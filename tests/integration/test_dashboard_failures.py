"""Failures in the dashboard: since when, how many, where; also after retries."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape

import msgspec

from orchestrator import Retry
from orchestrator.api.dashboard.fields import of_params
from orchestrator.domain.dag.definition import Param
from orchestrator.sdk.dag.definitions import loads
from orchestrator.store.insights import spread_of_failures
from orchestrator.store.insights.failures import latest_failures
from tests.integration.stage import System
from tests.integration.test_dashboard_seen import fail, operator
from tests.integration.visitor import Visitor


def test_a_retry_keeps_the_origin_of_a_failure_in_its_group(system: System) -> None:
    worker = system.worker("old-1", slots=9)
    for number in range(3):
        system.job.enqueue(number)
    fail(system, worker)
    worker.leave()
    hour_ago = "now() - interval '45 minutes'"
    system.sql('UPDATE orchestrator.ended_tasks SET error = error || \'{"message": "card 17"}\'')
    system.sql(f"UPDATE orchestrator.ended_tasks SET ended_at = {hour_ago}, started_at = {hour_ago}")
    system.sql("INSERT INTO orchestrator.worker_releases VALUES ('old-1', 'v1', now(), now())")
    began = system.sql("SELECT ended_at FROM orchestrator.ended_tasks LIMIT 1")[0]["ended_at"]
    operator(system).post("/ui/tasks/retry", name="job")
    again = system.worker("new-2", slots=9)
    assert len(fail(system, again)) == 3
    system.sql('UPDATE orchestrator.ended_tasks SET error = error || \'{"message": "card 18"}\'')
    end = datetime.now(UTC) + timedelta(minutes=1)
    with system.engine.connect() as connection:
        (group,) = latest_failures(connection, end - timedelta(days=1)).groups
        (counts,) = spread_of_failures(connection, end - timedelta(hours=1), end, 6).values()
        (lately,) = spread_of_failures(connection, end - timedelta(minutes=30), end, 3).values()
    assert (group.tasks, group.first_at, group.first_release) == (3, began, "v1")
    assert group.last_at > began + timedelta(minutes=44)
    assert (group.workers, group.all_workers) == (["new-2", "old-1"], 2)
    assert counts == [0, 3, 0, 0, 0, 3]
    assert lately == [0, 0, 3], "what is before the time that is shown is not drawn at its edge"
    page = unescape(operator(system).get("/ui/failures?within=1h").text)
    assert '<small class="why">rising</small>' in page, "not stopped"
    assert "3 tasks still failed</span>" in page
    assert "6 failures, including failed retries" in page


def test_every_time_range_counts_the_same_failed_tasks(system: System) -> None:
    worker = system.worker(slots=9)
    first, *_ = [system.job.enqueue(number) for number in range(3)]
    fail(system, worker)
    first.retry()
    fail(system, worker)
    ada = operator(system)
    for within in ("15m", "1h", "24h"):
        page = unescape(ada.get(f"/ui/failures?within={within}").text)
        legend = re.search(r'<p class="legend"><span class="s-failed"><i></i>([^<]*)<', page)
        assert legend, within
        assert legend[1] == "3 tasks still failed", within
        assert (" failed in total, including tasks retried since" in page) == (within == "1h")


def test_attempts_are_counted_by_outcome_and_requested_retries_marked(system: System) -> None:
    worker = system.worker(slots=9)
    task = system.job.options(retries=Retry(max=1, base=0.001, jitter=0)).enqueue(1)
    system.pass_seconds()
    for _ in range(2):
        system.tick_until(lambda: worker.fail(*(taken := worker.take())) or taken)
    system.tick_until(lambda: task.status() == "failed")
    task.retry()
    fail(system, worker)
    page = unescape(operator(system).get(f"/ui/tasks/{task.id}").text)
    assert re.search(r"<dt>Attempts</dt><dd>([^/]*)</small>", page)[1] == "3 <small>3 failed"  # type: ignore[index]
    asked = re.findall(r'<tr data-key="attempt-(\d)">(?:(?!</tr>).)*was retried on request', page, re.DOTALL)
    assert asked == ["2"], "the policy has asked for the second"


def test_a_long_message_is_printed_once(system: System) -> None:
    worker = system.worker(slots=9)
    task = system.job.enqueue(1)
    fail(system, worker)
    message = "".join(f"cause {number} " for number in range(300)).strip()
    change = "UPDATE orchestrator.ended_tasks SET error = error || CAST(:error AS jsonb)"
    for traceback in (f'File "a.py", line 3, in pay\nValueError: {message}\n', ""):
        system.sql(change, error=msgspec.json.encode({"message": message, "traceback": traceback}).decode())
        page = unescape(operator(system).get(f"/ui/tasks/{task.id}").text)
        assert page.count("cause 299") == 1, traceback
        assert page.count("cause 0 ") <= 2, traceback


def test_required_parameters_stand_first_in_a_form() -> None:
    params = {"day": Param(default=1), "customer": Param(), "n": Param(default=2), "where": Param()}
    assert [field.name for field in of_params(params)] == ["customer", "where", "day", "n"]


def test_tasks_of_steps_are_listed_with_step_and_workflow(system: System) -> None:
    worker = system.worker(knows=("job", "secret"), slots=9)
    system.app.task(name="secret", redact=["number"])(lambda number=0: number)
    for name, task in (("nightly", "job"), ("weekly", "job"), ("hidden", "secret")):
        step = f"{{task: {task}, foreach: '${{params.n}}', input: {{number: '${{item}}'}}}}"
        definition = loads(f"name: {name}\nparams: {{n: {{default: [41, 42]}}}}\ntasks:\n  big: {step}\n")
        system.app.workflows.apply(definition)
        run = system.app.workflows[name].start()
        fail(system, worker)
        page = unescape(operator(system).get(f"/ui/tasks?run={run.id}").text)
        rows = re.findall(r'<tr data-key="[0-9a-f-]{36}">(.*?)</tr>', page, re.DOTALL)
        assert [re.findall(r"<small>step ([^<]*)</small>", row) for row in rows] == [
            [f"big[0] of {name}"],
            [f"big[1] of {name}"],
        ]
        shown = [re.findall(r'<small class="why mono">([^<]*)<', row) for row in rows]
        assert shown == ([[], []] if name == "hidden" else [["number=41"], ["number=42"]])
    page = unescape(operator(system).get("/ui/failures").text)
    assert "in workflows nightly, weekly, such as step big " in page
    assert "in workflow hidden, such as step big " in page


def test_search_finds_tasks_by_their_keys_and_steps(system: System) -> None:
    system.worker(slots=9)
    wanted = {
        "rep-1": system.job.options(idempotency_key="rep-1").enqueue(1).id,
        "acct-1": system.job.options(unique_key="acct-1").enqueue(2).id,
    }
    system.app.workflows.apply(loads("name: w\ntasks:\n  big_s1001: {task: job}\n"))
    run = system.app.workflows["w"].start()
    system.pass_seconds(2)
    (step,) = system.sql("SELECT id FROM orchestrator.tasks WHERE run_id = :run", run=run.id)
    ada = operator(system)
    for text, id in (wanted | {"BIG_s1001": step["id"]}).items():
        page = ada.get(f"/ui/search?text={text}").text
        assert re.findall(r'<a href="/ui/tasks/([^"]*)">job', page) == [str(id)], text
        assert re.findall(r'key <span class="mono">([^<]*)<', page) == ([text] if text in wanted else []), text
    page = ada.get("/ui/search?text=acct").text
    assert 'href="/ui/tasks/' not in page
    assert "Keys must match exactly." in page


def test_lists_of_tasks_show_their_errors(system: System) -> None:
    worker = system.worker(slots=9)
    system.job.options(idempotency_key="rep-9").enqueue(1)
    fail(system, worker)
    system.sql('UPDATE orchestrator.ended_tasks SET error = error || \'{"kind": "E", "message": "card 17"}\'')
    ada = operator(system)
    for path in ("/ui/search?text=rep-9", "/ui/search?text=job"):
        assert '<small class="why">E: card 17</small>' in ada.get(path).text, path


def test_lists_accept_open_as_a_status_filter(system: System) -> None:
    system.job.enqueue(1)
    ada = operator(system)
    page = ada.get("/ui/runs?status=open").text
    assert 'value="running" checked' in page
    page = ada.get("/ui/tasks?status=open&status=failed").text
    chosen = re.findall(r'name="status" value="(\w+)" checked', page)
    assert sorted(chosen) == ["dispatched", "failed", "pending", "running"]
    assert 'class="said' not in page


def test_a_failure_group_links_to_its_tasks_and_names_its_error(system: System) -> None:
    worker = system.worker(slots=9)
    ids = [system.job.enqueue(number).id for number in range(2)]
    fail(system, worker)
    change = "UPDATE orchestrator.ended_tasks SET error = error || CAST(:error AS jsonb) WHERE id = :id"
    for id, message in zip(ids, ("card 17 is empty", "no such bank"), strict=True):
        system.sql(change, error=msgspec.json.encode({"message": message}).decode(), id=id)
    ada = operator(system)
    for path in ("/ui", "/ui/failures"):
        links = re.findall(r'href="(/ui/tasks\?status=failed&amp;[^"]*kind=[^"]*%23[^"]*)"', ada.get(path).text)
        found = {task for link in links for task in re.findall(r'<tr data-key="([^"]*)">', _of(ada, link))}
        assert found == {str(id) for id in ids}, path
        assert all(len(re.findall(r'<tr data-key="', _of(ada, link))) == 1 for link in links), path
    (retry, *_) = re.findall(r'href="(/ui/tasks/retry\?[^"]*)"', ada.get("/ui/failures").text)
    shown = re.sub(r"<input type=.hidden[^>]*>", "", _of(ada, retry))
    assert "is empty" in shown or "no such bank" in shown
    assert "#" not in re.sub(r"<[^>]*>", "", shown.partition("<main")[2]), "what names a group is for programs"
    listed = _of(ada, links[0])
    assert "Failures like <strong>" in listed
    assert "&amp;kind=" in listed.partition("Retry all failed")[0], "the same is retried"


def _of(visitor: Visitor, link: str) -> str:
    return visitor.get(unescape(link)).text


def test_the_overview_counts_failed_runs_and_leads_to_them(system: System) -> None:
    worker = system.worker(slots=9)
    system.app.workflows.apply(loads("name: w\ntasks:\n  one: {task: job}\n"))
    ada = operator(system)
    assert "status=failed&amp;sort=-ended" not in ada.get("/ui").text
    run = system.app.workflows["w"].start()
    fail(system, worker)
    system.tick_until(lambda: run.status() == "failed")
    ada = operator(system)
    link = re.search(r'<a href="(/ui/runs[^"]*)">1 run failed</a>', ada.get("/ui").text)
    assert link
    assert f'<tr data-key="{run.id}">' in _of(ada, link[1])


def test_tasks_of_a_run_are_sortable_by_column(system: System) -> None:
    worker = system.worker(slots=9)
    steps = "".join(f"  s{number}: {{task: job, input: {{number: {number}}}}}\n" for number in range(4))
    system.app.workflows.apply(loads(f"name: w\ntasks:\n{steps}"))
    run = system.app.workflows["w"].start()
    system.pass_seconds()
    taken = worker.take()
    worker.fail(*taken[:2], retryable=False)
    system.pass_seconds(2)
    stored = system.sql(
        "SELECT id, seq, 'infinity'::timestamptz AS at FROM orchestrator.tasks WHERE run_id = :run"
        " UNION ALL SELECT id, seq, ended_at FROM orchestrator.ended_tasks WHERE run_id = :run",
        run=run.id,
    )
    ada = operator(system)
    assert 'aria-sort="ascending"' in ada.get(f"/ui/tasks?run={run.id}").text
    for sort, key in (("", "seq"), ("when", "seq"), ("-when", "seq"), ("ended", "at"), ("-ended", "at")):
        rows, link = [], f"/ui/tasks?run={run.id}&sort={sort}&limit=3"
        while link:
            page = ada.get(link).text
            rows += re.findall(r'<tr data-key="([^"]*)">', page)
            more = re.search(r'href="([^"]*)" rel="next"', page)
            link = f"{unescape(more[1])}&limit=3" if more else ""
        wanted = sorted(stored, key=lambda row: (str(row[key]) if key == "at" else row[key], row["id"]))
        wanted = wanted[::-1] if sort.startswith("-") else wanted
        assert rows == [str(row["id"]) for row in wanted], sort
