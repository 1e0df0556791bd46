"""Processes of the last three schemas on the newest one, under load: upgrade, rollback, upgrade.

The releases are commits of this repository. The test compares accepted and executed work, from a file that each task
writes a line to, and from the tables.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.embedded import EmbeddedServices
from orchestrator.store import compatibility, database
from tests.acceptance.stack import Process, Stack
from tests.databases import new_database
from tests.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
NEWEST = REPOSITORY
PROJECT = """
import os
import sys
import time
from pathlib import Path

from orchestrator import Orchestrator, WorkflowContext

app = Orchestrator()
LEDGER = os.environ["LEDGER"]


@app.task(name="record")
def record(key: str) -> str:
    line = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(line, f"{key}\\n".encode())
    os.close(line)
    return key


@app.workflow(name="order")
async def order(ctx: WorkflowContext, key: str) -> str:
    await record.schedule(f"{key}/paid")
    await ctx.sleep(0.5)
    return await record.schedule(f"{key}/shipped")


def load(prefix: str, stop: str) -> None:
    number = 0
    while not Path(stop).exists():
        number += 1
        key = f"{prefix}-{number}"
        order.start(key) if number % 10 == 0 else record.enqueue(key)
        print("order" if number % 10 == 0 else "task", key, flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    load(*sys.argv[1:])
"""


def git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"the commits of earlier releases are not here: {done.stderr.decode().strip()[:200]}")
    return done.stdout


@pytest.fixture(params=[1, 2, 3], ids=["last", "second-last", "third-last"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """The last commit before the newest change of the schema, or before an earlier change; and its revision."""
    changes = git("log", "-G^REVISION = ", "--format=%H", "--", "orchestrator/store/database.py").decode().split()
    if len(changes) < request.param:
        pytest.skip("the history of this clone does not reach so far back")
    commit = f"{changes[request.param - 1]}^"
    folder = tmp_path / "old"
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, "orchestrator", "workers", "migrations"))) as files:
        files.extractall(folder, filter="fully_trusted")  # the package has symlinks to the other two
    revision = re.search(r'^REVISION = "(\d+)"', (folder / "orchestrator/store/database.py").read_text(), re.MULTILINE)
    assert revision is not None
    return folder, revision[1]


class Fleets:
    """Processes of two releases around the same database and Redis."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack = stack
        self._folder = folder
        self.ledger = folder / "ledger"
        self.ledger.touch()
        (folder / "shop.py").write_text(PROJECT, encoding="utf-8")
        self._loads: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._count = 0

    def _environment(self, release: Path) -> dict[str, str]:
        paths = f"{release}:{self._folder}"
        return {**self.stack.environment, "PYTHONPATH": paths, "LEDGER": str(self.ledger)}

    def command(self, release: Path, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *words],
            env=self._environment(release),
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout

    def start(self, release: Path, *words: str) -> Process:
        self._count += 1
        log = self._folder / f"{self._count}-{words[0]}.log"
        process = Process([*words], self._environment(release), log, self._folder)
        self.stack.processes.append(process)
        is_ready = re.compile(r"scheduler[. ]ready|process\.ready|process \d+ ready")  # the wording differs by release
        eventually(lambda: is_ready.search(log.read_text()), f"{words[0]} of {release} is ready, see {log}", 60)
        return process

    def scheduler(self, release: Path) -> Process:
        return self.start(release, "scheduler")

    def worker(self, release: Path) -> Process:
        return self.start(release, "worker", "--app", "shop:app", "--processes", "1")

    def load(self, release: Path) -> Path:
        """Start a program of a release that enqueues until the returned file exists."""
        self._count += 1
        stop = self._folder / f"stop-{self._count}"
        accepted = self._folder / f"accepted-{self._count}"
        with accepted.open("wb") as output:
            words = [sys.executable, str(self._folder / "shop.py"), str(self._count), str(stop)]
            process = subprocess.Popen(words, env=self._environment(release), cwd=self._folder, stdout=output)
        self._loads.append((process, accepted))
        return stop

    def goes_on(self) -> None:
        """Wait until the running processes have done a hundred more tasks."""
        before = len(self.ledger.read_text().split())
        eventually(lambda: len(self.ledger.read_text().split()) > before + 100, "tasks run", 60)

    def expected(self) -> list[str]:
        """Wait for the programs to exit with 0; return the keys of all work that was accepted."""
        found: list[str] = []
        for process, accepted in self._loads:
            assert process.wait(60) == 0, accepted
            for line in accepted.read_text().splitlines():
                kind, key = line.split()
                found += [f"{key}/paid", f"{key}/shipped"] if kind == "order" else [key]
        return found

    def close(self) -> None:
        for process, _ in self._loads:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def fleets(services: EmbeddedServices, redis_url: str, tmp_path: Path) -> Iterator[Fleets]:
    with new_database(services, "releases") as url:
        stack = Stack(url, redis_url, tmp_path, worker_ttl=30.0)
        stack.redis.flushall()
        found = Fleets(stack, tmp_path)
        yield found
        found.close()
        stack.close()


def test_upgrade_rollback_and_upgrade_lose_and_repeat_nothing(fleets: Fleets, old: tuple[Path, str]) -> None:
    release, revision = old
    knows_the_mark = revision > compatibility.FIRST
    assert fleets.command(release, "db", "upgrade")[0] == 0
    before = [fleets.scheduler(release), fleets.worker(release)]
    stops = [fleets.load(release)]
    fleets.goes_on()

    assert fleets.command(NEWEST, "db", "upgrade") == (0, f"The database is at revision {database.REVISION}.\n")
    fleets.goes_on()
    after = [fleets.scheduler(NEWEST), fleets.worker(NEWEST)]
    assert [process.stop() for process in before] == [0, 0]
    stops.append(fleets.load(NEWEST))
    fleets.goes_on()

    code, said = fleets.command(release, "db", "upgrade")
    assert (code == 0) == knows_the_mark, said
    back = [fleets.worker(release)]
    if knows_the_mark:
        back.append(fleets.scheduler(release))
        assert back[1].logged("newer than this release knows")
        assert said.endswith("supports this release too. Nothing to do.\n")
        assert after.pop(0).stop() == 0
    assert after.pop().stop() == 0
    fleets.goes_on()

    again = [fleets.worker(NEWEST), fleets.scheduler(NEWEST)]
    assert [process.stop() for process in (*back, *after)] == [0, 0]
    fleets.goes_on()
    for stop in stops:
        stop.touch()
    expected = fleets.expected()
    open_ = "SELECT (SELECT count(*) FROM orchestrator.tasks) + (SELECT count(*) FROM orchestrator.runs WHERE open > 0)"
    eventually(lambda: fleets.stack.scalar(open_) == 0, "all have ended", 90)

    ran = Counter(fleets.ledger.read_text().split())
    assert set(expected) - set(ran) == set(), "lost"
    assert {key: times for key, times in ran.items() if times > 1} == {}, "doubled"
    assert set(ran) - set(expected) == set()
    ends = "SELECT status, losses, count(*) FROM orchestrator.ended_tasks WHERE name = 'record' GROUP BY 1, 2"
    assert fleets.stack.sql(ends) == [("success", 0, len(expected))]
    assert fleets.stack.sql("SELECT DISTINCT status FROM orchestrator.runs") == [("success",)]
    assert all(process.is_running() for process in again)
