"""The flow planner compared with a naive interpreter, and each of its rules."""

from __future__ import annotations

import random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.flow import checks, commands
from orchestrator.domain.flow.definition import Flow, Rule, from_plain
from tests.fuzzing import examples
from tests.unit.flows.driver import Driver
from tests.unit.flows.interpreter import Failed, Interpreter
from tests.unit.flows.made import PARAMS, SIGNALS, comparable, make_flow, service

MOST = 60


@st.composite
def flows(draw: st.DrawFn) -> dict[str, Any]:
    """Return random flows."""
    flow = make_flow(lambda options: draw(st.sampled_from(options)), max_steps=MOST)
    for node in flow["nodes"].values():
        node["on_error"] = draw(st.sampled_from((None, None, "fail", "continue")))
    return flow


@examples(120)
@given(flows(), st.integers(0, 1_000), st.sampled_from(get_args(Rule)))
@pytest.mark.slow
def test_the_planner_agrees_with_the_interpreter(plain: dict[str, Any], seed: int, rule: Rule) -> None:
    flow = from_plain(plain)
    naive = Interpreter(service, MOST, rule)
    expected: dict[str, Any] | None
    try:
        expected = naive.run(flow, PARAMS, PARAMS)
    except Failed:
        expected = None
    driver = Driver(flow, PARAMS, service, rule)
    driver.signals = SIGNALS
    state = driver.run(seed)
    assert driver.end is not None
    assert (driver.end.error is None) == (expected is not None)
    assert not driver.calls
    assert not driver.timers
    seen = [(visit.path, visit.status) for visit in driver.visits]
    assert seen[: len(naive.visited)] == naive.visited
    assert [visit.number for visit in driver.visits] == list(range(1, len(seen) + 1))
    if expected is not None:
        assert comparable(state.shared) == comparable(expected)


def flow_of(nodes: dict[str, Any], edges: list[tuple[str, str, str]] = [], **more: Any) -> Flow:  # noqa: B006
    plain = {"start": next(iter(nodes)), "nodes": nodes, **more}
    plain["edges"] = [{"from": source, "action": action, "to": to} for source, action, to in edges]
    assert checks.check(plain) == []
    return from_plain(plain)


def echo(name: str, value: Any, params: dict[str, Any]) -> Any:
    if name == "bad":
        raise ValueError("no")
    return value


@pytest.mark.slow
def test_a_loop_of_ten_thousand_steps_keeps_its_state_small() -> None:
    count = {"kind": "executor", "service": "count", "prep": {"input_key": "n"}, "post": {"output_key": "n"}}
    more = {"kind": "choice", "choice_cases": [{"action": "on", "expr": {"lt": ["$shared.n", 5_000]}}]}
    flow = flow_of({"count": count, "more": more}, [("count", "default", "more"), ("more", "on", "count")])
    driver = Driver(flow, {}, lambda _, value, __: (value or 0) + 1)
    state = driver.run()
    assert (state.shared, state.steps) == ({"n": 5_000}, 10_000)
    assert driver.largest < 300


def test_a_loop_that_never_waits_yields_to_other_runs() -> None:
    spin = {"kind": "choice", "choice_cases": [{"action": "on", "expr": {"ne": ["$params.stop", True]}}]}
    driver = Driver(flow_of({"spin": spin}, [("spin", "on", "spin")], max_steps=1_000), {}, echo)
    driver.tell(commands.Begun())
    assert driver.end is None
    assert driver.state.steps == 100
    assert list(driver.timers.values()) == [1_000.0]


@pytest.mark.parametrize(
    ("value", "action"),
    [
        (True, "approved"),
        (False, "rejected"),
        ("approved", "approved"),
        ("Yes", "approved"),
        ("no", "rejected"),
        ("later", "later"),
        ({"approved": False}, "rejected"),
        (0, "rejected"),
    ],
)
def test_a_decision_becomes_the_action_of_its_approval(value: Any, action: str) -> None:
    for post in ({}, {"action_key": "approval"}):
        node = {"kind": "approval", "params": {"approval_key": "$shared.ok"}, "post": post}
        driver = Driver(flow_of({"ask": node}), {}, echo)
        driver.run()
        driver.tell(commands.Signalled("ok", value, "ann", "because"))
        assert driver.visits[-1].action == action
        assert driver.visits[-1].output == {"approval": value, "by": "ann", "at": 1_000.0, "why": "because"}


