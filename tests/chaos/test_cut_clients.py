"""A client whose connection to Postgres breaks in the middle of a statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator import ResultTimeout, Uncertain
from tests.acceptance.conftest import fresh_stack, project
from tests.chaos import breakable
from tests.chaos.cutting import Cutting


@pytest.fixture
def cutting(database_url: str) -> Iterator[Cutting]:
    with breakable.folder() as folder, Cutting(database_url, folder) as cutting:
        yield cutting


def test_who_waits_for_a_workflow_as_code_goes_on_waiting(cutting: Cutting, redis_url: str, tmp_path: Path) -> None:
    with fresh_stack(cutting.url, redis_url, tmp_path):
        handle = project.steps.start(1)
        cutting.arm(b"r.stuck")
        with pytest.raises(ResultTimeout):
            handle.result(0.5)
        assert cutting.cuts == 1
        assert handle.status() == "running"


@pytest.mark.parametrize("start", [project.app.enqueue_many, project.app.start_many])
def test_who_enqueues_many_is_told_that_nobody_knows(
    start: Callable[..., object], cutting: Cutting, redis_url: str, tmp_path: Path
) -> None:
    with fresh_stack(cutting.url, redis_url, tmp_path) as stack:
        start(project.add, [(1, 1)] * 10)
        cutting.arm(b"COPY /* enqueue.copy */")
        with pytest.raises(Uncertain, match="it is not known whether"):
            start(project.add, [(1, 1)] * 10)
        assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 10
        start(project.add, [(1, 1)] * 10)
        assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 20
