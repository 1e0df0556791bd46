"""The cause of a process's death, in words."""

from __future__ import annotations

import pytest

from orchestrator.workers.parent.processes import describe_exit


@pytest.mark.parametrize(
    ("code", "said"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal 9 (SIGKILL)"), (-40, "signal 40")]
)
def test_exit_codes_and_signals_are_described(code: int, said: str) -> None:
    assert describe_exit(code) == said
