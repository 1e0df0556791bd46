"""Servers for tests that break them, and helpers to check `orchestrator status` meanwhile."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.embedded import EmbeddedPostgres
from orchestrator.store import database
from tests import forking
from tests.acceptance.stack import Process, Stack
from tests.waiting import eventually

SETTINGS = {"worker_ttl": 3.0, "heartbeat": 0.25, "lease": 1.5, "long_transaction": 1.0}
"""Short timeouts: an outage of a few seconds exceeds all of them, as a ten-minute outage exceeds the defaults. They are
long enough for a machine that freezes for a second or two."""
OUTAGE = 1.5 * SETTINGS["worker_ttl"]


@contextmanager
def folder() -> Iterator[Path]:
    """Yield an empty folder that the user of Postgres can enter, with a path short enough for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="orchestrator-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    """Mount a small tmpfs; skip the test where mounting is not permitted."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "none", path], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk completely; return the file whose removal frees the space."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return filler


@contextmanager
def postgres(path: Path, **settings: str | int) -> Iterator[tuple[EmbeddedPostgres, str]]:
    """Yield a Postgres server with our schema, and its URL."""
    server = EmbeddedPostgres(path, settings)
    server.start()
    try:
        url = server.create_database("orchestrator")
        database.upgrade(url)
        yield server, url
    finally:
        server.start()  # the test may have stopped it
        server.stop("immediate")


def command(stack: Stack, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an `orchestrator` command to its end."""
    return forking.run(*arguments, environment=stack.environment | environment, folder=Path(__file__).parent)


def trouble(stack: Stack) -> Mapping[str, str]:
    """Return the problems in `orchestrator status`: messages by kind."""
    result = stack.command("status", "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return {found["kind"]: found["message"] for found in document["trouble"]}


def pass_time(seconds: float) -> None:
    """Wait for the duration of an outage."""
    deadline = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > deadline, "time passes", seconds + 10)


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def each_ran_once(stack: Stack, log: Path, count: int) -> None:
    """Wait until all tasks have succeeded; check that each number is in the tasks' log exactly once."""
    ended = "SELECT count(*) FROM orchestrator.ended_tasks WHERE name = 'project.logged' AND status = 'success'"
    eventually(lambda: stack.scalar(ended) == count, f"{count} succeed", 60)
    assert sorted(map(int, lines(log))) == list(range(count))
    assert stack.scalar("SELECT count(*) FROM orchestrator.tasks WHERE name = 'project.logged'") == 0
    assert stack.scalar("SELECT coalesce(sum(failures + losses), 0) FROM orchestrator.ended_tasks") == 0


def said(process: Process, words: str) -> int:
    """Return how many lines of a process's log contain a text."""
    return sum(words in line for line in process.log.read_text().splitlines())


def is_calm(stack: Stack, limit: int) -> bool:
    """Check that an outage cost each process at most `limit` log lines of each kind, and no traceback."""
    for process in stack.processes:
        text = process.log.read_text()
        assert "Traceback" not in text, text
        assert said(process, "cannot be used;") <= limit, text
        assert said(process, "can be used again") <= limit, text
    return True
