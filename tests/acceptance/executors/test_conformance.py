"""The conformance suite for executors, run over every executor of the package."""

from __future__ import annotations

import pytest

from orchestrator.testing.executors import ExecutorConformance, Stage

_LONG = (
    ExecutorConformance.test_a_remote_side_that_is_away_for_minutes_is_asked_again_until_it_is_back,
    ExecutorConformance.test_time_runs_while_the_remote_side_is_away,
)
for _test in _LONG:
    pytest.mark.long(_test)


@pytest.mark.long_for("bureau", "cloud_run", "dask", "kubernetes", "pull", "ray", "rq")  # these have tests of their own
class TestConformance(ExecutorConformance):
    """The executors of `HARNESSES`."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared_stage(cls, module_stage: Stage) -> Stage:
        return module_stage