def test_a_result_that_cannot_be_written_fails_only_its_node() -> None:
    v = {"service": "echo", "prep": {"input_key": "$params.val"}, "post": {"output_key": "v"}}
    inner = {"start": "x", "nodes": {"x": {"service": "echo"}}}
    execs = [{"service": "echo", "post": {"output_key": "v.w"}}, {"service": "echo"}]
    both = {"kind": "parallel", "parallel_execs": execs, "parallel_mode": "concurrent"}
    for node in (both, {"kind": "subflow", "subflow": inner, "post": {"output_key": "v[0]"}}):
        driver = Driver(flow_of({"v": v, "then": node}, [("v", "default", "then")]), {"val": 3}, echo)
        driver.run()
        assert driver.visits[-1].path == "then"
        assert "cannot be written: 'v' is a number" in str(driver.visits[-1].error)
        assert not driver.state.closing


WAIT = {"kind": "wait_event", "params": {"signal_key": "$shared.flag", "timeout_ms": 500}}
AFTER = {"kind": "executor", "service": "echo", "prep": {"input_key": "$params.val"}, "post": {"output_key": "x"}}


@pytest.mark.parametrize(
    ("node", "edges", "error", "shared"),
    [
        (WAIT, [], "Node 'wait': Nobody sent 'flag' within 0.5 s.", {}),
        (WAIT, [("wait", "timeout", "after")], None, {"x": 1}),
        (WAIT, [("wait", "error", "after")], None, {"x": 1}),
        ({**WAIT, "failure_strategy": "continue"}, [("wait", "default", "after")], None, {"x": 1}),
    ],
)
def test_a_wait_that_times_out_takes_an_edge_or_fails(
    node: dict[str, Any], edges: Any, error: str | None, shared: Any
) -> None:
    nodes = {"wait": node, "after": AFTER} if edges else {"wait": node}
    driver = Driver(flow_of(nodes, edges), {"val": 1}, echo)
    state = driver.run()
    assert driver.end == commands.End(error)
    assert {key: value for key, value in state.shared.items() if key != "_error"} == shared


@pytest.mark.parametrize("value", [True, 0, "", [], {"n": 1}])
@pytest.mark.parametrize("early", [True, False])
def test_any_signal_value_except_null_ends_a_wait_early_or_late(value: Any, early: bool) -> None:
    inner = {"start": "w", "nodes": {"w": {**WAIT, "post": {"output_key": "got"}}}}
    driver = Driver(flow_of({"s": {"kind": "subflow", "subflow": inner, "post": {"output_key": "s"}}}), {}, echo)
    flag = commands.Signalled("flag", value)
    others: list[commands.Event] = [commands.Begun(), commands.Signalled("other", 1)]
    for event in [flag, *others] if early else [*others, commands.Signalled("flag", None), flag]:
        if driver.end is None:
            driver.tell(event)
    assert driver.end == commands.End(None)
    assert driver.state.shared["s"] == {"got": value}
    assert driver.timers == {}


def test_a_consumed_signal_is_awaited_again_by_the_next_node() -> None:
    node = {"kind": "approval", "params": {"approval_key": "$shared.ok", "consume": True}}
    driver = Driver(flow_of({"a": node, "b": node}, [("a", "approved", "b")]), {}, echo)
    driver.tell(commands.Begun())
    driver.tell(commands.Signalled("ok", True))
    assert (driver.state.cursor, driver.end) == ("b", None)


@pytest.mark.parametrize(
    ("key", "params", "action"),
    [("way", {}, "left"), ("$shared.way", {}, "left"), ("$params.way", {"way": "on"}, "on"), ("gone", {}, "else")],
)
def test_a_choice_without_cases_takes_its_action_from_shared_state(
    key: str, params: dict[str, Any], action: str
) -> None:
    route = {"kind": "executor", "service": "s", "prep": {"input_key": "$params.word"}, "post": {"output_key": "way"}}
    choose = {"kind": "choice", "post": {"action_key": key}, "default_action": "else"}
    driver = Driver(flow_of({"route": route, "choose": choose}, [("route", "default", "choose")]), params, echo)
    driver.params = {**params, "word": "left"}
    driver.run(0)
    assert [visit.action for visit in driver.visits] == ["default", action]


def test_the_timer_of_an_earlier_wait_does_not_end_a_later_wait() -> None:
    node = {"kind": "wait_event", "params": {"signal_key": "$shared.flag", "timeout_ms": 500, "consume": True}}
    driver = Driver(flow_of({"a": node, "b": node}, [("a", "default", "b")]), {}, echo)
    driver.tell(commands.Begun())
    (earlier,) = driver.timers
    driver.tell(commands.Signalled("flag", 1))
    driver.tell(commands.TimerFired(earlier))
    assert (driver.state.cursor, driver.end, len(driver.timers)) == ("b", None, 1)


