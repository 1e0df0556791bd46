"""The dashboard in a real browser: live updates, actions by mouse and by keyboard, layout, outages and logins."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.api.dashboard.paths import PAGES as ROUTES
from orchestrator.domain.access import Scope, Secret
from orchestrator.store import keys
from tests.acceptance.browser import Watched, browsing, watched
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.listening import enqueue
from tests.acceptance.stack import Stack
from tests.waiting import eventually

PAGES = (
    *("/ui", "/ui/tasks", "/ui/queues", "/ui/failures", "/ui/runs", "/ui/workflows", "/ui/schedules", "/ui/workers"),
    *("/ui/flows", "/ui/approvals", "/ui/audit", "/ui/keys", "/ui/tasks/cancel?status=pending&status=running"),
)
ASKS = {
    "start": "price",
    "nodes": {
        "price": {"exec_type": "local_func", "func": "project.add", "params": {"a": 1, "b": 2}},
        "ask": {"kind": "approval", "description": "Is it within the budget?"},
        "ship": {"exec_type": "local_func", "func": "project.add", "params": {"a": 3, "b": 4}},
    },
    "edges": [
        {"from": "price", "to": "ask"},
        {"from": "ask", "action": "approved", "to": "ship"},
        {"from": "ask", "action": "rejected", "to": "price"},
    ],
}


@pytest.fixture(scope="module", name="browser")
def browser_of_module() -> Iterator[Any]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module", name="served")
def served_of_module(
    browser: Any, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, str]]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        stack.scheduler()
        stack.environment["ORCHESTRATOR_RELEASE"] = "2026.1"
        stack.worker("--queues", "default,mail", processes=1)
        yield stack, stack.api()


@pytest.fixture(name="base")
def base_of_module(served: tuple[Stack, str]) -> str:
    return served[1]


@pytest.fixture(name="window")
def window_of_module(browser: Any, base: str) -> Iterator[Watched]:
    with watched(browser, base) as found:
        yield found


def start_dag(base: str, name: str, go: Path) -> str:
    """Start a run whose second step waits for a file."""
    wait = {"task": "project.logged_when", "input": {"path": f"{go}.log", "go": str(go), "number": 1}}
    tasks = {
        "first": {"task": "project.add", "input": {"a": 1, "b": 1}},
        "wait": wait | {"depends_on": ["first"]},
        "last": {"task": "project.add", "depends_on": ["wait"], "input": {"a": 1, "b": 1}},
    }
    httpx.post(f"{base}/api/v1/workflows", json={"definition": {"name": name, "tasks": tasks}}).raise_for_status()
    return str(httpx.post(f"{base}/api/v1/workflows/{name}/runs", json={}).raise_for_status().json()["id"])


def start_fan_out(base: str) -> str:
    """Start a run with a fan-out, of a workflow with a schedule; return its id when it has ended."""
    tasks = {
        "numbers": {"task": "project.add", "input": {"a": 1, "b": 11}},
        "a_rather_long_name_of_a_step": {
            "task": "project.add",
            "depends_on": ["numbers"],
            "parallel": 12,
            "input": {"a": 1, "b": 1},
        },
    }
    body = {"name": "spread", "schedule": {"cron": "0 3 * * *"}, "tasks": tasks}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": body}).raise_for_status()
    run = str(httpx.post(f"{base}/api/v1/workflows/spread/runs", json={}).raise_for_status().json()["id"])
    eventually(lambda: httpx.get(f"{base}/api/v1/runs/{run}").json()["run"]["status"] == "success", "all is added")
    return run


def start_flow(base: str) -> str:
    """Start a run of a flow with an approval; return its id when it waits for the approval."""
    api = f"{base}/api/v1"
    httpx.post(f"{api}/flows/order", json={"definition": ASKS}).raise_for_status()
    run = str(httpx.post(f"{api}/flows/order/runs", json={}).raise_for_status().json()["id"])
    eventually(lambda: run in httpx.get(f"{api}/approvals").text, "it asks")
    return run


def start_code(base: str) -> str:
    """Start a run of code that waits for a promise; return its id when it waits."""
    body = {"kwargs": {"patience": 600}}
    started = httpx.post(f"{base}/api/v1/workflows/project.approval/runs", json=body).raise_for_status()
    run = str(started.json()["id"])
    eventually(lambda: run in httpx.get(f"{base}/api/v1/approvals").text, "it waits for somebody")
    return run


def test_a_graph_updates_while_its_run_goes_on(base: str, window: Watched, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = start_dag(base, "nightly", go)
    window.go(f"/ui/runs/{run}")
    window.sees("g.node.s-success", "first")
    window.sees("g.node.s-open", "wait")
    go.touch()
    window.sees("g.node.s-success", "last")
    window.sees("h1 .s-success")
    window.sees(".gantt .name", "last")
    eventually(lambda: window.page.locator("tr", has_text="Run from here").count() == 3, "it can be run from each")


def test_groups_of_a_large_graph_open_and_close(base: str, window: Watched) -> None:
    add = {"task": "project.add", "input": {"a": 1, "b": 1}}
    parts = {f"part_{number}": add | {"depends_on": ["first"]} for number in range(160)}
    tasks = {"first": add, **parts, "last": add | {"depends_on": [*parts]}}
    body = {"name": "broad", "tasks": tasks}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": body}).raise_for_status()
    run = str(httpx.post(f"{base}/api/v1/workflows/broad/runs", json={}).raise_for_status().json()["id"])
    window.go(f"/ui/runs/{run}")
    window.sees("h1 .s-success")
    nodes = window.page.locator("g.node")
    assert nodes.count() == 3
    assert window.page.locator("tr[data-key^=step]").count() == 25
    assert window.page.get_by_text("Open part").count() == 0, "the node itself opens it"
    tab_to(window, "first")  # the pane, which scrolls by arrow keys
    window.page.keyboard.press("Tab")
    window.page.keyboard.press("ArrowRight")
    window.page.keyboard.press("Enter")
    eventually(lambda: nodes.count() == 153, "the group is open; the rest of it is a group")
    focused = "document.activeElement.dataset.key"
    eventually(lambda: window.page.evaluate(focused) == "close-part (160)", "the group has the focus")
    window.page.keyboard.press("ArrowDown")
    assert window.page.evaluate(focused).startswith("step-of-part_"), "a box in it"
    place = window.page.evaluate(focused)
    window.page.keyboard.press("ArrowRight")
    assert window.page.evaluate(focused) not in (place, "close-part (160)"), "the box beside it"
    assert window.page.locator(".graph svg [tabindex='0']").count() == 1, "Tab leads out of the graph"
    window.page.keyboard.press("ArrowUp")
    window.page.keyboard.press("Enter")
    eventually(lambda: nodes.count() == 3, "the group is closed")
    assert window.page.evaluate(focused) == "open-part (160)"
    window.page.keyboard.press("Enter")
    eventually(lambda: nodes.count() == 153, "and open again")
    svg = window.page.locator(".graph svg")
    before = svg.bounding_box()["width"]
    window.page.get_by_role("button", name="Larger").click()
    assert svg.bounding_box()["width"] > 1.2 * before
    window.page.get_by_role("button", name="Fit").click()
    assert window.page.locator("g.node rect").first.bounding_box()["height"] >= 0.85 * 52, "it can be read"
    window.page.get_by_text("Next steps").click()
    window.sees("tr[data-key^=step]", "part_100")
    window.page.get_by_text("Close all groups").click()
    eventually(lambda: nodes.count() == 3, "all are closed")
    group = window.sees("g.node", "part").bounding_box()
    window.page.mouse.click(group["x"] + 80, group["y"] + 20)
    eventually(lambda: nodes.count() == 153, "the group is open again")
    window.page.get_by_label("Find a step").fill("part_100")
    window.page.keyboard.press("Enter")
    window.sees("h1", "project.add")


def test_a_graph_of_many_layers_fits_its_pane_and_is_readable(base: str, window: Watched) -> None:
    add = {"task": "project.add", "input": {"a": 1, "b": 1}}
    layers = [[f"{kind}_{layer}_{number}" for kind in "abc" for number in range(4)] for layer in range(14)]
    above = [[], *layers]
    tasks = {name: add | {"depends_on": above[place][:3]} for place, layer in enumerate(layers) for name in layer}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": {"name": "layers", "tasks": tasks}}).raise_for_status()
    window.go("/ui/workflows/layers")
    window.sees("g.node")
    assert window.page.locator("g.node").count() == 3 * 14
    hidden = window.page.locator(".graph").evaluate("pane => pane.scrollWidth - pane.clientWidth")
    assert hidden == 0, "each layer is in view"
    assert window.page.locator("g.node rect").first.bounding_box()["height"] >= 0.85 * 52


def test_a_page_of_many_steps_is_short_and_shows_failures_first(base: str, window: Watched) -> None:
    tasks = {f"part_{number}": {"task": "project.add", "input": {"a": 1, "b": 1}} for number in range(100)}
    tasks["part_77"] = {"task": "project.broken", "input": {"text": "it is broken"}}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": {"name": "many", "tasks": tasks}}).raise_for_status()
    run = str(httpx.post(f"{base}/api/v1/workflows/many/runs", json={}).raise_for_status().json()["id"])
    eventually(lambda: httpx.get(f"{base}/api/v1/runs/{run}").json()["run"]["ended_at"], "it has ended")
    window.go(f"/ui/runs/{run}")
    rows = window.page.locator("tr[data-key^=step]")
    assert rows.count() == 25
    assert "part_77" in rows.first.inner_text()
    node = window.page.locator("g.node.s-failed rect").first.bounding_box()
    assert node["width"] < 200, "a narrow graph is not enlarged"
    pane = window.page.locator(".graph").bounding_box()
    assert pane["y"] < node["y"] < pane["y"] + pane["height"], "the failed step is in view"
    assert window.page.locator(".gantt .name:visible").count() == 30
    assert window.page.locator(".gantt .name:visible", has_text="part_77").count() == 1
    assert window.page.evaluate("document.documentElement.scrollHeight") < 5 * 900
    window.page.locator(".gantt summary", has_text="70 more").click()
    assert window.page.locator(".gantt .name:visible").count() == 100
    window.page.get_by_text("Next steps").click()
    eventually(lambda: rows.count() == 75, "all others are listed")


def test_a_failure_is_two_clicks_from_its_line_of_code(base: str, window: Watched) -> None:
    task = enqueue(f"{base}/api/v1", "unserialisable", queue="mail")
    eventually(lambda: "failed" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has failed")
    group = window.page.locator("tr[data-key] a", has_text="project.unserialisable").first
    eventually(lambda: window.go("/ui") and group.count(), "the overview has it")
    group.click()
    window.sees("h1", "Tasks")
    window.page.locator(f"a[href='/ui/tasks/{task}']").click()
    assert window.sees("details[open] mark").is_visible()


def test_log_lines_appear_while_the_task_runs(base: str, window: Watched, tmp_path: Path) -> None:
    go = tmp_path / "go"
    task = enqueue(f"{base}/api/v1", "narrates", str(go))
    window.go(f"/ui/tasks/{task}")
    window.sees("#log p", "begins")
    lasts = window.page.locator("time[data-lasts]").last
    before = lasts.inner_text()
    eventually(lambda: lasts.inner_text() != before, "the time that it takes goes on")
    go.touch()
    window.sees("#log p", "is done")
    window.sees("h1 .s-success")
    assert window.page.locator("#log p").count() == 2


def test_a_long_log_is_paged_searched_and_downloaded(base: str, window: Watched) -> None:
    task = enqueue(f"{base}/api/v1", "rambles", 2_000)
    eventually(lambda: "success" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has ended")
    lines = "line 01999"
    eventually(lambda: lines in httpx.get(f"{base}/ui/tasks/{task}").text, "its last line is stored")
    window.go(f"/ui/tasks/{task}")
    rows = window.page.locator("#log p")
    assert rows.count() == 500
    assert rows.last.is_visible()
    window.sees("#log-before", "1,500 lines before these")
    assert window.page.locator("#log .n208 strong").first.inner_text() == "of many"
    window.page.get_by_text("Show older lines").click()
    eventually(lambda: rows.count() == 1_500, "older lines are added")
    assert window.page.locator("#log-before strong").inner_text() == "500 lines"
    assert (rows.count(), rows.first.locator("span").first.inner_text()) == (1_500, "line 00500 of many")
    window.page.get_by_label("Text").fill("an error")
    window.page.keyboard.press("Enter")
    eventually(lambda: rows.count() == 1, "one line fits")
    assert window.page.locator("#log mark").inner_text() == "an ERROR"
    assert window.page.url.endswith(f"/ui/tasks/{task}?text=an+error"), "a search can be sent to somebody"
    window.page.reload()
    assert (rows.count(), window.page.get_by_label("Text").input_value()) == (1, "an error")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}", rows.first.locator("time").inner_text()), "lines share a second"
    window.page.get_by_label("Text").fill("AN error")
    window.page.keyboard.press("Enter")
    eventually(lambda: window.page.locator("#announced").inner_text() == "1 line", "it is announced")
    window.page.get_by_label("Text").fill("")
    window.page.get_by_label("Level").select_option("warning")
    window.sees("#silent", "No matching lines")
    window.page.get_by_label("Wrap lines").uncheck()
    assert window.page.locator("#log.unwrapped").count() == 1
    with window.page.expect_download() as found:
        window.page.get_by_text("Download").click()
    kept = Path(found.value.path()).read_text().splitlines()
    assert len(kept) == 2_000
    assert "\x1b[1;38;5;208m" in kept[0]


def test_a_log_follows_its_end_unless_the_reader_scrolls_up(base: str, window: Watched, tmp_path: Path) -> None:
    go = tmp_path / "go"
    task = enqueue(f"{base}/api/v1", "recites", str(go), 100)
    window.go(f"/ui/tasks/{task}")
    window.sees("#log p", "verse 99")
    is_at_end = "log.scrollHeight - log.scrollTop - log.clientHeight < 40"
    assert window.page.evaluate(is_at_end)
    window.page.locator("#log").hover()
    window.page.mouse.wheel(0, -400)
    window.sees("#log-end", "Jump to the end")
    go.touch()
    window.sees("#log-end", "1 new line").click()
    assert window.page.evaluate(is_at_end)
    window.sees("h1 .s-success")
    eventually(lambda: window.page.locator("progress").count() == 0, "the page is that of an ended task")
    assert window.page.evaluate(is_at_end)
    assert window.page.locator("#log p").count() == 101


def test_the_log_of_a_run_is_paged_followed_and_filtered(base: str, window: Watched, tmp_path: Path) -> None:
    go = tmp_path / "go"
    tasks = {
        "long": {"task": "project.rambles", "input": {"lines": 700}},
        "waits": {"task": "project.narrates", "depends_on": ["long"], "input": {"go": str(go)}},
    }
    httpx.post(f"{base}/api/v1/workflows", json={"definition": {"name": "told", "tasks": tasks}}).raise_for_status()
    run = str(httpx.post(f"{base}/api/v1/workflows/told/runs", json={}).raise_for_status().json()["id"])
    eventually(lambda: "begins" in httpx.get(f"{base}/ui/runs/{run}/log").text, "its last line is stored")
    window.go(f"/ui/runs/{run}/log")
    rows = window.page.locator("#log p")
    assert rows.count() == 500
    assert rows.last.is_visible()
    assert rows.last.get_by_role("link").inner_text() == "waits"
    window.sees("#log-before", "201 lines before these")
    window.page.locator("#log").hover()
    window.page.mouse.wheel(0, -400)
    window.sees("#log-end", "Jump to the end")
    go.touch()
    window.sees("#log-end", "1 new line").click()
    window.sees("h1 .s-success")
    assert "is done" in rows.last.inner_text()
    window.page.get_by_text("Show older lines").click()
    eventually(lambda: rows.count() == 702, "all are shown")
    window.page.get_by_label("Level").select_option("warning")
    window.sees("#silent", "No matching lines")
    assert window.page.url.endswith(f"/ui/runs/{run}/log?level=warning")
    with window.page.expect_download() as found:
        window.page.get_by_text("Download").click()
    assert len(Path(found.value.path()).read_text().splitlines()) == 702


def tab_to(window: Watched, text: str, presses: int = 120) -> None:
    """Press Tab until the text or the label of the focused element begins with `text`."""
    for _ in range(presses):
        window.page.keyboard.press("Tab")
        said = window.page.evaluate(
            "document.activeElement.textContent.trim() || document.activeElement.labels?.[0]?.textContent.trim()"
        )
        if (said or "").startswith(text):
            return
    raise AssertionError(f"{text!r} is not reached by the tab key")


def test_approving_retrying_cancelling_and_pausing_work_by_keyboard(base: str, window: Watched, tmp_path: Path) -> None:
    keyboard = window.page.keyboard
    order, code, run = start_flow(base), start_code(base), start_dag(base, "by-hand", tmp_path / "never")
    task = enqueue(f"{base}/api/v1", "broken", "by hand")
    eventually(lambda: "failed" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has failed")

    window.go("/ui")  # approve
    keyboard.type("gp")
    window.sees("h1", "Approvals")
    tab_to(window, "Reason")
    keyboard.type("within the budget")
    tab_to(window, "Approve")
    keyboard.press("Enter")
    window.sees(".said", "Approved")
    eventually(lambda: httpx.get(f"{base}/api/v1/runs/{order}").json()["run"]["status"] == "success", "it is shipped")

    tab_to(window, "Value, as JSON or text")  # resolve a promise
    keyboard.type("yes")
    keyboard.press("Enter")
    window.sees(".said", "continues")
    eventually(lambda: httpx.get(f"{base}/api/v1/runs/{code}").json()["run"]["status"] == "success", "it goes on")

    keyboard.type("gf")  # retry a failed group
    window.sees("h1", "Failures")
    tab_to(window, "Retry all…")
    keyboard.press("Enter")
    window.sees("h1", "Retry failed tasks")
    tab_to(window, "Retry ")
    keyboard.press("Enter")
    window.sees(".said", "Tasks being retried: ")

    keyboard.type("/")  # cancel a run
    keyboard.type(run)
    keyboard.press("Enter")
    window.sees("h1", "by-hand")
    for label in ("Cancel…", "Cancel it"):
        tab_to(window, label)
        keyboard.press("Enter")
    window.sees("h1 .s-cancelled")

    keyboard.type("gq")  # pause a queue
    window.sees("h1", "Queues")
    tab_to(window, "mail")
    keyboard.press("Enter")
    window.sees("h1", "mail")
    for label, then in (("Pause", "Resume"), ("Resume", "Pause")):
        tab_to(window, label)
        keyboard.press("Enter")
        window.sees(".acts button", then)


def test_times_switch_between_ages_local_times_and_utc(base: str, browser: Any) -> None:
    task = enqueue(f"{base}/api/v1", "noop", queue="mail")
    created = httpx.get(f"{base}/api/v1/tasks/{task}").json()["task"]["created_at"][:19].replace("T", " ")
    with watched(browser, base, timezone_id="Asia/Kolkata") as window:
        window.page.add_init_script("const real = Date.now; Date.now = () => real() + 7_200_000;")
        window.go(f"/ui/tasks/{task}")
        eventually(
            lambda: "2h" not in window.page.locator(".facts time").first.inner_text(), "ages are of the server's clock"
        )
        time = window.page.locator(".facts time").first
        assert time.inner_text().endswith("ago")
        switch = window.page.locator("[data-times]")
        switch.click()
        local = time.inner_text()
        assert local[:13] != created[:13]
        switch.press("Enter")
        assert (time.inner_text(), switch.inner_text()) == (created, "Times: UTC")
        assert "UTC" in time.get_attribute("title")
        window.go("/ui/tasks")
        assert re.fullmatch(r"2\d{3}-\d\d-\d\d \d\d:\d\d:\d\d", window.sees("td time").inner_text())


def test_filter_times_use_the_displayed_time_zone(base: str, browser: Any) -> None:
    with watched(browser, base, timezone_id="Asia/Kolkata") as window:
        window.go("/ui/tasks?since=2026-01-31T12:00")
        field = window.page.locator("input[name=since]")
        assert field.input_value() == "2026-01-31T17:30"
        assert field.locator("xpath=..").text_content().strip() == "From local"
        field.fill("2026-01-31T18:30")
        window.page.get_by_role("button", name="Filter").click()
        window.page.wait_for_url("**since=2026-01-31T13**")
        window.page.locator("[data-times]").click(click_count=2)
        assert field.input_value() == "2026-01-31T13:00"
        assert field.locator("xpath=..").text_content().strip() == "From UTC"


def test_marked_rows_stay_marked_while_new_rows_arrive(base: str, window: Watched) -> None:
    for _ in range(3):
        enqueue(f"{base}/api/v1", "broken", "mine", queue="default")
    window.go("/ui/tasks?status=failed&name=project.broken&error=mine")
    marks = window.page.locator("td.tick input")
    eventually(lambda: window.page.evaluate("true") and marks.count() == 3, "all have failed")
    for place in range(3):
        marks.nth(place).check()
    ids = marks.evaluate_all("boxes => boxes.map((box) => box.value)")
    body = {"tasks": [{"name": "project.broken", "args": ["mine too"], "retries": 0} for _ in range(60)]}
    httpx.post(f"{base}/api/v1/tasks/bulk", json=body).raise_for_status()
    window.sees("#fresh-rows", "Show 50 new")
    assert marks.evaluate_all("boxes => boxes.filter((box) => box.checked).map((box) => box.value)") == ids
    window.sees("button", "Retry 3 marked")
    window.page.locator("#fresh-rows").click()
    eventually(lambda: window.page.evaluate("true") and marks.count() == 50, "the newest are shown")
    assert window.page.locator("#fresh-rows").count() == 0


def test_a_rejected_form_stays_open_and_filled_in(base: str, window: Watched) -> None:
    params = {"day": {"type": "string"}, "number": {"type": "integer", "default": 1}}
    body = {"name": "asks", "params": params, "tasks": {"add": {"task": "project.add", "input": {"a": 1, "b": 1}}}}
    httpx.post(f"{base}/api/v1/workflows", json={"definition": body}).raise_for_status()
    window.go("/ui/workflows/asks")
    window.page.get_by_text("Start…").click()
    window.page.get_by_label("number").fill("7")
    window.page.get_by_label("Key").fill("once")
    button = window.page.locator("details.sure button[type=submit]")
    button.click()
    window.sees(".said.bad", "day")
    started = httpx.post(f"{base}/api/v1/workflows/asks/runs", json={"params": {"day": "meanwhile"}})
    started.raise_for_status()
    window.sees("td.main", "meanwhile")  # the page was reloaded
    assert window.page.get_by_label("number").is_visible()
    assert window.page.get_by_label("number").input_value() == "7"
    assert window.page.get_by_label("Key").input_value() == "once"
    assert window.page.get_by_label("More parameters, as JSON").input_value() == ""
    window.page.get_by_label("day").fill("today")
    button.click()
    window.sees("h1", "asks")
    window.page.wait_for_url("**/ui/runs/**")


def test_a_submitted_form_disables_its_button(base: str, window: Watched) -> None:
    window.go("/ui/queues/default")
    window.page.evaluate("addEventListener('submit', (event) => event.preventDefault())")  # the request hangs
    window.page.get_by_role("button", name="Pause").click()
    window.sees("button:disabled", "Working…")


def test_a_workflow_page_fits_a_phone(base: str, browser: Any) -> None:
    tasks = {
        f"a_step_with_a_rather_long_name_{number}": {"task": "project.add", "input": {"a": 1, "b": 1}}
        for number in range(10)
    }
    httpx.post(f"{base}/api/v1/workflows", json={"definition": {"name": "dag10", "tasks": tasks}}).raise_for_status()
    for _ in range(30):
        httpx.post(f"{base}/api/v1/workflows/dag10/runs", json={}).raise_for_status()
    with watched(browser, base, viewport={"width": 390, "height": 844}) as window:
        window.go("/ui/workflows/dag10")
        eventually(
            lambda: window.page.evaluate("true") and window.page.locator(".grid th").count() >= 30, "they stand there"
        )
        assert window.page.evaluate("document.documentElement.scrollWidth") <= 390
        window.page.get_by_text("Start…").click()
        box = window.page.locator(".pop").first.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        assert box["y"] + box["height"] <= 844


def test_a_second_click_does_not_decide_the_next_approval(base: str, window: Watched) -> None:
    first, second = start_flow(base), start_flow(base)
    window.go("/ui/approvals")
    card = "[data-key='{}-ask']"
    window.page.locator(card.format(first)).get_by_role("button", name="Approve").hover()
    at = window.page.locator(card.format(first)).get_by_role("button", name="Approve").bounding_box()
    x, y = at["x"] + at["width"] / 2, at["y"] + at["height"] / 2
    window.page.mouse.click(x, y)
    window.sees(".said", "Approved")
    window.page.wait_for_selector(card.format(first), state="detached")
    other = window.page.locator(card.format(second))
    now = other.get_by_role("button", name="Approve").bounding_box()
    moved = f"translate({at['x'] - now['x']}px, {at['y'] - now['y']}px)"
    style = f"{card.format(second)} {{ transform: {moved}; }}"
    window.page.evaluate("text => document.styleSheets[0].insertRule(text)", style)
    for event in (window.page.mouse.down, window.page.mouse.up):  # without a mouse move before them
        event()
    window.sees(".ask .moved", "Move the pointer")
    assert httpx.get(f"{base}/api/v1/audit?target={second}").json()["items"] == []
    window.page.mouse.move(0, 0)
    other.get_by_role("button", name="Approve").click()
    eventually(lambda: httpx.get(f"{base}/api/v1/runs/{second}").json()["run"]["status"] == "success", "it is shipped")


def test_a_typed_promise_has_a_form_field_for_each_property(base: str, window: Watched) -> None:
    run = str(httpx.post(f"{base}/api/v1/workflows/project.ruling/runs", json={}).raise_for_status().json()["id"])
    for path, within in (
        ("/ui/approvals", f"section.ask:has(a[href='/ui/runs/{run}'])"),
        (f"/ui/runs/{run}", ".waits"),
    ):
        eventually(lambda: window.go(path) and window.page.locator(f"{within} .decide").count(), "it asks")  # noqa: B023
        asked = window.page.locator(f"{within} .decide")
        assert "JSON" not in asked.inner_text()
        assert asked.get_by_label("amount number, required").get_attribute("type") == "number"
        assert asked.get_by_label("level").locator("option").all_inner_texts()[1:] == ["high", "low"]
    asked.get_by_role("button", name="Resolve").click()
    assert asked.get_by_label("ok required").evaluate("field => field.validity.valueMissing")
    asked.get_by_label("ok required").select_option("yes (true)")
    asked.get_by_label("amount number, required").fill("12.5")
    asked.get_by_label("level").select_option("high")
    asked.get_by_label("note").fill("123")
    asked.get_by_role("button", name="Resolve").click()
    window.sees("h1 .s-success")
    result = httpx.get(f"{base}/api/v1/runs/{run}").json()["code"]["result"]
    assert result == [True, 12.5, "high", "123"]


def test_a_filled_in_form_stays_when_another_user_decides(base: str, window: Watched) -> None:
    first, second = start_code(base), start_code(base)
    window.go("/ui/approvals")
    asked = window.page.locator("section.ask", has=window.page.locator(f'a[href="/ui/runs/{first}"]'))
    asked.get_by_label("Value, as JSON or text").fill("yes")
    path = f"{base}/api/v1/runs/{first}/promises/approval/resolve"
    httpx.post(path, json={"value": "no"}).raise_for_status()
    window.sees(".ask .decided", "decided in the meantime")
    assert asked.get_by_label("Value, as JSON or text").input_value() == "yes"
    assert asked.get_by_role("button", name="Resolve").is_disabled()
    other = window.page.locator("section.ask", has=window.page.locator(f'a[href="/ui/runs/{second}"]'))
    assert other.get_by_role("button", name="Resolve").is_enabled()


def test_the_back_button_returns_to_a_rejected_form(base: str, window: Watched) -> None:
    made = httpx.post(f"{base}/api/v1/tasks", json={"name": "elsewhere.add", "args": [1, 2], "queue": "nobody"})
    window.go(f"/ui/tasks/{made.raise_for_status().json()['id']}/again")
    window.page.get_by_label("Arguments, as a JSON list").fill("[1")
    window.page.get_by_role("button", name="Enqueue").click()
    window.sees(".said.bad", "expected a JSON list")
    window.page.get_by_label("Arguments, as a JSON list").fill("[1, 3]")
    window.page.get_by_role("button", name="Enqueue").click()
    window.sees(".said", "this is the new task")
    window.page.go_back()
    window.sees("h1", "Enqueue elsewhere.add")
    assert all("422" in one for one in window.errors), window.errors
    window.errors.clear()  # the browser logs the 422 response


def more_pages(base: str, run: str, task: str) -> list[str]:
    """Return pages of single objects, and confirmation pages; `run` comes from `start_fan_out`."""
    code = start_code(base)
    resets: list[str] = []

    def is_offered() -> bool:
        resets.extend(re.findall(rf"/ui/runs/{code}/reset\?to=\d+", httpx.get(f"{base}/ui/runs/{code}").text))
        return bool(resets)

    eventually(is_offered, "a reset is offered")
    fires = "/ui/schedules/spread/default/backfills?start=2026-01-01&end=2026-03-01"
    pages = ["/ui/login", "/ui/flows/order", "/ui/queues/mail", "/ui/workflows/spread", fires, f"/ui/runs/{code}"]
    other = start_fan_out(base)
    pages += [f"/ui/compare?run={run}&run={other}", f"/ui/runs/{run}/log", "/ui/schedules/spread/default"]
    pages += [
        f"/ui/tasks/{task}/again",
        f"/ui/runs/{run}/again",
        "/ui/runs/retry?workflow=spread",
        "/ui/runs/cancel?workflow=project.approval",
    ]
    pages += ["/ui/runs/delete?workflow=spread"]
    worker = httpx.get(f"{base}/api/v1/tasks/{task}").json()["task"]["worker"]
    pages += [f"/ui/workers/{worker}", f"/ui/tasks/{task}/log", "/ui/failures?within=7d&sort=last"]
    return [*pages, "/ui/tasks/retry?name=project.broken", "/ui/search?text=project", resets[0]]


def test_arguments_are_copied_and_a_pause_is_undone_from_its_notice(base: str, browser: Any) -> None:
    task = enqueue(f"{base}/api/v1", "add", 3, 4)
    with watched(browser, base, permissions=["clipboard-read", "clipboard-write"]) as window:
        window.go(f"/ui/tasks/{task}")
        window.page.locator(".value", has_text="3").first.hover()
        window.page.get_by_role("button", name="Copy", exact=True).first.click()
        window.sees(".copy.copied")
        assert json.loads(window.page.evaluate("navigator.clipboard.readText()")) == {"a": 3, "b": 4}
        window.go("/ui/queues/mail")
        window.page.get_by_role("button", name="Pause").click()
        window.sees(".said", "is paused")
        window.page.get_by_role("button", name="Undo").click()
        window.sees(".said", "is resumed")
        window.page.get_by_role("button", name="Pause").wait_for()


@pytest.mark.parametrize("pages", ["some", "all"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.long_for("all", "dark")
def test_pages_are_accessible_and_their_layout_does_not_shift(base: str, browser: Any, scheme: str, pages: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python").Axe()
    order, run, task = start_flow(base), start_fan_out(base), enqueue(f"{base}/api/v1", "broken", "to be looked at")
    eventually(lambda: "failed" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has failed")
    with watched(browser, base, color_scheme=scheme) as window:
        window.page.add_init_script(
            "window.moved = 0; new PerformanceObserver((list) => { for (const one of list.getEntries()) "
            "if (!one.hadRecentInput) window.moved += one.value; }).observe({type: 'layout-shift', buffered: true});"
            # Runs of other tests may still go on, and new rows move the rows below them.
            "window.EventSource = class { addEventListener() {} close() {} };"
        )
        # The dark scheme differs only in its colors.
        rules = {} if scheme == "light" else {"runOnly": ["color-contrast"]}
        some = ("/ui", "/ui/approvals", f"/ui/runs/{run}", f"/ui/runs/{order}", f"/ui/tasks/{task}")
        opened = some if pages == "some" else (*PAGES[1:], *more_pages(base, run, task), "/ui/nowhere")
        every = [path.partition("?")[0] for path in (*some, *opened)]
        left_out = [
            one.path
            for one in ROUTES
            if one.method == "GET" and not one.is_live and not re.search("pulse|static|log.txt", one.path)
            if not any(re.fullmatch(re.sub(r"{\w+}", "[^/]+", one.path), path) for path in every)
        ]
        assert left_out == [] or pages == "some", "every page is looked at"
        for path in opened:
            window.go(path)
            window.errors[:] = [one for one in window.errors if path != "/ui/nowhere" or "404" not in one]
            faults = axe.run(window.page, options=rules).response["violations"]
            found = [one for one in faults if one["impact"] in ("serious", "critical")]
            assert [(one["id"], one["nodes"][0]["html"]) for one in found] == [], path
            assert window.page.evaluate("window.moved") < 0.05, path
        window.page.keyboard.press("?")
        window.sees("#keys[open]")
        assert axe.run(window.page, options=rules).response["violations"] == []


_MANY_RUNS = """
INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, version, started_at, ended_at)
SELECT gen_random_uuid(), 'spread', 'success', 0, 0, 'spread', 1, now(), now() FROM generate_series(1, 20)
"""


@pytest.mark.parametrize("pages", ["some", "all"])
@pytest.mark.long_for("all")
def test_no_page_scrolls_sideways(served: tuple[Stack, str], browser: Any, tmp_path: Path, pages: str) -> None:
    stack, base = served
    run = f"/ui/runs/{start_fan_out(base)}"
    go = tmp_path / "go"
    go.touch()
    long = f"/ui/runs/{start_dag(base, 'w' * 120, go)}"
    with stack.engine.begin() as connection:
        connection.exec_driver_sql(_MANY_RUNS)
    start_flow(base)
    task = enqueue(f"{base}/api/v1", "broken", f"/data/{'a-folder/' * 30}{'x' * 200}: not found")
    eventually(lambda: "failed" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has failed")
    of_phone = [
        run,
        long,
        f"/ui/tasks/{task}",
        "/ui/failures?sort=last",
        "/ui/approvals",
        "/ui/schedules",
        "/ui/workers",
    ]
    if pages == "all":
        of_phone += [*PAGES, *more_pages(base, run.rpartition("/")[2], task)]
    some = ("/ui/schedules",)
    for width, paths in ((375, of_phone), (1024, some), (1280, some), (2560, ("/ui", "/ui/tasks", run))):
        with watched(browser, base, viewport={"width": width, "height": 844}) as window:
            for path in paths:
                window.go(path)
                assert window.page.evaluate("document.documentElement.scrollWidth") <= width, (width, path)
                used = window.page.locator("main").bounding_box()["width"]
                assert used > 0.8 * width or width < 2_000, "a large screen is used"


def hold_stream(page: Any, path: str) -> Any:
    """Open a page; return its intercepted request for the event stream, still unanswered."""
    held: list[Any] = []
    page.route("**/ui/live/**", lambda route: held.append(route))
    page.goto(path)
    eventually(lambda: page.evaluate("true") and held, "the page asks for its stream")
    return held[0]


def test_a_page_shows_changes_from_before_its_stream_began(base: str, browser: Any) -> None:
    context = browser.new_context(base_url=base)
    page = context.new_page()
    stream = hold_stream(page, "/ui/tasks?name=project.broken&error=unheard")
    task = enqueue(f"{base}/api/v1", "broken", "unheard")
    eventually(lambda: "failed" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has failed")
    assert page.locator(f"tr[data-key='{task}']").count() == 0
    stream.continue_()
    page.locator(f"tr[data-key='{task}']").wait_for(timeout=30_000)
    context.close()


def test_a_page_of_an_ended_task_shows_a_later_retry(base: str, window: Watched) -> None:
    task = enqueue(f"{base}/api/v1", "broken", "once more")
    eventually(lambda: "failed" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has failed")
    window.go(f"/ui/tasks/{task}")
    window.sees("main[data-shows='failed 1']")
    httpx.post(f"{base}/api/v1/tasks/{task}/retry").raise_for_status()
    eventually(lambda: httpx.get(f"{base}/api/v1/tasks/{task}").json()["attempts"][1:], "somebody else retries it")
    window.sees("main[data-shows$=' 2']")


def test_a_page_shows_that_its_server_is_unreachable(base: str, browser: Any) -> None:
    context = browser.new_context(base_url=base)
    page = context.new_page()
    stream = hold_stream(page, "/ui")
    page.route("**/*", lambda route: route.abort())
    stream.abort()
    page.locator(".live", has_text="not connected").wait_for()
    page.locator(".live", has_text="showing the state as of").wait_for()
    assert page.get_by_text("All is well").count() == 0
    page.unroute_all()
    stream = hold_stream(page, "/ui/queues")
    page.route("**/*", lambda route: route.abort())
    stream.abort()
    page.locator(".live", has_text="not connected").wait_for()
    page.get_by_role("button", name="Pause").first.click()
    page.locator(".unsent", has_text="the server cannot be reached").wait_for()
    page.unroute_all()
    page.locator(".live[data-state=on]").wait_for()
    assert page.get_by_role("button", name="Pause").first.is_visible()
    context.close()


HURRIES = "const real = setInterval; window.setInterval = (call, wait) => real(call, Math.min(wait, 500));"
"""A script that shortens all intervals of a page to half a second at most."""


def test_an_open_page_shows_that_no_scheduler_leads(served: tuple[Stack, str], browser: Any) -> None:
    stack, base = served
    with watched(browser, base) as window:
        window.page.context.add_init_script(HURRIES)
        window.go("/ui")
        window.sees(".live[data-state=on]", "live")
        assert window.page.locator(".trouble", has_text="No leader").count() == 0
        stack.leader().kill()
        try:
            window.sees(".live[data-state=stopped]", "no scheduler leads")
            window.sees(".trouble", "No leader")
            window.sees(".facts", "unknown since")
            assert window.page.get_by_text("All is well").count() == 0
            window.page.locator(".trouble").get_by_role("link", name="Workers").click()
            window.sees(".facts", "unknown since")
            window.go("/ui")
        finally:
            stack.scheduler()
        window.sees(".live[data-state=on]", "live")
        window.page.locator(".trouble", has_text="No leader").wait_for(state="detached", timeout=30_000)


def test_a_page_stays_live_until_an_action_has_taken_effect(served: tuple[Stack, str], browser: Any) -> None:
    stack, base = served
    task = enqueue(f"{base}/api/v1", "broken", "by somebody")
    eventually(lambda: "failed" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has failed")
    with watched(browser, base) as window:
        window.go(f"/ui/tasks/{task}")
        window.sees("h1 .s-failed")
        assert not window.page.locator("main[data-live]").count()
        stack.leader().kill()
        try:
            window.page.get_by_role("button", name="Retry").click()
            window.sees(".said", "retry is requested")
            window.sees(".said", "has not changed yet")
        finally:
            stack.scheduler()
        window.sees("tr[data-key=attempt-2] .s-failed")
        window.sees("h1 .s-failed")
        assert window.page.locator(".said", has_text="has not changed").count() == 0
        window.page.locator(".said").wait_for(state="detached")
        assert window.page.locator("tr[data-key^=attempt] .error", has_text="by somebody").count() == 2
        window.sees("details[open] mark", "in broken")
        window.page.locator("tr[data-key=attempt-1] summary", has_text="Traceback").click()
        window.sees("tr[data-key=attempt-1] mark", "in broken")
        window.page.locator("tr[data-key=attempt-2]").get_by_role("link", name="Log").click()
        window.sees("h2", "Log of attempt 2")


def test_an_open_page_shows_when_the_state_cannot_be_read(base: str, browser: Any) -> None:
    context = browser.new_context(base_url=base)
    context.add_init_script(HURRIES)
    page = context.new_page()
    page.goto("/ui/queues")
    page.locator(".live[data-state=on]").wait_for()
    page.route("**/ui/pulse", lambda route: route.fulfill(status=503))
    page.locator(".live[data-state=lost]", has_text="showing the state as of").wait_for()
    page.unroute_all()
    page.locator(".live[data-state=on]", has_text="live").wait_for()
    context.close()


def set_tab_hidden(page: Any, *, hidden: bool) -> None:
    """Tell a page whether its tab is hidden: without a screen, a browser takes all tabs to be in front."""
    page.evaluate(
        "(is) => { Object.defineProperty(document, 'hidden', {value: is, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )


@pytest.mark.long
def test_more_tabs_than_connections_stay_live(base: str, browser: Any) -> None:
    context = browser.new_context(base_url=base)
    tabs: list[Any] = []
    for _ in range(8):
        tabs.append(context.new_page())
        tabs[-1].goto("/ui/tasks?queue=mail")
        tabs[-1].locator(".live[data-state=on]").wait_for()
    set_tab_hidden(tabs[0], hidden=True)
    task = enqueue(f"{base}/api/v1", "noop", queue="mail")
    for tab in tabs[1:]:
        tab.locator(f"a[href='/ui/tasks/{task}']").first.wait_for()
    assert tabs[0].locator(f"a[href='/ui/tasks/{task}']").count() == 0, "nobody looks at it"
    set_tab_hidden(tabs[0], hidden=False)
    tabs[0].locator(f"a[href='/ui/tasks/{task}']").first.wait_for()
    context.close()


def test_a_read_only_key_logs_in_and_cannot_pause_queues(served: tuple[Stack, str], browser: Any) -> None:
    stack, base = served
    secret = Secret(secrets.token_hex(6), secrets.token_urlsafe(32))
    with stack.engine.connect() as connection:
        keys.add(connection, secret, "reader", Scope.READ, None)
    try:
        eventually(lambda: httpx.get(f"{base}/ui").status_code == 303, "a key is asked for")
        context = browser.new_context(base_url=base)
        page = context.new_page()
        page.goto("/ui/queues")
        page.get_by_label("Key").fill("orc_nonsense")
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("alert").wait_for()
        page.get_by_label("Key").fill(str(secret))
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("heading", name="Queues").wait_for()
        assert page.get_by_role("button", name="Pause").count() == 0
        answer = page.evaluate("fetch('/ui/queues/mail/pause', {method: 'POST'}).then((answer) => answer.status)")
        assert answer == 403
        stream = hold_stream(page, "/ui/tasks?queue=mail")
        context.clear_cookies()  # the session ends while the page is open
        stream.fulfill(status=401)
        page.wait_for_url("**/ui/login?to=%2Fui%2Ftasks%3Fqueue%3Dmail")
        page.unroute_all()
        page.get_by_label("Key").fill(str(secret))
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("heading", name="Tasks", level=1).wait_for()
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("Key").wait_for()
        context.close()
    finally:
        with stack.engine.connect() as connection:
            connection.exec_driver_sql("DELETE FROM orchestrator.api_keys")
