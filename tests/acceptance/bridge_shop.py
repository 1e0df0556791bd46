"""A Celery program and the orchestrator that takes over its tasks, for tests of the bridge."""

# ruff: noqa: E402  # Celery is importable only after `require_celery`

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from click.testing import Result
from redis import Redis

from tests.celery_packages import require_celery

require_celery()

from celery import Celery

from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import HERE, Process, Stack
from tests.waiting import eventually

CELERY_WARNINGS = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # Celery leaves connections open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Celery uses deprecated Redis commands
]
WAIT = 30


class Shop:
    """A Celery program, and the orchestrator that takes over its tasks."""

    def __init__(self, stack: Stack, redis_url: str, folder: Path) -> None:
        self.stack = stack
        self.broker, self.results = _with_database(redis_url, 1), _with_database(redis_url, 2)
        self.redis: Redis = Redis.from_url(_for_redis(self.broker))
        self.celery = Celery("producer", broker=self.broker, backend=self.results, set_as_current=False)
        self.folder = folder
        self._journal = folder / "journal"
        self._workers: list[subprocess.Popen[bytes]] = []
        stack.environment |= {"SHOP_BROKER": self.broker, "SHOP_RESULTS": self.results, "BRIDGED": str(folder)}

    def send(self, name: str, *args: Any, **options: Any) -> Any:
        return self.celery.send_task(f"shop.{name}", args, **options)

    app = "bridged:app"

    def bridge(self, *arguments: str) -> Process:
        process = self.stack._start("bridge", ["bridge", "celery", *self._words, *arguments], HERE)
        eventually(lambda: process.logged("bridge.ready"), f"the bridge is ready, see {process.log}")
        return process

    def run(self, *arguments: str) -> Result:
        return self.stack.command("bridge", "celery", *self._words, *arguments)

    @property
    def _words(self) -> list[str]:
        return ["--broker", self.broker, "--results", self.results, "--app", self.app, "--log-level", "debug"]

    def worker(self) -> None:
        with (self.folder / "celery.log").open("ab") as output:
            started = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "celery_shop", "worker", "-c", "1", "-l", "info"],
                cwd=HERE,
                env=self.stack.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._workers.append(started)

    def kill_workers(self) -> None:
        while self._workers:
            worker = self._workers.pop()
            os.killpg(worker.pid, SIGKILL)
            worker.wait()

    def journal(self) -> list[str]:
        return self._journal.read_text().splitlines() if self._journal.exists() else []

    def left(self) -> list[bytes]:
        """Return the keys that the bridge has in Celery's Redis."""
        found: Any = self.redis.keys("orchestrator:*")
        return [key for key in found if not key.endswith(b":bridges")]


def _with_database(url: str, number: int) -> str:
    return f"redis+socket://{url.removeprefix('unix://').partition('?')[0]}?virtual_host={number}"


def _for_redis(url: str) -> str:
    return url.replace("redis+socket://", "unix://").replace("?virtual_host=", "?db=")


@pytest.fixture(name="shop")
def shop_fixture(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Shop]:
    with fresh_stack(database_url, redis_url, tmp_path) as stack:
        shop = Shop(stack, redis_url, tmp_path)
        yield shop
        shop.kill_workers()
        shop.celery.close()
        shop.redis.close()
    gc.collect()  # close Celery's open connections while its warnings are ignored
