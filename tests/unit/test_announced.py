"""What workers say that they know, beside tasks and workflows."""

from __future__ import annotations

from orchestrator.domain.executors.call import announced
from orchestrator.domain.fleet.announced import WITH_DATABASE, count_known, tasks_among, workflows_among
from orchestrator.sealing import key_name

MEANS = [WITH_DATABASE, "*:*", announced("process"), announced("k8s/*"), key_name("old"), "orchestrator.webhook"]


def test_means_are_no_tasks() -> None:
    names = ["trip@2", "trip", "b.resize", *MEANS, "a.mail:send", "trip@11", "--data"]
    assert tasks_among(names) == ["--data", "a.mail:send", "b.resize"]
    assert workflows_among(names) == ["trip"]
    assert count_known(names) == 4
    assert (tasks_among(MEANS), workflows_among(MEANS), count_known(MEANS)) == ([], [], 0)
