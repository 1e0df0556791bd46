"""Resources of worker processes: opened and closed with the process, with an attempt, at a timeout, in a child."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator import Orchestrator, TaskFailed
from tests.acceptance.stack import Stack
from tests.waiting import eventually

MODULE = """
import asyncio, os, time
from orchestrator import Depends, Orchestrator

app = Orchestrator()

def say(word):
    with open("said", "a") as file:
        file.write(f"{word} {os.getpid()}\\n")

@app.lifespan
def life():
    say("life begins")
    yield
    say("life ends")

@app.resource(scope="process")
def engine():
    say("engine opened")
    yield "engine"
    say("engine closed")

@app.resource(scope="process")
async def pool(engine: str = Depends(engine)):
    say("pool opened")
    yield "pool"
    await asyncio.sleep(0)
    say("pool closed")

def session(engine: str = Depends(engine)):
    try:
        yield f"session of {engine}"
    finally:
        say("session closed")

@app.task
def use(number: int, session: str = Depends(session)) -> str:
    return f"{number} with {session}"

@app.task(isolation="process")
def use_apart(session: str = Depends(session)) -> int:
    return os.getpid()

@app.task
async def use_pool(pool: str = Depends(pool)) -> str:
    return pool

@app.task(timeout=0.3)
def late(session: str = Depends(session)) -> None:
    say("late begins")
    for _ in range(1000):
        time.sleep(0.01)
"""


def test_a_worker_opens_and_closes_resources(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "resourceful.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    import resourceful

    app: Orchestrator = resourceful.app
    app._client._settings = stack.settings
    stack.scheduler()
    worker = stack.worker("--app", "resourceful:app", folder=folder)

    def said() -> list[tuple[str, str]]:
        lines = (folder / "said").read_text().splitlines()
        return [(word, pid) for word, _, pid in (line.rpartition(" ") for line in lines)]

    assert said()[0][0] == "life begins", "before the first task"
    process = said()[0][1]
    assert [resourceful.use.enqueue(number).result(30) for number in (1, 2)] == [
        "1 with session of engine",
        "2 with session of engine",
    ]
    assert {resourceful.use_pool.enqueue().result(30) for _ in range(2)} == {"pool"}
    child = str(resourceful.use_apart.enqueue().result(30))
    with pytest.raises(TaskFailed, match="TaskTimeout"):
        resourceful.late.enqueue().result(30)
    eventually(lambda: said()[-1][0] == "session closed", "the timeout closes the session")
    assert worker.stop() == 0
    mine = [word for word, pid in said() if pid == process]
    assert mine.count("engine opened") == mine.count("pool opened") == 1
    assert mine.count("session closed") == 3
    assert mine[-3:] == ["pool closed", "engine closed", "life ends"]
    assert [word for word, pid in said() if pid == child] == ["life begins", "engine opened", "session closed"]
    app.close()
    del sys.modules["resourceful"]


def test_a_failing_lifespan_keeps_the_process_from_starting(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "lifeless.py").write_text(MODULE + '\n@app.lifespan\ndef broken():\n    raise OSError("no model")\n')
    worker = stack.worker("--app", "lifeless:app", folder=folder, wait=False)
    eventually(lambda: worker.logged("no model"), "it says why")
    assert worker.logged("app.not_loaded")
    worker.stop()


def test_a_lifespan_that_never_closes_does_not_block_a_stop(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    code = "\n@app.lifespan\ndef hanging():\n    yield\n    say('hangs')\n    time.sleep(1000)\n"
    (folder / "endless.py").write_text(MODULE + code)
    stack.scheduler()
    stack.environment["ORCHESTRATOR_DRAIN_TIMEOUT"] = "0.1"
    worker = stack.worker("--app", "endless:app", folder=folder)
    assert worker.stop() == 0
    assert worker.logged("resource.close_hangs resource=hanging")
