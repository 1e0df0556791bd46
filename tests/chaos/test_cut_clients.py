"""A client whose connection to Postgres breaks in the middle of a statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator import ResultTimeout, Unavailable, Uncertain
from tests.acceptance.conftest import fresh_stack, project
from tests.chaos import breakable
from tests.chaos.cutting import Cutting


@pytest.fixture
def cutting(database_url: str) -> Iterator[Cutting]:
    with breakable.folder() as folder, Cutting(database_url, folder) as cutting:
        yield cutting


def test_waiting_for_a_workflow_result_survives_a_broken_connection(
    cutting: Cutting, redis_url: str, tmp_path: Path
) -> None:
    with fresh_stack(cutting.url, redis_url, tmp_path):
        handle = project.steps.start(1)
        cutting.arm(b"r.stuck")
        with pytest.raises(ResultTimeout):
            handle.result(0.5)
        assert cutting.cuts == 1
        assert handle.status() == "running"


@pytest.mark.parametrize("start", [project.app.enqueue_many, project.app.start_many])
@pytest.mark.parametrize(
    ("at", "error", "stored"), [(b"COPY /* enqueue.copy */", Unavailable, 10), (b"COMMIT\0", Uncertain, 20)]
)
def test_a_bulk_enqueue_raises_uncertain_only_for_a_broken_commit(
    at: bytes,
    error: type[Exception],
    stored: int,
    start: Callable[..., object],
    cutting: Cutting,
    redis_url: str,
    tmp_path: Path,
) -> None:
    with fresh_stack(cutting.url, redis_url, tmp_path) as stack:
        start(project.add, [(1, 1)] * 10)
        cutting.arm(at)
        with pytest.raises(error, match="it is not known whether" if error is Uncertain else "Postgres cannot be used"):
            start(project.add, [(1, 1)] * 10)
        assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == stored
        start(project.add, [(1, 1)] * 10)
        assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == stored + 10
