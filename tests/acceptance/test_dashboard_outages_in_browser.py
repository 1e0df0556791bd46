"""Open pages during an outage of Redis, the scheduler or the API: each soon shows the outage, and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from orchestrator.embedded import EmbeddedRedis
from tests.acceptance.browser import Watched, browsing, watched
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.listening import enqueue
from tests.acceptance.stack import Process, Stack
from tests.waiting import eventually


@pytest.fixture(scope="module", name="browser")
def browser_of_module() -> Iterator[Any]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module", name="redis")
def redis_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A Redis that tests stop."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module", name="served")
def served_of_module(
    database_url: str, redis: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, str]]:
    with fresh_stack(database_url, redis.url, tmp_path_factory.mktemp("stack")) as stack:
        stack.scheduler()
        stack.worker(processes=1)
        yield stack, stack.api()


@pytest.fixture(name="window")
def window_of_module(browser: Any, served: tuple[Stack, str]) -> Iterator[Watched]:
    with watched(browser, served[1]) as found:
        yield found
        found.errors = [one for one in found.errors if "Failed to load resource" not in one]


def test_every_page_shows_a_redis_outage_at_once(redis: EmbeddedRedis, window: Watched, browser: Any) -> None:
    with watched(browser, window.base) as workers:
        workers.go("/ui/workers")
        window.go("/ui/tasks")
        for one in (window, workers):
            one.sees(".live[data-state=on]", "live")
            assert one.page.locator(".trouble").count() == 0
        workers.sees("tbody .s-live")
        began = time.monotonic()
        redis.stop()
        try:
            window.sees(".live[data-state=stopped]", "Redis is away")
            assert time.monotonic() - began < 3.5, "the pulse of the page, every four seconds, would say it later"
            window.sees(".trouble .item", "Redis cannot be reached")
            assert "start it" in window.page.locator(".live").get_attribute("title")
            workers.sees(".trouble .item", "Redis cannot be reached")
            workers.sees("tbody .s-unheard", "unknown")
            workers.sees(".facts", "unknown since")
            window.go("/ui/queues")
            window.sees(".trouble .item", "Redis cannot be reached")
            window.sees(".live[data-state=stopped]", "Redis is away")
        finally:
            redis.start()
        for one in (window, workers):
            one.sees(".live[data-state=on]", "live")
            one.page.locator(".trouble").wait_for(state="detached", timeout=30_000)
        workers.sees("tbody .s-live")
        workers.errors.clear()  # the browser logs a rejected stream as an error


def test_a_page_shows_that_no_scheduler_leads_when_the_lease_ends(served: tuple[Stack, str], window: Watched) -> None:
    stack, _ = served
    window.go("/ui/queues")
    window.sees(".live[data-state=on]", "live")
    began = time.monotonic()
    stack.leader().kill()
    try:
        window.sees(".live[data-state=stopped]", "no scheduler leads")
        assert time.monotonic() - began < stack.settings.lease + 2.0
        window.sees(".trouble .item", "Start one: orchestrator scheduler")
    finally:
        stack.scheduler()
    window.sees(".live[data-state=on]", "live")


def api_process(stack: Stack) -> Process:
    return next(one for one in stack.processes if one.is_running() and "-api" in one.log.name)


def test_links_and_forms_stay_on_the_page_during_an_api_outage(served: tuple[Stack, str], window: Watched) -> None:
    stack, base = served
    port = int(base.rpartition(":")[2])
    task = enqueue(f"{base}/api/v1", "noop")
    eventually(lambda: "success" in httpx.get(f"{base}/api/v1/tasks/{task}").text, "it has ended")
    window.go("/ui/queues")
    window.sees(".live[data-state=on]", "live")
    api_process(stack).kill()
    window.page.get_by_role("link", name="Workers").click()
    window.sees(".unsent", "The server cannot be reached, so this page stays")
    window.page.keyboard.type("gt")
    window.page.locator("#search").fill("noop")
    window.page.keyboard.press("Enter")
    assert window.page.url == f"{base}/ui/queues"
    assert window.page.locator(".unsent").count() == 1
    window.page.get_by_role("button", name="Pause").first.click()
    window.sees("form .unsent", "Not sent")
    assert window.page.get_by_text("Not sent").count() == 1, "it is said once"
    stack.api(port)
    window.sees(".live[data-state=on]", "live")
    assert window.page.locator(".unsent").count() == 0
    eventually(lambda: not window.page.locator("#announced").inner_text(), "nothing stale is announced")
    window.go(f"/ui/tasks/{task}")
    window.sees(".live[data-state=still]", "ended, refreshed every 10 s")
    api_process(stack).kill()  # this page has no stream, and has not noticed
    window.page.get_by_role("link", name="Workers").click()
    window.sees(".unsent", "The server cannot be reached, so this page stays")
    stack.api(port)
    window.page.get_by_role("link", name="Workers").click()
    window.sees("h1", "Workers")
    window.page.go_back()
    window.sees("h1", "noop")