def test_a_subflow_is_retried_as_a_whole() -> None:
    inner = {"start": "a", "nodes": {"a": {"service": "bad"}}}
    flow = flow_of({"s": {"kind": "subflow", "subflow": inner, "max_retries": 2, "wait_ms": 10}})
    driver = Driver(flow, {}, echo)
    driver.run()
    assert driver.end == commands.End("Node 's': Node 'a': no")
    assert [(visit.path, visit.attempt) for visit in driver.visits if visit.path == "s"] == [
        ("s", 1),
        ("s", 2),
        ("s", 3),
    ]


def test_branches_items_and_subflow_nodes_can_have_their_own_executors() -> None:
    seen: list[tuple[str, Any, Any]] = []

    def note(name: str, value: Any, params: dict[str, Any]) -> Any:
        seen.append((name, value, params.get("mul")))
        return value

    each = {
        "kind": "foreach",
        "exec_type": "local_func",
        "func": "mul",
        "params": {"mul": 2},
        "prep": {"input_key": "$params.list"},
        "foreach_execs": [{"index": 1, "params": {"mul": 4}}, {"index": 2, "func": "other"}],
    }
    both = {
        "kind": "parallel",
        "parallel_execs": [
            {"service": "s", "prep": {"input_key": "$params.val"}, "post": {"output_key": "own"}},
            {"exec_type": "local_func", "func": "f", "params": {"mul": 9}},
        ],
    }
    inner = {"start": "a", "nodes": {"a": {"service": "remote", "prep": {"input_key": "$params.val"}}}}
    sub = {
        "kind": "subflow",
        "subflow": inner,
        "subflow_execs": [{"node": "a", "exec_type": "local_func", "func": "near", "params": {"mul": 7}}],
    }
    flow = flow_of({"each": each, "both": both, "sub": sub}, [("each", "default", "both"), ("both", "default", "sub")])
    driver = Driver(flow, {"val": 1, "list": ["a", "b", "c"]}, note)
    state = driver.run()
    assert driver.end == commands.End(None)
    assert seen[:3] == [("mul", "a", 2), ("mul", "b", 4), ("other", "c", 2)]
    assert seen[3:5] == [("s", 1, None), ("f", None, 9)]
    assert state.shared == {"own": 1}
    assert driver.visits[-2].path == "sub/a"
    assert seen[5][1:] == (1, 7)


def test_late_and_duplicate_events_change_nothing() -> None:
    node = {"kind": "parallel", "parallel_services": ["bad", "slow"], "parallel_mode": "concurrent"}
    driver = Driver(flow_of({"p": node}), {}, echo)
    driver.tell(commands.Begun())
    first, second = sorted(driver.calls)
    driver.tell(commands.CallEnded(first, error="no"))
    assert driver.end is None, "it waits to hear that the other one is cancelled"
    for event in (
        commands.CallEnded(first, 1),
        commands.TimerFired(first),
        commands.Signalled("x", 1),
        commands.Begun(),
    ):
        driver.tell(event)
        assert driver.end is None
    driver.tell(commands.CallEnded(second, error="cancelled"))
    assert driver.end == commands.End("Node 'p': Branch 0: no")
    for event in (commands.Signalled("x", 1), commands.CallEnded(second, 1), commands.TimerFired(first)):
        assert driver.planner(driver.state).handle(event) == [], "it ends once"


def test_run_parameters_do_not_decide_approvals_or_timeouts() -> None:
    flow = flow_of(
        {"ask": {"kind": "approval"}, "nap": {"kind": "timer", "params": {"delay_ms": 5_000}}},
        [("ask", "default", "nap")],
    )
    driver = Driver(flow, {"approval_key": "$params.me", "me": "yes", "timeout_ms": 1, "consume": True}, echo)
    driver.tell(commands.Begun())
    assert (driver.state.cursor, driver.timers) == ("ask", {})
    driver.tell(commands.Signalled("ask", "approved"))
    assert (driver.state.cursor, driver.state.shared) == ("nap", {"ask": "approved"})


@pytest.mark.parametrize("signal", ["ask", "legal/ask"])
def test_a_decision_applies_to_one_approval_only(signal: str) -> None:
    ask = {"kind": "subflow", "subflow": {"start": "ask", "nodes": {"ask": {"kind": "approval"}}}}
    nodes = {name: {**ask, "post": {"output_key": name}} for name in ("legal", "finance")}
    driver = Driver(flow_of(nodes, [("legal", "default", "finance")]), {}, echo)
    driver.tell(commands.Begun())
    driver.tell(commands.Signalled(signal, "yes", "ann"))
    assert (driver.state.cursor, driver.state.shared) == ("finance/ask", {"legal": {"ask": "yes"}})
    driver.tell(commands.Signalled("legal/ask", "yes"))
    assert driver.state.cursor == "finance/ask"
    driver.tell(commands.Signalled("finance/ask", "no"))
    assert driver.state.shared == {"legal": {"ask": "yes"}, "finance": {"ask": "no"}}
    assert driver.end == commands.End(None)


