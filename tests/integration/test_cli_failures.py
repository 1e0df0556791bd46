"""`orchestrator failures`: groups by task and error, acknowledged, snoozed and reopened, also over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli import main
from tests.integration.serving import both_ways  # noqa: F401
from tests.integration.stage import System


@pytest.fixture
def run(system: System, in_empty_folder: Path) -> Callable[..., Result]:
    for name, queue, kind, count in (
        ("shop.send", "mail", "smtp.Refused", 2),
        ("shop.send", "bulk", "smtp.Refused", 1),
        ("shop.pay", "mail", "ValueError", 1),
    ):
        system.sql(
            "INSERT INTO orchestrator.ended_tasks (id, name, queue, priority, seq, attempt, status, error, failures,"
            " losses, payload, created_at, ended_at) SELECT gen_random_uuid(), :name, :queue, 0, 1, 1, 'failed',"
            " CAST(:error AS jsonb), 1, 0, '', now(), now() - interval '1 hour' FROM generate_series(1, :count)",
            name=name,
            queue=queue,
            error=json.dumps({"kind": kind, "message": "no\nmore", "traceback": ""}),
            count=count,
        )
    return lambda *words: CliRunner().invoke(main, ["failures", *words])


def lines(found: Result) -> list[str]:
    assert found.exit_code == 0, found.output
    return found.output.splitlines()


def test_failure_groups_are_listed_acknowledged_snoozed_and_reopened(run: Callable[..., Result]) -> None:
    header, first, *others = lines(run())
    assert header.split() == ["task", "error", "queue", "tasks", "first", "last", "state", "release"]
    assert first.split()[:5] == ["shop.send", "smtp.Refused:", "no", "mail", "2"]
    assert len(others) == 2
    assert lines(run("list")) == [header, first, *others]
    assert lines(run("--since", "1m")) == ["Nothing has failed in this time."] == lines(run("list", "--since", "1m"))
    assert len(lines(run("ack", "shop.send", "Refused"))) == 2, "in both queues"
    assert lines(run("snooze", "shop.pay", "ValueError", "--for", "8h"))[0].startswith(
        "Failures of shop.pay with ValueError#7fa3b7 in queue mail: snoozed until "
    )
    shown = json.loads(run("--json").output)["groups"]
    acts = {(group["name"], group["queue"]): group["handled"]["act"] for group in shown}
    assert acts == {
        ("shop.send", "mail"): "acknowledge",
        ("shop.send", "bulk"): "acknowledge",
        ("shop.pay", "mail"): "snooze",
    }
    assert sum(" acknowledged by " in line for line in lines(run())) == 2
    assert lines(run("reopen", "shop.send", "smtp.Refused", "--queue", "bulk")) == [
        "Failures of shop.send with smtp.Refused#7fa3b7 in queue bulk: reopened."
    ]
    assert sum(" acknowledged by " in line for line in lines(run())) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ack", "shop.sent", "Refused"), "No task 'shop.sent' has failed with 'Refused' since "),
        (("ack", "shop.sent", "Refused"), "Did you mean 'shop.send'?"),
        (("ack", "shop.pay", "ValueErorr"), "Did you mean 'ValueError'?"),
        (("ack", "shop.pay", "ValueError", "--queue", "bulk"), "No task 'shop.pay' has failed"),
        (("snooze", "shop.pay", "ValueError", "--for", "soon"), "'soon' is not a duration"),
    ],
)
def test_unknown_groups_and_invalid_durations_are_rejected(
    run: Callable[..., Result], words: tuple[str, ...], said: str
) -> None:
    found = run(*words)
    assert found.exit_code != 0
    assert said in found.output
