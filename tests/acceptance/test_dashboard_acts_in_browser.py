"""What is done on pages of runs, failures, queues and workers, in a real browser: by mouse, and by keyboard alone."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.domain.schedules.schedule import fire_key
from tests.acceptance.browser import Watched
from tests.acceptance.listening import enqueue
from tests.acceptance.stack import Stack
from tests.acceptance.test_dashboard_in_browser import (  # noqa: F401  # and fixtures
    base_of_module,
    browser_of_module,
    served_of_module,
    start_dag,
    tab_to,
    window_of_module,
)
from tests.waiting import eventually

BY = pytest.mark.parametrize("by", ["mouse", pytest.param("keyboard", marks=pytest.mark.long)])
LABEL = "document.activeElement.getAttribute('aria-label') || ''"


def press(window: Watched, by: str, label: str, within: str = "") -> None:
    """Press a button or follow a link."""
    if by == "keyboard" and within:
        window.page.locator(within).locator("a, button").filter(has_text=label).first.focus()
        window.page.keyboard.press("Enter")
    elif by == "keyboard":
        tab_to(window, label)
        window.page.keyboard.press("Enter")
    else:
        window.page.locator(within or "main").locator("button, a, summary").filter(has_text=label).first.click()


def tick(window: Watched, by: str, label: str) -> None:
    """Mark a row; with the keyboard, go on to the next box of this label."""
    if by == "mouse":
        window.page.locator(f"input[aria-label^='{label}']:not(:checked)").first.check()
        return
    for _ in range(120):
        window.page.keyboard.press("Tab")
        if window.page.evaluate(LABEL).startswith(label):
            window.page.keyboard.press("Space")
            return
    raise AssertionError(f"{label!r} is not reached by the tab key")


def start_runs(base: str, name: str, count: int, task: str = "add") -> list[str]:
    """Start runs one after another, each with a number of its own, and return them when they have ended."""
    given = {"a": 1, "b": "${params.number}"} if task == "add" else {"text": "as asked"}
    tasks = {"only": {"task": f"project.{task}", "input": given}}
    body = {"name": name, "params": {"number": {"type": "integer"}}, "tasks": tasks}
    api = f"{base}/api/v1"
    httpx.post(f"{api}/workflows", json={"definition": body}).raise_for_status()
    runs = []
    for number in range(count):
        started = httpx.post(f"{api}/workflows/{name}/runs", json={"params": {"number": number}}).raise_for_status()
        runs.append(str(started.json()["id"]))
    for run in runs:
        eventually(lambda: httpx.get(f"{api}/runs/{run}").json()["run"]["ended_at"], "it has ended")  # noqa: B023
    return runs


@pytest.mark.long  # links and forms, of which tests/integration/test_dashboard_….py ask the server
@BY
def test_two_runs_of_the_grid_are_compared(base: str, window: Watched, by: str) -> None:
    start_runs(base, f"compared-{by}", 3)
    window.go(f"/ui/workflows/compared-{by}")
    window.sees(".grid")
    for _ in range(2):
        tick(window, by, "Compare run")
    press(window, by, "Compare two marked runs")
    window.sees("h1", "Compare runs")
    assert window.page.locator("tbody tr", has_text="success").count() >= 2
    window.sees(".diff .added", '"number"')
    window.sees(".diff .gone", '"number"')
    press(window, by, f"compared-{by}")
    window.sees("h1", f"compared-{by}")
    press(window, by, "Compare with the last good run")
    window.sees("h1", "Compare runs")


@BY
def test_failures_are_acknowledged_snoozed_and_shown_again(base: str, window: Watched, by: str) -> None:
    name, args = {"mouse": ("broken", ["by hand"]), "keyboard": ("unserialisable", [])}[by]
    task = enqueue(f"{base}/api/v1", name, *args, queue="mail")
    eventually(lambda: "failed" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has failed")
    rows = window.page.locator("tr[data-key]", has_text=name)

    def handle(label: str) -> None:
        if by == "mouse":
            rows.first.get_by_text("Handle…").click()
            rows.first.get_by_role("button", name=label, exact=True).click()
            return
        rows.first.locator("summary").focus()
        window.page.keyboard.press("Enter")
        rows.first.get_by_role("button", name=label, exact=True).wait_for()
        tab_to(window, label)
        window.page.keyboard.press("Enter")

    eventually(lambda: window.go("/ui/failures") and rows.count(), "the group is listed")
    handle("Acknowledge")
    window.sees(".said", "acknowledged")
    window.sees("tr[data-key] .why", "acknowledged by")
    press(window, by, "Undo")
    window.sees(".said", "shown as before")
    window.page.locator("tr[data-key] .why", has_text="acknowledged by").wait_for(state="detached")
    handle("Snooze 24 h")
    window.sees(".said", "snoozed until")
    assert not rows.first.is_visible()
    press(window, by, "1 snoozed group")
    until = window.sees("time[data-moment]")
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d local", until.inner_text())
    window.page.keyboard.type("tt")
    assert until.inner_text().endswith(" UTC"), "it follows the switch, and says so"
    window.page.keyboard.type("t")
    assert rows.first.is_visible()
    press(window, by, "Reopen")
    window.sees(".said", "shown as before")
    assert rows.first.is_visible()


@BY
def test_marked_runs_are_retried_and_all_that_fit_are_cancelled(
    base: str, window: Watched, by: str, tmp_path: Path
) -> None:
    start_runs(base, f"broken-{by}", 2, "broken")
    window.go(f"/ui/runs?workflow=broken-{by}")
    for _ in range(2):
        tick(window, by, f"Mark broken-{by}")
    window.sees("button", "Retry 2 marked")
    press_back(window, by, "Retry 2 marked")
    window.sees(".said", "2 of 2 runs are being retried")
    for _ in range(2):
        start_dag(base, f"open-{by}", tmp_path / "never")
    window.go(f"/ui/runs?workflow=open-{by}")
    press(window, by, "Cancel all open…")
    window.sees("h1", "Cancel open runs")
    press(window, by, "Cancel 2 runs")
    window.sees(".said", "2 of 2 runs are being cancelled")
    window.page.locator("tbody .s-cancelled").nth(1).wait_for()


@pytest.mark.long  # links and forms, of which tests/integration/test_dashboard_….py ask the server
@BY
def test_runs_are_deleted_after_a_question_with_their_number(base: str, window: Watched, by: str) -> None:
    runs = start_runs(base, f"gone-{by}", 3)
    window.go(f"/ui/runs?workflow=gone-{by}")
    for _ in range(2):
        tick(window, by, f"Mark gone-{by}")
    press_back(window, by, "Delete 2 marked…")
    window.sees(".pop:visible", "This cannot be undone")
    press(window, by, "Delete 2 marked", ".pop:visible")
    window.sees(".said", "2 of 2 runs are being deleted")
    window.page.locator("tbody tr[data-key]").nth(1).wait_for(state="detached")
    press(window, by, f"gone-{by}", "tbody")
    window.sees("h1 .s-success")
    press(window, by, "Delete…")
    press(window, by, "Delete it")
    window.sees(".said", "1 of 1 runs are being deleted")
    assert window.page.url == f"{base}/ui/runs"
    for run in runs:
        eventually(lambda: httpx.get(f"{base}/api/v1/runs/{run}").status_code == 404, "it is gone", 60)  # noqa: B023
    written = httpx.get(f"{base}/api/v1/audit?act=delete&target={runs[0]}").json()["items"]
    assert [(one["act"], one["kind"]) for one in written] == [("delete", "run")]


def test_keys_move_mark_open_retry_and_cancel(base: str, window: Watched, tmp_path: Path) -> None:
    runs = start_runs(base, "by-key", 3, "broken")[::-1]
    keyboard = window.page.keyboard
    focused = "document.activeElement.closest('tr')?.dataset.key"
    window.go("/ui/runs?workflow=by-key")
    keyboard.press("?")
    window.sees("#keys", "next, previous row")
    keyboard.press("j")  # the page below does not move
    keyboard.press("Escape")
    window.page.locator("#keys").wait_for(state="hidden")
    for key, row in (("j", 0), ("j", 1), ("k", 0), ("k", 0), ("j", 1), ("j", 2), ("j", 2)):
        keyboard.press(key)
        assert window.page.evaluate(focused) == runs[row], key
    keyboard.press("x")
    window.sees("button", "Retry 1 marked")
    keyboard.press("d")
    assert window.page.evaluate("document.activeElement.textContent") == "Delete 1 marked"
    assert not window.page.locator("summary", has_text="Cancel 1").count(), "it has ended"
    keyboard.press("Escape")
    keyboard.press("j")
    keyboard.press("Enter")
    window.page.wait_for_url(f"**/ui/runs/{runs[0]}")
    keyboard.press("r")
    window.sees(".said", "is retried")
    keyboard.press("l")
    window.sees("h1", "Log of all tasks")
    open_run = start_dag(base, "by-key-open", tmp_path / "never")
    window.go(f"/ui/runs/{open_run}")
    keyboard.press("c")
    assert window.page.evaluate("document.activeElement.textContent") == "Cancel it"
    keyboard.press("Enter")
    window.sees("h1 .s-cancelled")
    window.go("/ui/queues/mail")
    keyboard.press("p")
    window.sees(".said", "is paused")
    keyboard.press("u")
    window.sees(".said", "goes on")
    before = window.sees("[data-times]").inner_text()
    keyboard.press("t")
    assert window.sees("[data-times]").inner_text() != before
    window.page.locator("[data-keys]").click()
    window.sees("#keys[open]")


def test_marked_rows_offer_what_can_be_done_to_them(base: str, window: Watched, tmp_path: Path) -> None:
    api = f"{base}/api/v1"
    for _ in range(2):
        enqueue(api, "broken", "mixed", queue="default")
    httpx.post(f"{api}/tasks", json={"name": "project.broken", "args": ["mixed"], "delay": 900}).raise_for_status()
    window.go("/ui/tasks?name=project.broken")
    buttons = window.page.locator(".acts [data-chosen].some:visible")
    pending, failed = (window.page.locator(f"tr:has(.s-{state}) .tick input") for state in ("pending", "failed"))
    eventually(lambda: window.page.evaluate("true") and failed.count() >= 2, "they have failed")
    pending.first.check()
    assert buttons.all_inner_texts() == ["Cancel 1 marked…"], "one that waits is not retried"
    failed.nth(0).check()
    failed.nth(1).check()
    assert buttons.all_inner_texts() == ["Retry 2 marked", "Cancel 1 marked…"]
    window.page.locator("button", has_text="Retry 2 marked").click()
    window.sees(".said", "tasks are retried")
    assert window.page.locator(".said").inner_text() == "2 of 2 tasks are retried."


def press_back(window: Watched, by: str, label: str) -> None:
    """Press a button that stands before what has the focus."""
    if by == "mouse":
        press(window, by, label)
        return
    for _ in range(40):
        window.page.keyboard.press("Shift+Tab")
        if window.page.evaluate("document.activeElement.textContent.trim()") == label:
            window.page.keyboard.press("Enter")
            return
    raise AssertionError(f"{label!r} is not reached by the tab key")


@BY
def test_a_list_is_sorted_by_its_headings(base: str, window: Watched, by: str) -> None:
    runs = start_runs(base, f"sorted-{by}", 3)
    window.go(f"/ui/runs?workflow=sorted-{by}")
    for label, order, listed in (
        ("Started", "ascending", runs),
        ("Started", "descending", runs[::-1]),
        ("Workflow", "ascending", runs),
        ("Ended", "descending", None),
        ("Ended", "ascending", None),
    ):
        press(window, by, label, "thead")
        window.sees(f"th[aria-sort={order}]", label)
        found = window.page.locator("tbody tr[data-key]").evaluate_all("rows => rows.map(row => row.dataset.key)")
        assert sorted(found) == sorted(runs), "the filter stays"
        assert listed is None or found == listed, label
        assert window.page.locator("th[aria-sort]:not([aria-sort=none])").count() == 1


_FIRED = """
INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, version, key, schedule,
                               created_at, started_at, ended_at)