def test_a_decision_before_the_start_of_its_subflow_is_kept() -> None:
    ask = {"kind": "subflow", "subflow": {"start": "ask", "nodes": {"ask": {"kind": "approval"}}}}
    driver = Driver(flow_of({"a": {**ask, "post": {"output_key": "a"}}}), {}, echo)
    driver.tell(commands.Signalled("a/ask", "yes"))
    driver.tell(commands.Begun())
    assert (driver.end, driver.state.shared) == (commands.End(None), {"a": {"ask": "yes"}})


def test_consumed_signals_are_received_once_and_in_order() -> None:
    wait = {
        "kind": "wait_event",
        "params": {"signal_key": "$shared.item", "consume": True},
        "post": {"output_key": "x"},
    }
    count = {"kind": "executor", "service": "count", "prep": {"input_key": "x"}}
    edges = [("wait", "default", "count"), ("count", "on", "wait")]
    count["post"] = {"action_key": "next"}
    seen: list[Any] = []

    def note(_name: str, value: Any, _params: Any) -> Any:
        seen.append(value)
        return {"next": "on" if len(seen) < 10 else "off"}

    driver = Driver(flow_of({"wait": wait, "count": count}, edges), {}, note)
    driver.tell(commands.Begun())
    for number in range(10):
        driver.tell(commands.Signalled("item", number))
    for _ in range(20):
        driver.step(random.Random(0))
    assert (seen, driver.end) == (list(range(10)), commands.End(None))
    assert driver.state.queued == {}


def test_a_retry_does_not_repeat_successful_calls() -> None:
    node = {"kind": "foreach", "service": "s", "prep": {"input_key": "$params.items"}, "post": {"output_key": "out"}}
    node |= {"parallel_mode": "concurrent", "failure_strategy": "collect_errors"}
    seen: list[Any] = []

    def odd_fails_once(_name: str, value: Any, _params: Any) -> Any:
        seen.append(value)
        if value == 201 and seen.count(201) == 1:
            raise ValueError("odd")
        return None if value == 200 else value

    driver = Driver(flow_of({"f": node}), {"items": [200, 201, 202]}, odd_fails_once)
    driver.run()
    assert driver.end is not None
    assert driver.end.error is not None
    driver.end = None
    driver.tell(commands.Retried())
    while driver.step(random.Random(0)):
        pass
    assert (driver.end, driver.state.shared) == (commands.End(None), {"out": [None, 201, 202]})
    assert sorted(seen) == [200, 201, 201, 202]


@pytest.mark.slow
def test_item_calls_omit_the_list_and_large_parameters_limit_concurrency() -> None:
    node = {"kind": "foreach", "service": "s", "prep": {"input_key": "$params.items"}, "parallel_mode": "concurrent"}
    driver = Driver(flow_of({"f": node}), {"items": ["y" * 1_000] * 700, "rate": 3}, echo)
    driver.tell(commands.Begun())
    assert len(driver.calls) == 100
    assert {tuple(call.params) for call in driver.calls.values()} == {("rate",)}
    assert driver.largest < 10_000
    large = Driver(flow_of({"f": node}), {"items": [1] * 700, "all": "x" * 300_000}, echo)
    large.tell(commands.Begun())
    assert len(large.calls) == 3
    while large.step(random.Random(0)):
        pass
    assert large.end == commands.End(None)


def test_a_function_is_given_the_parameters_that_it_takes() -> None:
    node = {"kind": "foreach", "exec_type": "local_func", "func": "f", "prep": {"input_key": "$params.items"}}
    params = {"items": [1, 2], "rate": 3, "all": "x" * 600_000}
    flow = flow_of({"f": {**node, "parallel_mode": "concurrent"}})
    for takes, expected in ((("input", "rate"), [{"rate": 3}] * 2), (("input", "items"), [{"items": [1, 2]}] * 2)):
        driver = Driver(msgspec.structs.replace(flow, takes={"f": takes}), params, echo)
        driver.tell(commands.Begun())
        assert [call.params for call in driver.calls.values()] == expected
    driver = Driver(msgspec.structs.replace(flow, takes={"f": ("input", "params")}), params, echo)
    driver.tell(commands.Begun())
    assert [[*call.params] for call in driver.calls.values()] == [["rate", "all"]]  # one call at a time
