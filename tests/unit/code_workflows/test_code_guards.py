"""Calls that replay could not repeat are rejected inside a workflow, and nowhere else."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import importlib
import os
import pathlib
import random
import secrets
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections import ChainMap
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import date
from datetime import datetime as moment
from time import monotonic as ticks
from typing import Any

import pytest

from orchestrator import NotDeterministic, Orchestrator, WorkflowContext, unguarded
from orchestrator.sdk.code import guards, loop
from tests.unit.code_workflows.playing import played

as_completed = loop._as_completed
"""`as_completed` as a module gets it that imports it before the first workflow is registered."""


async def _nothing() -> None: ...


nothing = _nothing()
nothing.close()
mine = random.Random(7)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: time.time(), r"time.time\(\) could not be repeated .*line \d+.* use ctx.now\(\)"),
    (lambda: ticks(), "time.monotonic.*use ctx.now"),
    (lambda: time.sleep(1), "time.sleep.*await ctx.sleep"),
    (lambda: datetime.datetime.now(), "datetime.now.*ctx.now"),
    (lambda: moment.now(datetime.UTC), "datetime.now.*ctx.now"),
    (lambda: date.today(), r"date.today.*ctx.now\(\).date\(\)"),
    (lambda: random.random(), "random.random.*ctx.random"),
    (lambda: random.choice([1, 2]), "random.choice.*ctx.random"),
    (lambda: random.Random(), "random.Random.*give it a seed"),
    (lambda: secrets.token_hex(), "secrets.token_hex.*ctx.random"),
    (lambda: secrets.choice([1, 2]), "secrets.choice.*ctx.random"),
    (lambda: uuid.uuid4(), "uuid.uuid4.*ctx.uuid"),
    (lambda: os.urandom(4), "os.urandom.*ctx.random.randbytes"),
    (lambda: os.getenv("HOME"), r"os.getenv.*an argument of the workflow, or ctx.run\("),
    (lambda: open(__file__), r"open\(\).*a task"),  # noqa: PTH123, SIM115
    (lambda: pathlib.Path(__file__).read_text(), "Path.read_text.*a task"),
    (lambda: threading.Thread(target=print).start(), "Thread.start.*asyncio.create_task"),
    (lambda: socket.socket(), "socket.*a task"),
    (lambda: subprocess.run(["true"]), "subprocess.run.*a task"),
    (lambda: list(as_completed([nothing])), "use it as `asyncio.as_completed`"),
    (lambda: time.process_time(), "time.process_time.*ctx.now"),
    (lambda: moment.fromtimestamp(0), r"datetime.fromtimestamp.*fromtimestamp\(…, UTC\)"),
    (lambda: date.fromtimestamp(0), "date.fromtimestamp.*UTC"),
    (lambda: time.strftime("%d"), r"time.strftime.*ctx.now\(\).strftime"),
    (lambda: os.environ["HOME"], "os.environ.__getitem__.*an argument of the workflow"),
    (lambda: os.environ.get("HOME"), "os.environ.get.*an argument of the workflow"),
    (lambda: "HOME" in os.environ, "os.environ.__contains__.*an argument of the workflow"),
    (lambda: os.environ.update({"X": "y"}), "os.environ.update.*a task"),
    (lambda: os.getpid(), "os.getpid.*an argument of the workflow"),
    (lambda: os.path.exists("/"), "os.path.exists.*a task"),  # noqa: PTH110
    (lambda: os.path.getmtime("/"), "os.path.getmtime.*a task"),  # noqa: PTH204
    (lambda: pathlib.Path("/").is_dir(), "Path.is_dir.*a task"),
    (lambda: socket.gethostname(), "socket.gethostname.*an argument of the workflow"),
    (lambda: shutil.which("true"), "shutil.which.*a task"),
]
ALLOWED: list[Callable[[], Any]] = [
    lambda: mine.choice([1, 2]),
    lambda: random.Random(3).random(),
    lambda: datetime.datetime(2026, 1, 1).isoformat(),
    lambda: uuid.uuid5(uuid.NAMESPACE_URL, "x"),
    lambda: uuid.UUID(int=3),
    lambda: textwrap.dedent(" x"),
    lambda: ChainMap({"a": 1}).get("a"),
    lambda: os.path.join("a", "b"),  # noqa: PTH118
    lambda: datetime.datetime(2026, 1, 1).strftime("%d"),
    lambda: moment.fromtimestamp(0, datetime.UTC),
    lambda: datetime.datetime.fromtimestamp(0, tz=datetime.UTC),
]


def workflow_that(calls: Callable[[], Any]) -> Any:
    app = Orchestrator()

    @app.workflow(name="calls")
    async def workflow(ctx: WorkflowContext) -> None:
        calls()

    return workflow


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_nondeterministic_calls_are_rejected(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(NotDeterministic, match=message):
        played(workflow_that(call))


@pytest.mark.parametrize("call", ALLOWED)
def test_deterministic_calls_are_allowed(call: Callable[[], Any]) -> None:
    played(workflow_that(call))


@pytest.mark.parametrize("call", [call for call, _ in REFUSED[:1] + REFUSED[4:8] + REFUSED[11:16]])
def test_an_unguarded_block_may_make_nondeterministic_calls(call: Callable[[], Any]) -> None:
    def exempted() -> None:
        with unguarded():
            result = call()
        if hasattr(result, "close"):
            result.close()

    played(workflow_that(exempted))


def test_project_code_called_by_a_library_is_guarded() -> None:
    """The standard library may read the clock, but not call back into project code that does."""
    with pytest.raises(NotDeterministic, match="time.time"):
        played(workflow_that(lambda: sorted([2, 1], key=lambda _: time.time())))


def test_libraries_may_make_nondeterministic_calls(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed_clock.py").write_text("import time\n\ndef tell():\n    return time.time()\n")
    monkeypatch.syspath_prepend(folder)
    installed_clock = importlib.import_module("installed_clock")
    played(workflow_that(installed_clock.tell))
    played(workflow_that(lambda: email.utils.formatdate()))  # calls `time.time` itself

    guards.watch_package_of("installed_clock")  # as if the installed package contained a workflow
    with pytest.raises(NotDeterministic, match="installed_clock.py, line 4"):
        played(workflow_that(installed_clock.tell))


@dataclass
class Stamped:
    at: float = field(default_factory=time.time)


def test_generated_code_is_guarded_like_its_module() -> None:
    with pytest.raises(NotDeterministic, match="time.time"):
        played(workflow_that(Stamped))


def test_a_caught_rejection_still_stops_the_workflow() -> None:
    def careless() -> None:
        try:
            time.time()
        except NotDeterministic:
            time.time()

    with pytest.raises(NotDeterministic, match="time.time"):
        played(workflow_that(careless))


async def _in_thread() -> None:
    await asyncio.to_thread(len, "")


async def _from_a_thread() -> None:
    asyncio.get_running_loop().call_soon_threadsafe(print)


async def _connects() -> None:
    await asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [(_in_thread, "has no threads"), (_from_a_thread, "from another thread"), (_connects, "has no create_connection")],
)
def test_a_caught_rejection_of_the_loop_stops_the_workflow(
    call: Callable[[], Coroutine[Any, Any, None]], message: str
) -> None:
    async def careless(ctx: WorkflowContext) -> str:
        try:
            await call()
        except Exception:  # noqa: BLE001
            return "saved"
        return "never"

    with pytest.raises(NotDeterministic, match=message):
        played(Orchestrator().workflow(careless))


def test_code_outside_of_workflows_is_not_guarded() -> None:
    seen: list[float] = []

    def watch_another_thread() -> None:
        with unguarded():
            thread = threading.Thread(target=lambda: seen.append(time.time()))
            thread.start()
            thread.join()

    played(workflow_that(watch_another_thread))
    assert seen
    assert sys.getprofile() is None
    assert time.time()


def test_operations_are_not_guarded() -> None:
    app = Orchestrator()

    @app.workflow(name="looks")
    async def looks(ctx: WorkflowContext) -> float:
        before: float = await ctx.run("clock", time.time)
        async with asyncio.timeout(5):
            await asyncio.sleep(1)
        return before

    assert played(looks) > 1_700_000_000
