"""The checks of flows report all flaws at once, each with its node and line."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.domain.flow import edge_checks
from orchestrator.domain.flow.checks import KnownNames, check
from orchestrator.domain.problems import MAX_PROBLEMS, Problem
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.flow import reading
from orchestrator.sdk.flow.builder import FlowGraph

FLAWS = [
    ("{start: b, nodes: {a: {service: s}}}", "1: start names a node; there is no 'b'."),
    ("{nodes: {a: {service: s}}}", "start names a node; there is no None."),
    ("{start: a}", "a flow has nodes"),
    ("[1]", "a flow is a mapping"),
    ("start: a\nnodes:\n  a: {kind: exectuor}", "3: node 'a': there is no kind 'exectuor'. Did you mean 'executor'?"),
    ("start: a\nnodes:\n  a:\n    service: s\n    retries: 3", "5: node 'a': a node has no 'retries'."),
    ("start: a\nnodes:\n  a: {kind: executor}", "3: node 'a': it needs a service"),
    ("start: a\nnodes: {a: {service: s}}\nedges:\n- {from: a, to: c}", "4: edge 'default' from 'a' leads to 'c'"),
    ("start: a\nnodes: {a: {service: s}}\nedges:\n- {from: c, to: a}", "4: edge from 'c': there is no such node."),
    (
        "start: a\nnodes: {a: {service: s}}\nedges:\n- {from: a, to: ''}\n- {from: a, to: a}",
        "5: node 'a' has two edges for the action 'default'.",
    ),
    ("start: a\nnodes:\n  a: {service: s}\n  b: {service: s}", "4: node 'b' is never reached: no way leads to it"),
    (
        "start: a\nnodes:\n  a: {service: s}\n  b: {service: s}\nedges:\n- {from: a, to: b}\n- {from: b, to: a}",
        "3: node 'a' stands in a cycle that has no way out ('a', 'b')",
    ),
    (
        "start: a\nnodes:\n  a: {service: s, post: {action_static: go}}\n  b: {service: s}\nedges:\n"
        "- {from: a, action: stop, to: b}",
        "6: node 'a' never ends with the action 'stop': it ends with 'go'.",
    ),
    (
        "start: a\nnodes:\n  a: {service: s, post: {action_static: paid}}\n  b: {service: s}\nedges:\n"
        "- {from: a, action: payd, to: b}\n- {from: a, to: b}",
        "6: node 'a' never ends with the action 'payd': it ends with 'paid'.",
    ),
    ("start: a\nnodes:\n  a:\n    service: s\n    prep: {input_key: $parms.x}", "5: node 'a': Path '$parms.x' begins"),
    ("start: a\nnodes:\n  a:\n    service: s\n    post: {output_key: $params.x}", "'$params.x' cannot be written"),
    (
        "start: a\nnodes:\n  a:\n    service: s\n    post: {output_key: '[0].x'}",
        "5: node 'a': '[0].x' cannot be written",
    ),
    ("start: a\nnodes:\n  a:\n    service: s\n    post: {action_key: $shared.x}", "'$shared.x' cannot occur there"),
    (
        "start: a\nnodes:\n  a:\n    kind: choice\n    choice_cases:\n    - action: x\n      expr: {equals: [1, 2]}",
        "7: node 'a': case 0 (x): there is no operator 'equals'",
    ),
    ("start: a\nnodes:\n  a: {kind: timer}", "a timer needs params.delay_ms"),
    ("start: a\nnodes:\n  a: {kind: timer, params: {delay_ms: soon}}", "is a number of milliseconds; found 'soon'"),
    ("start: a\nnodes:\n  a: {kind: timer, params: {delay_ms: 1000000000000000000}}", "params.delay_ms is at most"),
    (
        "start: a\nnodes:\n  a: {kind: approval, params: {timeout_ms: 1000000000000000000}}",
        "params.timeout_ms is at most",
    ),
    ("start: a\nnodes:\n  a: {service: s, timeout_ms: 1000000000000000000}", "'a': timeout_ms is at most"),
    (
        "start: a\nnodes:\n  a:\n    exec_type: local_script\n    script: {cmd: ls, timeout_ms: 1000000000000000000}",
        "5: node 'a': timeout_ms is from 0 to",
    ),
    ("start: a\nnodes:\n  a: {kind: wait_event}", "a wait_event needs params.signal_key"),
    ("start: a\nnodes:\n  a: {kind: foreach, service: s}", "a foreach needs prep.input_key"),
    ("start: a\nnodes:\n  a: {kind: subflow}", "a subflow needs `subflow`"),
    ("start: a\nnodes:\n  a: {kind: subflow, subflow: gone}", "flow 'gone' was not found"),
    (
        "start: a\nnodes:\n  a:\n    kind: subflow\n    subflow:\n      start: x\n      nodes:\n        x: {kind: no}",
        "8: node 'a': node 'x': there is no kind 'no'",
    ),
    ("start: a\nnodes:\n  a: {exec_type: local_func, func: shp}", "there is no task 'shp'. Did you mean 'ship'?"),
    ("start: a\nnodes:\n  a: {exec_type: local_script}", "needs `script` with a cmd"),
    ("start: a\nnodes:\n  a: {service: s, max_retries: many}", "max_retries: expected int, got str; found 'many'"),
    ("start: a\nnodes:\n  a: {service: s, max_retries: -1}", "max_retries is not negative; found -1"),
    (
        "start: a\nnodes:\n  a: {service: s, parallel_mode: both}",
        "parallel_mode is sequential or concurrent; found 'both'",
    ),
    ("start: a\nnodes:\n  a: {service: shop}", "3: node 'a': there is no service 'shop'."),
    ("start: a\nnodes:\n  a: {func: ship}", "3: node 'a': func 'ship' is a task of the application: add exec_type:"),
    (
        "start: a\nnodes:\n  a:\n    kind: foreach\n    func: ship\n    prep: {input_key: list}",
        "5: node 'a': func 'ship' is a task of the application: add exec_type: local_func",
    ),
    ("start: a\nnodes:\n  a: {exec_type: queue, service: shop}", "3: node 'a': there is no service 'shop'."),
    ("start: a\nnodes:\n  a: {exec_type: quue, service: s}", "3: node 'a': there is no executor 'quue'. Did you mean"),
    (
        "start: a\nnodes:\n  a:\n    kind: parallel\n    parallel_services:\n    - s\n    - shop",
        "7: node 'a': there is no service 'shop'.",
    ),
    (
        "start: a\nnodes:\n  a:\n    kind: parallel\n    parallel_execs:\n    - {service: s}\n    - {service: shop}",
        "7: node 'a': there is no service 'shop'.",
    ),
    (
        "start: a\nnodes:\n  a:\n    kind: parallel\n    parallel_execs:\n    - {servce: s}",
        "6: node 'a': parallel_execs has no 'servce'. Did you mean 'service'?",
    ),
    (
        "start: a\nnodes:\n  a:\n    kind: foreach\n    service: s\n    prep: {input_key: list}\n    foreach_execs:\n"
        "    - {index: 1, exec_type: local_func, func: shp}",
        "8: node 'a': there is no task 'shp'. Did you mean 'ship'?",
    ),
    (
        "start: a\nnodes:\n  a:\n    kind: subflow\n    subflow: {start: x, nodes: {x: {service: s}}}\n"
        "    subflow_execs:\n    - {node: x, service: shop}",
        "7: node 'a': there is no service 'shop'.",
    ),
    (
        "start: a\nnodes:\n  a:\n    kind: subflow\n    subflow: {start: x, nodes: {x: {service: s}}}\n"
        "    subflow_execs:\n    - {node: y, service: s}",
        "7: node 'a': its subflow has no node 'y'.",
    ),
    (
        "start: a\nnodes:\n  a:\n    service: s\n    prep: {input_map: {x: $shared..y}}",
        "5: node 'a': Path '$shared..y'",
    ),
    (
        "start: a\nnodes:\n  a:\n    service: s\n    post:\n      output_map:\n        x: $shared.y",
        "7: node 'a': '$shared.y' cannot occur there",
    ),
    (
        "start: a\nnodes:\n  a:\n    kind: subflow\n    subflow:\n      start: x\n      nodes:\n"
        "        x: {service: s}\n      edges:\n      - {from: x, to: q}",
        "10: node 'a': edge 'default' from 'x' leads to 'q'",
    ),
    (
        "start: a\nnodes:\n  a:\n    kind: choice\n    choice_cases:\n    - {action: x, expr: {gt: [1, 2]}}\n"
        "    - {action: y, expr: {gt: [1, 2]}}",
        "7: node 'a': case 1 (y) is never reached",
    ),
    (
        f"start: {'k' * 129}\nnodes:\n  {'k' * 129}: {{service: s}}",
        "kkkk…: its key must be a string of 1 to 128 characters without `/`.",
    ),
]


KNOWN = KnownNames(functions={"ship"}, services={"s"}, executors={"http", "local_func", "local_script", "queue"})


def test_a_service_may_have_the_name_of_a_task() -> None:
    for executor in ("service: ship", "func: ship, exec_type: http"):
        known = KNOWN._replace(services=None)
        assert reading.loads(f"start: a\nnodes:\n  a: {{{executor}}}", "f.yaml", known).nodes


@pytest.mark.parametrize(("text", "words"), FLAWS, ids=[words for _, words in FLAWS])
def test_each_flaw_names_its_node_and_line(text: str, words: str) -> None:
    with pytest.raises(InvalidWorkflow) as caught:
        reading.loads(text, "f.yaml", KNOWN, lambda *_: None)
    (told,) = str(caught.value).splitlines()
    assert words in told, "one mistake is told once"
    assert re.match(r"f\.yaml:\d+: ", told)


@pytest.mark.parametrize(("levels", "fits"), [(15, True), (16, False)])
def test_nested_subflow_keys_are_limited_in_total_length(levels: int, fits: bool) -> None:
    key = "é" * 64
    flow: dict[str, Any] = {"start": key, "nodes": {key: {"kind": "approval"}}}
    for _ in range(levels - 1):
        flow = {"start": key, "nodes": {key: {"kind": "subflow", "subflow": flow}}}
    if fits:
        assert reading.from_data(flow).start == key
    else:
        with pytest.raises(InvalidWorkflow, match="have 2,063 bytes together; at most 2,000 are allowed"):
            reading.from_data(flow)


def test_an_untaken_edge_is_allowed_if_other_edges_lead_to_its_node() -> None:
    text = (
        "start: a\nnodes:\n  a: {service: s, post: {action_static: go}}\n  b: {service: s}\nedges:\n"
        "- {from: a, action: go, to: b}\n- {from: a, action: stop, to: b}\n- {from: b, action: retry, to: a}"
    )
    assert len(reading.loads(text).edges) == 3


def test_subflows_are_assumed_to_exist_without_a_lookup() -> None:
    text = "start: a\nnodes: {a: {kind: subflow, subflow: {flow: gone, version: 3}}}"
    found = reading.loads(text).nodes["a"].subflow
    assert found is not None
    assert (found.flow, found.version) == ("gone", 3)


def test_all_flaws_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "flow.yaml"
    file.write_text("start: a\nnodes:\n  a: {kind: timer}\n  b: {kind: nothing}\n")
    with pytest.raises(InvalidWorkflow) as caught:
        reading.load(file)
    assert [line.split(": ")[0].rpartition(":")[2] for line in str(caught.value).splitlines()] == ["3", "4", "4"]


def test_only_the_first_of_very_many_flaws_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each missing node is compared with a thousand names: a file of ten thousand took minutes."""
    looked: list[str] = []

    def looking(name: str, _: object) -> str:
        looked.append(name)
        return ""

    monkeypatch.setattr(edge_checks, "did_you_mean", looking)
    edges = [{"from": "a", "action": f"x{number}", "to": f"n{number}"} for number in range(5_000)]
    plain = {"start": "a", "nodes": {"a": {"kind": "approval"}}, "edges": edges}
    found = check(plain)
    assert found[0].message.startswith("edge 'x0' from 'a' leads to 'n0': there is no such node.")
    assert found[MAX_PROBLEMS:] == [Problem((), f"there is more that is wrong: these are the first {MAX_PROBLEMS}.")]
    assert len(looked) <= MAX_PROBLEMS + 1
    with pytest.raises(InvalidWorkflow, match=r"… and 51 more\.$"):
        reading.from_data(plain)


