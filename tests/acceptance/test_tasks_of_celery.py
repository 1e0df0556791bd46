"""What Celery's own integration tests ask of tasks, canvas and inspection, asked of `orchestrator.compat.celery`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.compat.celery import chord, group
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import HERE, Stack, using

PROGRAMS = HERE / "celery_programs"
sys.path.insert(0, str(PROGRAMS))

import canvas_tasks as tasks  # noqa: E402  # as the workers see it: a top-level module
from canvas_tasks import add, tsum  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def running(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with fresh_stack(database_url, redis_url, folder) as stack, using(tasks.app.orchestrator, stack):
        stack.scheduler()
        stack.worker("--app", "canvas_tasks:app", processes=2, folder=PROGRAMS)
        yield stack


def get(result: Any) -> Any:
    return result.get(timeout=30)


def test_a_call_its_result_and_its_state() -> None:
    result = add.delay(1, 2)
    assert get(result) == 3
    assert (result.state, result.result, result.ready(), result.successful()) == ("SUCCESS", 3, True, True)


def test_chains_groups_and_chords() -> None:
    assert get((add.s(1, 2) | add.s(3)).delay()) == 6
    results = group(add.s(i, i) for i in range(3)).delay()
    assert get(results) == [0, 2, 4]
    assert [get(one) for one in results] == [0, 2, 4]
    result = chord([add.s(1, 1), add.s(2, 2)])(tsum.s())
    assert get(result) == 6
    assert get(result.parent) == [2, 4]
    assert get(add.starmap([(1, 2), (3, 4)]).delay()) == [3, 7]
    assert get(add.chunks([(1, 2), (3, 4), (5, 6)], 2).delay()) == [[3, 7], [11]]


def test_an_exception_keeps_its_class_and_arguments() -> None:
    with pytest.raises(tasks.ExpectedException) as raised:
        get(tasks.fail.delay(5))
    assert raised.value.args == ("Task expected to fail", 5)
