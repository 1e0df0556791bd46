"""`orchestrator flows`, over the database and over an API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli import main
from tests.integration.serving import Way, both_ways  # noqa: F401

FLOW = """
start: ask
nodes:
  ask: {kind: approval, params: {approval_key: $shared.ok}}
  inner: {kind: subflow, subflow: {start: wait, nodes: {wait: {kind: wait_event, params: {signal_key: flag}}}}}
edges:
- {from: ask, action: approved, to: inner}
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["flows", *words])


def output_of(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_flow_is_checked_published_drawn_started_and_decided(in_empty_folder: Path, way: Way) -> None:
    name = f"order-{way}"
    (in_empty_folder / "order.yaml").write_text(FLOW)
    (in_empty_folder / "wrong.yaml").write_text(FLOW.replace("to: inner", "to: iner"))
    assert "order.yaml: 2 nodes, valid" in output_of("validate", "order.yaml")
    wrong = run("validate", "wrong.yaml")
    assert wrong.exit_code == 1
    assert "wrong.yaml:7: edge 'approved' from 'ask' leads to 'iner'" in wrong.output
    assert output_of("publish", "order.yaml", "--name", name) == f"{name}: version 1 (new)\n"
    assert output_of("publish", "order.yaml", "--name", name) == f"{name}: version 1 (unchanged)\n"
    assert name in output_of("list")
    assert "└─ approved ─▶ inner" in output_of("show", name)
    identifier = output_of("start", name, "val=2", "--key", "k").strip()
    assert output_of("start", name, "val=2", "--key", "k").strip() == identifier
    shown = json.loads(output_of("show", identifier, "--json"))
    assert (shown["run"]["params"], shown["run"]["status"]) == ({"val": 2}, "pending")
    assert "is approved" in output_of("approve", identifier, "--node", "ask", "--why", "because")
    assert "Sent 'flag' to run" in output_of("signal", identifier, "flag")
    assert identifier in output_of("runs", name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("start", "ordr"), "There is no flow 'ordr'"),
        (("show", "nothing"), "No run has the id 'nothing'"),
        (("start", "order", "val"), "Expected KEY=VALUE, found 'val'"),
    ],
)
def test_invalid_flow_commands_give_an_error_message(in_empty_folder: Path, words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert result.exit_code != 0
    assert said in result.output + str(result.exception or "")
    assert in_empty_folder.exists()
