"""Actions on the pages of runs, failures, queues and workers, in a real browser: by mouse, and by keyboard alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.acceptance.browser import Watched
from tests.acceptance.listening import enqueue
from tests.acceptance.test_dashboard_in_browser import (  # noqa: F401  # and fixtures
    base_of_module,
    browser_of_module,
    served_of_module,
    start_dag,
    tab_to,
    window_of_module,
)
from tests.waiting import eventually


def press(window: Watched, label: str, within: str = "main") -> None:
    """Press a button or follow a link."""
    window.page.locator(within).locator("button, a, summary").filter(has_text=label).first.click()


def tick(window: Watched, label: str) -> None:
    """Mark a row."""
    window.page.locator(f"input[aria-label^='{label}']:not(:checked)").first.check()


def start_runs(base: str, name: str, count: int, task: str = "add") -> list[str]:
    """Start runs one after another, each with its own number; return their ids when they have ended."""
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


def test_marked_runs_are_retried_and_filtered_runs_are_cancelled(base: str, window: Watched, tmp_path: Path) -> None:
    start_runs(base, "broken-here", 2, "broken")
    window.go("/ui/runs?workflow=broken-here")
    for _ in range(2):
        tick(window, "Mark broken-here")
    window.sees("button", "Retry 2 marked")
    press(window, "Retry 2 marked")
    window.sees(".said", "2 of 2 runs are being retried")
    for _ in range(2):
        start_dag(base, "open-here", tmp_path / "never")
    window.go("/ui/runs?workflow=open-here")
    press(window, "Cancel all open…")
    window.sees("h1", "Cancel open runs")
    press(window, "Cancel 2 runs")
    window.sees(".said", "2 of 2 runs are being cancelled")
    window.page.locator("tbody .s-cancelled").nth(1).wait_for()


def test_keyboard_shortcuts_move_mark_open_retry_and_cancel(base: str, window: Watched, tmp_path: Path) -> None:
    runs = start_runs(base, "by-key", 3, "broken")[::-1]
    keyboard = window.page.keyboard
    focused = "document.activeElement.closest('tr')?.dataset.key"
    window.go("/ui/runs?workflow=by-key")
    keyboard.press("?")
    window.sees("#keys", "next, previous row")
    keyboard.press("j")  # under the open help, the page ignores keys
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
    window.sees(".said", "Retrying the failed tasks")
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
    window.sees(".said", "is resumed")
    before = window.sees("[data-times]").inner_text()
    keyboard.press("t")
    assert window.sees("[data-times]").inner_text() != before
    window.page.locator("[data-keys]").click()
    window.sees("#keys[open]")


def test_marked_rows_offer_only_applicable_actions(base: str, window: Watched, tmp_path: Path) -> None:
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


def test_a_live_log_shows_how_many_lines_were_dropped(base: str, window: Watched, tmp_path: Path) -> None:
    task = enqueue(f"{base}/api/v1", "recites", str(tmp_path / "go"), 150_000)
    window.go(f"/ui/tasks/{task}")
    window.sees("#log-before", "lines before these")
    window.sees(".l-dropped", "kept back")
    assert window.page.locator("#log > *").count() <= 2_000
    (tmp_path / "go").touch()
    window.sees("h1 .s-success")
    window.sees("#log p", "the end")
    window.sees(".l-dropped", "lines (")


def test_lists_show_the_progress_of_running_tasks(base: str, window: Watched, tmp_path: Path) -> None:
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


def test_a_large_value_is_folded_and_opened(base: str, window: Watched) -> None:
    task = enqueue(f"{base}/api/v1", "broken", [f"line {number}" for number in range(1_000)])
    window.go(f"/ui/tasks/{task}")
    value = window.page.locator(".value", has_text="line 0").first
    folded = value.locator("pre")
    window.sees(".value summary", "lines")
    assert not folded.is_visible()
    value.locator("summary").click()
    folded.wait_for(state="visible")
    assert "line 999" in folded.inner_text()


def test_a_run_page_offers_signals_queries_and_updates_with_arguments(base: str, window: Watched) -> None:
    api = f"{base}/api/v1"
    run = str(httpx.post(f"{api}/workflows/project.basket/runs", json={}).raise_for_status().json()["id"])
    eventually(lambda: "Send rename" in httpx.get(f"{base}/ui/runs/{run}").text, "its handlers are known")
    window.go(f"/ui/runs/{run}")
    press(window, "Send a signal, query or update")
    window.page.get_by_label("value", exact=True).fill("tea")
    press(window, "Send add")
    window.sees(".said", "The signal is sent")
    window.sees(".story", "tea")
    press(window, "Send a signal, query or update")
    window.page.get_by_label("number", exact=True).fill("0")
    window.page.get_by_label("name", exact=True).fill("coffee")
    press(window, "Send rename")
    window.sees(".said", "tea")
    press(window, "Send a signal, query or update")
    press(window, "Ask items")
    window.sees(".said", "coffee")


def test_a_copy_of_a_task_is_enqueued_from_its_page(base: str, window: Watched) -> None:
    task = enqueue(f"{base}/api/v1", "add", 3, 4)
    window.go(f"/ui/tasks/{task}")
    window.sees("h1 .s-success")
    window.sees(".value pre", '"a": 3')
    window.sees(".attempts a", "2026.1")
    press(window, "Enqueue a copy…")
    window.sees("h1", "Enqueue project.add")
    assert window.page.locator("textarea").count() == 0, "the parameters are announced, and are integers"
    fields = {name: window.page.get_by_label(f"{name} int, required") for name in ("a", "b")}

    def send(**values: str) -> None:
        for name, value in values.items():
            fields[name].fill(value)
        press(window, "Enqueue", "form.stacked")

    assert [fields[name].input_value() for name in fields] == ["3", "4"]
    send(b="")
    assert fields["b"].evaluate("field => field.validity.valueMissing"), "the browser says what is missing"
    send(b="5")
    window.sees(".said", "The task was enqueued")
    window.sees("h1 .s-success")
    assert task not in window.page.url
    window.sees(".value pre", "8")


def test_a_page_reload_transfers_only_changed_parts(base: str, window: Watched, tmp_path: Path) -> None:
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
    window.page.on("response", lambda answer: sizes.append(len(answer.body())) if is_reload(answer) else None)
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


def is_reload(answer: Any) -> bool:
    """Return whether a response is a page that its script has requested again."""
    return "if-none-match" in answer.request.headers and answer.status == 200


def test_a_graph_that_does_not_fit_has_a_minimap(base: str, window: Watched) -> None:
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
