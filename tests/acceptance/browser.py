"""A real browser: Debian's Chromium, driven by Playwright. Records errors of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The headless shell draws no windows and takes two thirds of the time."""
PROGRAM = next(filter(None, map(shutil.which, _PROGRAMS)), None)


class Watched:
    """A page of a browser, and the errors on it."""

    def __init__(self, page: Any, base: str) -> None:
        self.page = page
        self.base = base
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        page.on("console", self._console)
        page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):  # violations of the content security policy are errors
            self.errors.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.base, "data:", "about:")):
            self.errors.append(f"foreign request: {request.url}")

    def go(self, path: str) -> Any:
        """Open a page of the dashboard."""
        return self.page.goto(self.base + path)

    def sees(self, selector: str, text: str = "") -> Any:
        """Wait until an element is visible; return it."""
        found = self.page.locator(selector, has_text=text).first if text else self.page.locator(selector).first
        found.wait_for(timeout=30_000)
        return found


@contextmanager
def browsing() -> Iterator[Any]:
    """Start the browser, or skip the test."""
    if PROGRAM is None:
        pytest.skip("There is no Chromium here: apt-get install chromium-headless-shell")
    api = pytest.importorskip("playwright.sync_api", reason="Playwright drives the browser: pip install playwright")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def watched(browser: Any, base: str, **options: Any) -> Iterator[Watched]:
    """Open a page; fail at the end of the block if it had errors."""
    context = browser.new_context(base_url=base, **{"viewport": {"width": 1280, "height": 900}} | options)
    found = Watched(context.new_page(), base)
    yield found
    context.close()
    assert not found.errors, found.errors
