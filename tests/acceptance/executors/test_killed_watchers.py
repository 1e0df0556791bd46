"""A watcher may be killed at any moment of the protocol: the work is begun once, and its end is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import fresh_stack
from tests.acceptance.executors.bureaus import BureauHarness
from tests.acceptance.executors.harness import Stage

_IMPATIENT = {"worker_ttl": 2.0, "heartbeat": 0.5, "lease": 2.0}


@pytest.fixture(scope="module")
def bureau(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BureauHarness]:
    """A remote side that can strike at whoever asks it."""
    harness = BureauHarness(tmp_path_factory.mktemp("bureau"))
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def scene(
    bureau: BureauHarness, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """A scheduler, for all moments."""
    folder: Path = tmp_path_factory.mktemp("stack")
    with fresh_stack(database_url, redis_url, folder, **_IMPATIENT) as stack:
        bureau.prepare(stack)
        yield Stage(stack, bureau)


@pytest.mark.parametrize("moment", ["before submit", "submit", "watch", "end"])
def test_a_watcher_may_die_at_any_moment(scene: Stage, bureau: BureauHarness, moment: str) -> None:
    first = scene.worker()
    bureau.crash[moment] = first.kill
    work, id = scene.enqueue("return", value=moment)
    first.wait(20)
    scene.worker()
    try:
        assert work.result(40) == moment
        assert bureau.started(id) == 1
        assert scene.failures(work) == 0
    finally:
        scene.leave()
