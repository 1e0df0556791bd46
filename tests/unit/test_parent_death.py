"""What a process died of, in words."""

from __future__ import annotations

import pytest

from orchestrator.workers.parent.processes import describe_exit


@pytest.mark.parametrize(
    ("code", "said"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal 9 (SIGKILL)"), (-40, "signal 40")]
)
def test_an_exit_code_or_a_signal_with_or_without_a_name(code: int, said: str) -> None:
    assert describe_exit(code) == said
