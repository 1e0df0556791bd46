"""The names that workers announce besides tasks and workflows."""

from __future__ import annotations

from orchestrator.domain.executors.record import announced
from orchestrator.domain.fleet.announced import (
    WITH_DATABASE,
    count_known,
    redacted_among,
    redacting,
    signals_among,
    taking,
    tasks_among,
    with_redaction,
    workflows_among,
)
from orchestrator.domain.tasks.task import NewTask, differing_options, parse_options
from orchestrator.sealing import key_name

MEANS = [WITH_DATABASE, "*:*", announced("process"), announced("k8s/*"), key_name("old"), "orchestrator.webhook"]
MEANS += [redacting("b.resize", ("card.*", "@1")), taking("trip", ["book"])]


def test_other_announced_names_are_not_counted_as_tasks() -> None:
    names = ["trip@2", "trip", "b.resize", *MEANS, "a.mail:send", "trip@11", "--data"]
    assert tasks_among(names) == ["--data", "a.mail:send", "b.resize"]
    assert workflows_among(names) == ["trip"]
    assert count_known(names) == 4
    assert (tasks_among(MEANS), workflows_among(MEANS), count_known(MEANS)) == ([], [], 0)


def test_redacted_arguments_are_announced_and_read_back() -> None:
    names = [redacting("a", ("card.*", "@1", "x,y z")), redacting("a", ("token",)), redacting("b", ("pin",)), "a", "b"]
    assert not any("*" in name for name in names)
    assert redacted_among(names) == {"a": ("card.*", "@1", "x,y z", "token"), "b": ("pin",)}


def test_an_announced_redaction_does_not_make_a_call_different() -> None:
    def differences(stored: str | None, again: str | None) -> list[str]:
        task = NewTask(id=b"", name="a", queue="q", payload=b"", options=again)
        return [*differing_options(task, "q", 0, stored, None)]

    asked = '{"redact":["token"]}'
    known, both = with_redaction(None, ["token"]), with_redaction(asked, ["token", "pin"])
    assert (parse_options(known).redact, parse_options(both).redact) == (("token",), ("token", "pin"))
    assert with_redaction(asked, ["token"]) == asked
    assert with_redaction(None, ()) is None
    assert differences(known, None) == differences(None, known) == differences(both, asked) == []
    assert differences(known, asked) == differences(both, None) == ["another redact"]


def test_a_workflow_takes_the_signals_that_any_worker_announces() -> None:
    old, new, none = [taking("trip", ["book"])], [taking("trip", ["book", "pay"])], [taking("trip", [])]
    assert signals_among([old, new]) == {"book", "pay"}
    assert signals_among([none]) == frozenset()
    assert signals_among([old, []]) is None, "one does not say"
    assert signals_among([]) is None