VALUES (gen_random_uuid(), %s, 'success', 0, 0, %s, 1, %s, %s, %s, %s, %s)
"""


@BY
def test_lists_and_their_charts_are_of_a_chosen_time(base: str, window: Watched, by: str) -> None:
    task = enqueue(f"{base}/api/v1", "broken", "timed")
    eventually(lambda: "failed" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has failed")
    window.go("/ui/failures")
    press(window, by, "15m")
    window.sees(".tabs [aria-current]", "15m")
    window.sees("h2", "in the last 15m")
    window.sees("td.main small.why", "first of them in release 2026.1")
    assert window.page.locator(".mark title", has_text="2026.1").count() > 0, "a release is marked in the chart"
    window.page.locator("[name=since]").first.fill("2026-01-01T00:00")
    window.page.locator("[name=until]").first.fill("2026-01-02T00:00")
    press(window, by, "Show", "form.filters")
    window.sees("h2", "2026-01-01")
    assert window.page.locator("tr[data-key]", has_text="timed").count() == 0, "it failed later"
    start_runs(base, f"spanned-{by}", 1)
    for path, row in (("/ui/tasks?name=project.broken&error=timed", task), (f"/ui/runs?workflow=spanned-{by}", "")):
        window.go(path)
        found = window.page.locator(f"tr[data-key='{row}']" if row else "tbody tr[data-key]")
        span = window.page.locator("select[name=span]")
        if by == "mouse":
            span.select_option("15m")
        else:
            span.focus()
            window.page.keyboard.type("last 15")
        window.page.wait_for_url("**span=15m**")
        assert found.count() == 1, path
        window.go(f"{path}&since=2026-01-01T00:00&until=2026-01-02T00:00")
        assert found.count() == 0, path


@BY
def test_a_run_is_found_by_its_tag_and_its_timeline_tells_waits_from_attempts(
    base: str, window: Watched, by: str, tmp_path: Path
) -> None:
    flaky = {"task": "project.flaky", "input": {"path": str(tmp_path / "tries"), "failures": 1}, "retries": 2}
    tasks = {"first": {"task": "project.add", "input": {"a": 1, "b": 1}}, "again": flaky | {"depends_on": ["first"]}}
    body = {"name": f"tagged-{by}", "tasks": tasks}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": body}).raise_for_status()
    asked = {"tags": [f"blue-{by}"], "key": f"own-{by}"}
    started = httpx.post(f"{base}/api/v1/workflows/tagged-{by}/runs", json=asked).raise_for_status()
    run = started.json()["id"]
    window.go("/ui")
    window.page.keyboard.type("/")
    window.page.keyboard.type(f"blue-{by}")
    window.page.keyboard.press("Enter")
    row = f"tr[data-key='{run}']"
    for shown in (f"blue-{by}", f"own-{by}", "v1"):
        window.sees(row, shown)
    press(window, by, f"tagged-{by}", row)
    window.sees("h1 .s-success")
    bar = window.page.locator(".gantt [role=row]", has_text="again")
    assert bar.locator("rect.depends").count() == 1
    assert float(bar.locator("rect.s-between").get_attribute("width") or 0) > 5, (
        "the attempt that failed, and its backoff"
    )
    window.sees(".gantt .legend", "earlier attempts")
    assert window.page.locator(".gantt .scale line").count() >= 3
    press(window, by, "again", ".gantt")
    window.sees("h1", "project.flaky")
    assert window.page.locator("tr[data-key^=attempt]").count() == 2
    press(window, by, window.page.locator(".attempts td.mono a").first.inner_text(), ".attempts")
    window.sees("h2", "Slowest in the last hour")


@BY
def test_a_failed_task_is_retried_with_another_argument(base: str, window: Watched, by: str) -> None:
    task = enqueue(f"{base}/api/v1", "broken", "before")
    eventually(lambda: "failed" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has failed")
    window.go(f"/ui/tasks/{task}")
    press(window, by, "Enqueue with changes…")
    field = window.page.get_by_label("text str, required")
    assert field.input_value() == "before"
    if by == "mouse":
        field.fill("after")
    else:
        tab_to(window, "text str")
        window.page.keyboard.press("Control+A")
        window.page.keyboard.type("after")
    press(window, by, "Enqueue", "form.stacked")
    window.sees(".said", "this is it")
    window.sees(".error", "after")
    assert task not in window.page.url


@BY
def test_many_steps_are_one_row_of_the_grid_and_versions_are_compared(base: str, window: Watched, by: str) -> None:
    api, name = f"{base}/api/v1", f"pieces-{by}"
    runs = []
    for number in (1, 2):
        tasks = {f"piece_{piece}": {"task": "project.add", "input": {"a": 1, "b": 1}} for piece in range(70)}
        tasks["piece_7"] = {"task": "project.add", "input": {"a": 1, "b": number}}
        httpx.post(f"{api}/workflows", json={"definition": {"name": name, "tasks": tasks}}).raise_for_status()
        runs.append(httpx.post(f"{api}/workflows/{name}/runs", json={}).raise_for_status().json()["id"])
    for run in runs:
        eventually(lambda: httpx.get(f"{api}/runs/{run}").json()["run"]["status"] == "success", "it is done")  # noqa: B023
    window.go(f"/ui/workflows/{name}")
    rows = window.page.locator(".grid tbody tr")
    assert rows.count() == 1
    press(window, by, "piece (70)", ".grid")
    eventually(lambda: rows.count() == 70, "each has a row of its own")
    window.go(f"/ui/runs/{runs[1]}")
    press(window, by, "Compare with the last good run")
    window.sees("h1", "Compare runs")
    window.sees("section:has(h2:text-is('Definition')) .diff .added", "b: 2")
    window.sees("section:has(h2:text-is('Outputs')) .diff .added", "3")


def test_a_log_that_is_too_long_says_what_was_dropped_while_one_looks(
    base: str, window: Watched, tmp_path: Path
) -> None:
    task = enqueue(f"{base}/api/v1", "recites", str(tmp_path / "go"), 150_000)
    window.go(f"/ui/tasks/{task}")
    window.sees("#log-before", "lines before these")
    window.sees(".l-dropped", "kept back")
    assert window.page.locator("#log > *").count() <= 2_000
    (tmp_path / "go").touch()
    window.sees("h1 .s-success")
    window.sees("#log p", "the end")
    window.sees(".l-dropped", "lines (")


@pytest.mark.long  # links and forms, of which tests/integration/test_dashboard_….py ask the server
@BY
def test_a_fire_of_the_calendar_leads_to_its_run(served: tuple[Stack, str], window: Watched, by: str) -> None:
    stack, base = served
    name, at = f"fires-{by}", datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    body = {"name": name, "schedule": {"every": "1h"}, "tasks": {"only": {"task": "project.noop"}}}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": body}).raise_for_status()
    series = f"{name}/default"
    with stack.engine.begin() as connection:
        connection.exec_driver_sql(_FIRED, (name, name, fire_key(series, at), series, at, at, at))
    window.go("/ui/schedules")
    window.page.locator(f"a[href='/ui/schedules/{name}/default']").first.click()
    window.sees("h2", "Past fires")
    window.sees(".calendar a.s-success")
    press(window, by, "success", ".calendar")
    window.sees("h1", name)
    window.sees(".facts", f"schedule {name}")


@pytest.mark.long  # links and forms, of which tests/integration/test_dashboard_….py ask the server
@BY
def test_a_queue_leads_to_what_waits_and_a_worker_to_what_it_runs(
    base: str, window: Watched, by: str, tmp_path: Path
) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    task = enqueue(f"{base}/api/v1", "held", str(started), str(go))
    waits = enqueue(f"{base}/api/v1", "noop", queue=f"nobody-{by}")
    eventually(started.exists, "it runs")
    window.go(f"/ui/queues/nobody-{by}")
    window.sees(f"tr[data-key='wait-{waits}'] .why", "worker")
    press(window, by, "project.noop")
    window.sees("h1", "project.noop")
    window.go("/ui/workers")
    worker = httpx.get(f"{base}/api/v1/tasks/{task}").json()["task"]["worker"]
    press(window, by, worker)
    window.sees("h1", worker)
    window.sees(f"tr[data-key='{task}']", "project.held")
    for fact in ("Memory", "Slots busy", "Uptime"):
        window.sees(".facts dt", fact)
    press(window, by, "Drain…", "" if by == "keyboard" else ".head")
    window.sees(".pop:visible", "It takes nothing more")
    window.page.keyboard.press("Escape")
    press(window, by, "project.held", f"tr[data-key='{task}']")
    window.sees("h1 .s-running")
    go.touch()
    window.sees("h1 .s-success")
    slow = window.page.locator(f"tr[data-key='slow-{task}']")
    eventually(lambda: window.go(f"/ui/workers/{worker}") and slow.count(), "it is among the slowest")
    window.go("/ui/queues/default")
    for label in ("p50", "p95", "p99"):
        window.sees(".percentiles th", label)
    window.sees(".percentiles td", "Queue latency")
    window.sees("h2", "Waiting longest")
    window.sees(f"tr[data-key='slow-{task}']", "project.held")


def test_lists_show_how_far_running_tasks_have_come(base: str, window: Watched, tmp_path: Path) -> None:
    go = tmp_path / "go"
    task = enqueue(f"{base}/api/v1", "narrates", str(go))
    eventually(lambda: httpx.get(f"{base}/api/v1/tasks/{task}").json()["progress"], "it says how far it has come")
    worker = eventually(lambda: httpx.get(f"{base}/api/v1/tasks/{task}").json()["task"]["worker"], "its start is known")
    for path in ("/ui/workers", f"/ui/workers/{worker}", "/ui/tasks?status=running"):
        window.go(path)
        assert window.sees(f"tr:has(a[href='/ui/tasks/{task}']) .so-far").inner_text().strip() == "50 %", path
    body = {"name": "half", "tasks": {"only": {"task": "project.narrates", "input": {"go": str(go)}}}}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": body}).raise_for_status()
    run = httpx.post(f"{base}/api/v1/workflows/half/runs", json={}).raise_for_status().json()["id"]
    row = window.page.locator(f"tr[data-key='{run}'] .meter rect.s-running")
    eventually(lambda: window.go("/ui/runs?workflow=half") and row.count(), "its row shows what its task has done")
    assert row.get_attribute("width") == "50.00"
    window.go("/ui/tasks?status=running")
    window.sees(".so-far")
    go.touch()
    eventually(lambda: window.page.locator(".so-far").count() == 0, "both have ended")


@BY
def test_a_large_value_is_folded_and_opened(base: str, window: Watched, by: str) -> None:
    task = enqueue(f"{base}/api/v1", "broken", [f"line {number}" for number in range(1_000)])
    window.go(f"/ui/tasks/{task}")
    value = window.page.locator(".value", has_text="line 0").first
    folded = value.locator("pre")
    window.sees(".value summary", "lines")
    assert not folded.is_visible()
    if by == "mouse":
        value.locator("summary").click()
    else:
        tab_to(window, value.locator("summary").inner_text()[:6])
        window.page.keyboard.press("Enter")
    folded.wait_for(state="visible")
    assert "line 999" in folded.inner_text()


@BY
def test_the_log_of_a_run_grows_and_leads_to_tasks(base: str, window: Watched, by: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    tasks = {
        "first": {"task": "project.says", "input": {"text": "begins"}},
        "second": {"task": "project.narrates", "input": {"go": str(go)}, "depends_on": ["first"]},
    }
    body = {"name": f"spoken-{by}", "tasks": tasks}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": body}).raise_for_status()
    started = httpx.post(f"{base}/api/v1/workflows/spoken-{by}/runs", json={}).raise_for_status()
    window.go(f"/ui/runs/{started.json()['id']}")
    press(window, by, "Log")
    window.sees("h1", "Log of all tasks")
    window.sees(".log p", "begins")
    go.touch()
    window.sees(".log p", "is done")
    assert re.fullmatch("first|second", window.page.locator(".log p a").first.inner_text())
    press(window, by, "second")
    window.sees("h1", "project.narrates")


@BY
def test_signals_queries_and_updates_are_offered_with_their_arguments(base: str, window: Watched, by: str) -> None:
    api = f"{base}/api/v1"
    run = str(httpx.post(f"{api}/workflows/project.basket/runs", json={}).raise_for_status().json()["id"])
    eventually(lambda: "Send rename" in httpx.get(f"{base}/ui/runs/{run}").text, "its handlers are known")
    window.go(f"/ui/runs/{run}")
    press(window, by, "Talk to it")
    if by == "mouse":
        window.page.get_by_label("value", exact=True).fill("tea")
    else:
        tab_to(window, "value")
        window.page.keyboard.type("tea")
    press(window, by, "Send add")
    window.sees(".said", "The signal is sent")
    window.sees(".story", "tea")
    press(window, by, "Talk to it")
    if by == "mouse":
        window.page.get_by_label("number", exact=True).fill("0")
        window.page.get_by_label("name", exact=True).fill("coffee")
    else:
        for label, text in (("number", "0"), ("name", "coffee")):
            tab_to(window, label)
            window.page.keyboard.type(text)
    press(window, by, "Send rename")
    window.sees(".said", "tea")
    press(window, by, "Talk to it")
    press(window, by, "Ask items")
    window.sees(".said", "coffee")


@BY
def test_a_task_like_another_is_enqueued(base: str, window: Watched, by: str) -> None:
    task = enqueue(f"{base}/api/v1", "add", 3, 4)
    window.go(f"/ui/tasks/{task}")
    window.sees("h1 .s-success")
    window.sees(".value pre", '"a": 3')
    window.sees(".attempts a", "2026.1")
    press(window, by, "Enqueue one like this…")
    window.sees("h1", "Enqueue project.add")
    assert window.page.locator("textarea").count() == 0, "the parameters are announced, and are integers"
    fields = {name: window.page.get_by_label(f"{name} int, required") for name in ("a", "b")}

    def send(**values: str) -> None:
        for name, value in values.items():
            if by == "mouse":
                fields[name].fill(value)
            else:
                tab_to(window, f"{name} int")
                window.page.keyboard.press("Control+A")
                window.page.keyboard.type(value or "\b")
        press(window, by, "Enqueue", "form.stacked")

    assert [fields[name].input_value() for name in fields] == ["3", "4"]
    send(b="")
    assert fields["b"].evaluate("field => field.validity.valueMissing"), "the browser says what is missing"
    send(b="5")
    window.sees(".said", "The task is enqueued")
    window.sees("h1 .s-success")
    assert task not in window.page.url
    window.sees(".value pre", "8")


def test_a_page_that_is_read_again_brings_only_what_has_changed(base: str, window: Watched, tmp_path: Path) -> None:
    go = tmp_path / "go"
    add: dict[str, Any] = {"task": "project.add", "input": {"a": 1, "b": 1}}

    def wait(go: str, **more: Any) -> dict[str, Any]:
        return {"task": "project.logged_when", "input": {"path": f"{go}.log", "go": go, "number": 1}, **more}

    tasks = {f"part_{number}": add for number in range(60)}
    tasks |= {"wait": wait(str(go)), "last": wait(f"{go}.last", depends_on=["wait"])}
    body = {"name": "partial", "tasks": tasks}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": body}).raise_for_status()
    run = str(httpx.post(f"{base}/api/v1/workflows/partial/runs", json={}).raise_for_status().json()["id"])
    eventually(lambda: httpx.get(f"{base}/api/v1/runs/{run}").json()["run"]["success"] == 60, "all but two have ended")
    sizes: list[int] = []
    window.page.on("response", lambda answer: sizes.append(len(answer.body())) if read_again(answer) else None)
    window.go(f"/ui/runs/{run}")
    eventually(lambda: window.page.evaluate("true") and sizes, "the page is read again")
    whole = sizes[0]
    go.touch()
    window.sees("g.node.s-open", "last")
    assert min(sizes[1:]) < 0.7 * whole, sizes
    Path(f"{go}.last").touch()
    window.sees("h1 .s-success")
    assert window.page.locator("g.node.s-success").count() == 62
    assert window.page.locator("tr[data-key^=step]").count() == 25
    assert window.page.locator("[data-same]").count() == 0


def read_again(answer: Any) -> bool:
    """Say whether an answer is a page that its script has asked for."""
    return "if-none-match" in answer.request.headers and answer.status == 200


def test_a_graph_that_does_not_fit_has_a_map(base: str, window: Watched) -> None:
    add = {"task": "project.add", "input": {"a": 1, "b": 1}}
    tasks = {f"step_{place}_{number}": add for place in range(10) for number in range(12)}
    for name in [*tasks][12:]:
        tasks[name] = add | {"depends_on": [[*tasks][[*tasks].index(name) - 12]]}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": {"name": "long", "tasks": tasks}}).raise_for_status()
    window.go("/ui/workflows/long")
    box = window.sees(".minimap").bounding_box()
    assert window.page.locator(".minimap rect.node").count() == 120
    window.page.mouse.click(box["x"] + 0.9 * box["width"], box["y"] + box["height"] / 2)
    left = window.page.evaluate("document.querySelector('.graph').scrollLeft")
    assert left > 400
    view = window.page.locator(".minimap .view")
    eventually(lambda: float(view.get_attribute("x")) > 400, "the map shows what is in view")
    window.page.get_by_role("button", name="Smaller").click()
    window.page.get_by_role("button", name="Fit").click()
    height = window.page.locator("g.node rect").first.bounding_box()["height"]
    assert 44 <= height <= 46, "all of it would be too small to read"
