"""A signal handler enqueues a task, at whatever line it interrupts another enqueue."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import Engine, text

from orchestrator import Orchestrator
from orchestrator.store import database
from tests.stores import backend_of

_OURS = ("/orchestrator/sdk/", "/orchestrator/store/driver", "/orchestrator/transport/client", "/sqlalchemy/pool/")
_STEP = 5
"""The handler interrupts one of this many lines."""


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine_for(database_url, autocommit=True)
    yield engine
    engine.dispose()


@pytest.mark.parametrize("opens", [False, True], ids=["a connection of the pool", "a new connection"])
def test_a_signal_handler_enqueues_while_it_interrupts_an_enqueue(
    database_url: str, redis_url: str, engine: Engine, opens: bool
) -> None:
    app = Orchestrator(database_url=database_url, redis_url=redis_url)
    task = app.task(name="job")(lambda: None)
    task.enqueue()
    places = interruptions = 0
    made = {task.enqueue().id}

    def interrupt(*_: object) -> None:
        made.add(task.enqueue().id)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal places, interruptions
        if not any(part in frame.f_code.co_filename for part in _OURS):
            return None
        if event == "line":
            places += 1
            if places == target:
                interruptions += 1
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before = signal.signal(signal.SIGUSR1, interrupt)
    target = 1
    try:
        while interruptions == (target - 1) // _STEP:  # until every line was a target
            if opens:
                backend_of(app).connections._links().engine.pool.dispose()
            places = 0
            sys.settrace(trace)
            made.add(task.enqueue().id)
            sys.settrace(None)
            target += _STEP
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)
    assert interruptions > 10
    with engine.connect() as connection:
        stored = {str(row[0]) for row in connection.execute(text("SELECT id FROM orchestrator.tasks"))}
    assert made <= stored
    app.close()


_FIRST = """
import json, os, signal, sys, threading
from orchestrator import Orchestrator

app = Orchestrator(database_url=sys.argv[1], redis_url=sys.argv[2])
task = app.task(name="job")(lambda: None)
made, interruptions, loaded_in_reach = [], 0, []

def interrupt(*_):
    made.append(task.enqueue().id)

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        global interruptions
        if threading.current_thread() is threading.main_thread():
            loaded_in_reach.append(name)
        if name == sys.argv[3] and not interruptions:
            interruptions += 1
            os.kill(os.getpid(), signal.SIGUSR1)
            sum(range(100_000))  # so that a handler which runs in this very thread does so here

signal.signal(signal.SIGUSR1, interrupt)
sys.meta_path.insert(0, Interrupting())
made.append(task.enqueue().id)
assert interruptions == 1, interruptions
assert not loaded_in_reach, loaded_in_reach
print(json.dumps(made))
"""


@pytest.mark.parametrize(
    "module",
    [
        "orchestrator.sdk.backend",
        "orchestrator.sdk.backend.connections",
        "orchestrator.store",
        "sqlalchemy",
        "sqlalchemy.sql",
        "psycopg2",
    ],
)
def test_a_signal_handler_enqueues_while_it_interrupts_the_first_enqueue(
    database_url: str, redis_url: str, engine: Engine, module: str
) -> None:
    """The first enqueue imports what it needs, module by module."""
    program = [sys.executable, "-c", _FIRST, database_url, redis_url, module]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    made = set(json.loads(ended.stdout))
    with engine.connect() as connection:
        stored = {str(row[0]) for row in connection.execute(text("SELECT id FROM orchestrator.tasks"))}
    assert len(made) == 2
    assert made <= stored