@pytest.mark.parametrize("name", ["case{}", "other{}"], ids=["each taken", "none taken"])
def test_edges_of_a_choice_are_checked_in_linear_time(name: str) -> None:
    many = range(4_000)
    cases = [{"action": f"case{number}", "expr": {"eq": ["$shared.x", number]}} for number in many]
    edges = [{"from": "a", "action": name.format(number), "to": "b"} for number in many]
    nodes: dict[str, Any] = {"a": {"kind": "choice", "choice_cases": cases}, "b": {"service": "s"}}
    began = time.process_time()
    found = check({"start": "a", "nodes": nodes, "edges": [*edges, {"from": "a", "to": "b"}]})
    assert time.process_time() - began < 2
    assert found == []


def test_empty_fields_equal_omitted_fields() -> None:
    text = (
        '{"start": "a", "nodes": {"a": {"kind": "executor", "service": "s", "func": "", "script": null, "prep": {}}}}'
    )
    bare = reading.loads('{"start": "a", "nodes": {"a": {"service": "s"}}}')
    assert reading.loads(text) == bare


def test_the_builder_gives_the_same_flow_as_a_file() -> None:
    graph = FlowGraph("price")
    graph.executor("price", run="price", input="$params.items", output="total", to="large")
    graph.choice("large", cases={"ask": {"gt": ["$shared.total", 1000]}}, to={"ask": "ask", "default": "ship"})
    graph.approval("ask", timeout=60, to={"approved": "ship"})
    graph.executor("ship", run="ship", input={"amount": "$shared.total"})
    text = """
    start: price
    nodes:
      price: {service: price, prep: {input_key: $params.items}, post: {output_key: total}}
      large: {kind: choice, choice_cases: [{action: ask, expr: {gt: [$shared.total, 1000]}}]}
      ask: {kind: approval, params: {timeout_ms: 60000}}
      ship: {service: ship, prep: {input_map: {amount: $shared.total}}}
    edges:
    - {from: price, to: large}
    - {from: large, action: ask, to: ask}
    - {from: large, to: ship}
    - {from: ask, action: approved, to: ship}
    """
    assert graph.definition() == reading.loads(text)
    with pytest.raises(InvalidWorkflow, match="two nodes 'ask'"):
        graph.timer("ask", seconds=1)
