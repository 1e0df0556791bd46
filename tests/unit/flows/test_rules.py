"""What follows a failed node, which parameters a flow has, and how other schedulers would run it differently."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.domain.flow import commands
from orchestrator.domain.flow.definition import Flow, Rule, from_plain
from orchestrator.domain.flow.graph import parameters
from orchestrator.domain.flow.rules import differences, named_versions, with_rules
from tests.unit.flows.driver import Driver


def shop(*edges: tuple[str, str, str], **said: Any) -> dict[str, Any]:
    """Return a flow that charges, and then ships."""
    nodes = {"charge": {"service": "bad", **said}, "ship": {"service": "ship"}, "sorry": {"service": "sorry"}}
    kept = {key: nodes[key] for key in ("charge", *dict.fromkeys(to for _, _, to in edges if to))}
    return {
        "start": "charge",
        "nodes": kept,
        "edges": [{"from": source, "action": action, "to": to} for source, action, to in edges],
    }


def visited(plain: dict[str, Any] | Flow, rule: Rule) -> tuple[list[str], bool]:
    """Return the path of a run whose charge is declined, and whether the run succeeds."""

    def serve(name: str, _given: Any, _params: Any) -> Any:
        if name == "bad":
            raise ValueError("declined")
        return name

    driver = Driver(plain if isinstance(plain, Flow) else from_plain(plain), {}, serve, rule)
    driver.run(0)
    assert driver.end is not None
    return [visit.path for visit in driver.visits], driver.end == commands.End(None)


SHIPS = ("charge", "default", "ship")


@pytest.mark.parametrize(
    ("rule", "plain", "path", "succeeds"),
    [
        ("default", shop(SHIPS), ["charge", "ship"], True),
        ("fail", shop(SHIPS), ["charge"], False),
        ("fail", shop(SHIPS, on_error="continue"), ["charge", "ship"], True),
        ("fail", shop(on_error="continue"), ["charge"], True),
        ("fail", shop(SHIPS, ("charge", "error", "sorry")), ["charge", "sorry"], True),
        ("fail", shop(SHIPS, ("charge", "error", "sorry"), on_error="fail"), ["charge", "sorry"], True),
        ("default", shop(SHIPS, on_error="fail"), ["charge"], False),
        ("default", shop(), ["charge"], False),
    ],
)
def test_a_failed_node_follows_its_rule_and_edges(
    rule: Rule, plain: dict[str, Any], path: list[str], succeeds: bool
) -> None:
    assert visited(plain, rule) == (path, succeeds)


@pytest.mark.parametrize("own", ["default", "fail"])
@pytest.mark.parametrize("rule", ["default", "fail"])
def test_a_subflow_keeps_the_failure_rule_of_its_version(own: Rule, rule: Rule) -> None:
    deep = {"kind": "subflow", "subflow": {**shop(SHIPS), "flow": "deep", "version": 7}, "on_error": "continue"}
    inner = {**shop(SHIPS), "flow": "shop", "version": 3}
    inner["nodes"]["ship"] = deep
    flow = from_plain({"start": "a", "nodes": {"a": {"kind": "subflow", "subflow": inner}}})
    assert named_versions(flow) == {("shop", 3)}
    taken = with_rules(flow, {("shop", 3): own}, rule)
    alone = from_plain({"start": "a", "nodes": {"a": {"kind": "subflow", "subflow": inner}}})
    assert visited(taken, rule) == visited(alone, own)
    assert with_rules(taken, {("shop", 3): own}, rule) == taken


def local(name: str, **fields: Any) -> dict[str, Any]:
    return {"exec_type": "local_func", "func": name, **fields}


TAKES = {"price": ("input", "items"), "any": ("params",), "ship": ("amount", "input")}


@pytest.mark.parametrize(
    ("node", "names"),
    [
        (local("price"), {"input", "items"}),
        (local("ship", prep={"input_map": {"amount": "$params.cost.total"}}), {"amount", "input", "cost"}),
        (local("ship", prep={"input_key": "$input.all"}), {"amount", "input", "all"}),
        ({"kind": "choice", "choice_cases": [{"action": "a", "expr": {"eq": ["$params.x[0]", 1]}}]}, {"x"}),
        ({"kind": "timer", "params": {"delay_ms": "$params.pause"}}, {"pause"}),
        ({"kind": "subflow", "subflow": {"start": "b", "nodes": {"b": local("price")}}}, {"input", "items"}),
        ({"kind": "parallel", "parallel_execs": [local("price"), local("ship")]}, {"input", "items", "amount"}),
        ({"kind": "choice", "prep": {"input_key": "$params"}, "default_action": "a"}, None),
        ({"kind": "choice", "prep": {"input_key": "$input"}, "default_action": "a"}, None),
        ({"service": "price"}, None),
        (local("any"), None),
        (local("unknown"), None),
        ({"kind": "parallel"}, None),
    ],
)
def test_the_parameters_of_a_flow_are_derived_from_its_nodes(node: dict[str, Any], names: set[str] | None) -> None:
    flow = from_plain({"start": "a", "nodes": {"a": node}, "takes": TAKES})
    assert parameters(flow) == names


def test_differences_from_other_schedulers_are_named() -> None:
    assert differences(from_plain(shop())) == []
    flow = from_plain({**shop(SHIPS, ("ship", "error", ""), queue="slow"), "max_steps": 9})
    failing, edges, keys = differences(flow)
    assert "if node 'charge' fails, the run fails;" in failing
    assert "node 'ship' has an error or timeout edge" in edges
    assert keys.startswith("max_steps, queue:")
    assert len(differences(from_plain(shop(SHIPS, on_error="fail")))) == 1
