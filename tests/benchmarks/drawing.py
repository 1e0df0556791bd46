"""How long a browser takes to draw a run of ten thousand tasks, and what two hundred open pages cost the scheduler.

    python -m tests.benchmarks.drawing --tasks 10000 --pages 200

It needs Chromium and Playwright, as tests of the dashboard do. `docs/performance.md` holds the findings. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from orchestrator.embedded import EmbeddedServices
from orchestrator.store import database
from tests.acceptance.browser import browsing
from tests.benchmarks.listeners import Listener, Server
from tests.waiting import eventually

PROGRAM = """
from orchestrator import Orchestrator

app = Orchestrator()


@app.task
def numbers(count: int) -> list[int]:
    return list(range(count))


@app.task
def noop(number: int) -> int:
    return number


@app.task
def done() -> None:
    pass
"""
DRAWN = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done({
    drawn: performance.now(),
    answered: performance.getEntriesByType('navigation')[0].responseEnd,
    painted: (performance.getEntriesByName('first-contentful-paint')[0] || {startTime: 0}).startTime,
    elements: document.querySelectorAll('*').length,
    nodes: document.querySelectorAll('g.node').length}))))"""
"""When the second frame after everything was loaded has been drawn, in milliseconds since the address was asked for."""


def start(base: str, tasks: int) -> str:
    """Start a run in which one step is many tasks; return its id when it has ended."""
    steps = {
        "list": {"task": "load.numbers", "input": {"count": tasks - 3}},
        "each": {"task": "load.noop", "depends_on": ["list"], "foreach": "list", "input": {"number": "${item}"}},
        "check": {"task": "load.done", "depends_on": ["each"]},
        "report": {"task": "load.done", "depends_on": ["check"]},
    }
    httpx.post(f"{base}/api/v1/workflows", json={"definition": {"name": "wide", "tasks": steps}}).raise_for_status()
    run = str(httpx.post(f"{base}/api/v1/workflows/wide/runs", json={}).raise_for_status().json()["id"])
    address = f"{base}/api/v1/runs/{run}"
    eventually(lambda: httpx.get(address).json()["run"]["status"] == "success", "the run has ended", 300)
    return run


def draw(base: str, run: str, times: int) -> dict[str, Any]:
    """Open the page of a run several times; return how long that took."""
    found = []
    with browsing() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for _ in range(times):
            page.goto(f"{base}/ui/runs/{run}")
            found.append(page.evaluate(DRAWN))
    first = found[0]
    return {
        "elements": first["elements"],
        "nodes of the graph": first["nodes"],
        "answered, ms": round(statistics.median(one["answered"] for one in found)),
        "first painted, ms": round(statistics.median(one["painted"] for one in found)),
        "drawn, ms": round(statistics.median(one["drawn"] for one in found)),
        "worst, ms": round(max(one["drawn"] for one in found)),
    }


async def open_pages(load: Any, servers: dict[str, Server], port: int, options: Any) -> dict[str, Any]:
    """Measure what the scheduler takes while nobody looks, and while many have the overview open; in turns."""
    found: dict[str, Any] = {}
    listeners: list[asyncio.Task[None]] = []
    for turn in range(2 * options.turns):
        if turn % 2:
            pages = [Listener(port, "/ui/live/status/events") for _ in range(options.pages)]
            listeners = [asyncio.create_task(page.run()) for page in pages]
            while not all(page.kinds["snapshot"] for page in pages):
                await asyncio.sleep(0.05)
        before, began, enqueued = {name: one.cpu for name, one in servers.items()}, time.monotonic(), 0
        while (now := time.monotonic() - began) < options.seconds:
            due = int(now * options.rate) - enqueued
            if due > 0:
                await asyncio.to_thread(load.app.enqueue_many, load.noop, [(1,)] * due)
                enqueued += due
            await asyncio.sleep(0.05)
        took = time.monotonic() - began
        shares = {name: round(100 * (one.cpu - before[name]) / took, 1) for name, one in servers.items()}
        found.setdefault("all look" if turn % 2 else "nobody looks", []).append(shares)
        for one in listeners:
            one.cancel()
        listeners = []
    return found


def main() -> None:
    """Start everything, draw, look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--rate", type=int, default=100, help="tasks a second, while pages are open")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drawing-") as name, EmbeddedServices(Path(name) / "services") as services:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "load.py").write_text(PROGRAM)
        database.upgrade(services.database_url)
        stores = {
            "ORCHESTRATOR_DATABASE_URL": services.database_url,
            "ORCHESTRATOR_REDIS_URL": services.redis_url,
        }
        os.environ.update(stores)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = dict(os.environ)
        servers = {
            "scheduler": Server(folder, environment, "scheduler"),
            "worker": Server(folder, environment, "worker", "--app", "load:app"),
            "api": Server(folder, environment, "api", "--port", str(port)),
        }
        sys.path.insert(0, str(folder))
        base = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda: _is_up(base), "the API answers", 60)
            run = start(base, options.tasks)
            print(json.dumps({"a run of so many tasks": options.tasks, **draw(base, run, options.times)}, indent=2))
            import load  # type: ignore[import-not-found]

            print(json.dumps(asyncio.run(open_pages(load, servers, port, options)), indent=2))
        finally:
            for server in servers.values():
                server.stop()


def _is_up(base: str) -> bool:
    try:
        return httpx.get(f"{base}/readyz").status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
