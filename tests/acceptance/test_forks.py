"""A process that has used the application forks, as gunicorn --preload, uWSGI and multiprocessing do."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import project
import pytest

from orchestrator import as_completed
from tests.acceptance.stack import Stack

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
_TIMEOUT = 60.0


def _forked(work: Callable[[], None]) -> int:
    """Call `work` in a fork; return the child's process id. It exits with 0 if nothing was raised."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  # the parent checks the exit code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _ends_well(child: int) -> bool:
    """Return whether a forked child exits with 0. A child that hangs is killed."""
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


@contextmanager
def _load(threads: int) -> Iterator[list[BaseException]]:
    """Enqueue and wait in threads within the block, so that forks happen while locks are held."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            while not stop.is_set():
                assert project.add.enqueue(number, 1).result(_TIMEOUT) == number + 1
        except BaseException as error:  # noqa: BLE001  # the test checks it
            errors.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield errors
    finally:
        stop.set()
        for thread in running:
            thread.join(_TIMEOUT)


def test_forks_under_load_open_their_own_connections(running: Stack) -> None:
    def work() -> None:
        for number in range(3):
            assert project.add.enqueue(number, os.getpid()).result(60) == number + os.getpid()
            assert asyncio.run(_add_async(number)) == number + 1
            many = project.app.enqueue_many(project.add, [(1, number)])
            assert [handle.result(60) for handle in many] == [1 + number]

    with _load(4) as errors:
        children = []
        assert asyncio.run(_add_async(1)) == 2
        for _ in range(12):
            assert project.add.enqueue(1, 1).result(60) == 2
            children.append(_forked(work))
        assert [_ends_well(child) for child in children] == [True] * len(children)
        assert project.add.enqueue(1, 1).result(60) == 2
    assert errors == []


async def _add_async(number: int) -> int:
    return await (await project.add.aenqueue(number, 1)).aresult(60)


def _add(number: int) -> int:
    return project.add.enqueue(number, 1).result(60)


def test_a_pool_of_forked_processes_enqueues_and_waits(running: Stack) -> None:
    assert _add(0) == 1
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map_async(_add, range(9), chunksize=1).get(_TIMEOUT) == list(range(1, 10))
        pool.close()
        pool.join()
    assert _add(1) == 2


def test_a_wait_continues_in_both_processes_after_a_fork(running: Stack) -> None:
    handles = [project.add.enqueue(number, 0) for number in range(3)]
    waiting = as_completed(handles, timeout=60)
    next(waiting)
    late = project.add.enqueue(7, 0)

    def work() -> None:
        assert len(list(waiting)) == 2
        assert late.result(60) == 7

    child = _forked(work)
    assert len(list(waiting)) == 2
    assert late.result(60) == 7
    assert _ends_well(child)


def test_a_fork_that_closes_the_application_does_not_affect_its_parent(running: Stack) -> None:
    assert _add(1) == 2
    waiting = as_completed([project.add.enqueue(1, 1)], timeout=60)

    def work() -> None:
        nonlocal waiting
        del waiting
        project.app.close()
        assert _add(1) == 2

    for _ in range(3):
        assert _ends_well(_forked(work))
        assert _add(1) == 2
    assert len(list(waiting)) == 1
