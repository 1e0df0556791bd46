"""Flows that use the words of the system they come from together, and what must come of each."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A flow, what it is started with and sent, and how it ends."""

    definition: str
    status: str
    shared: dict[str, Any]
    """What stands in the shared state in the end."""
    runs: list[tuple[str, str, str]]
    """Node, status and action of each attempt at a node, in order."""
    signals: dict[str, Any] = {}
    node: str = ""
    """Where the cursor stands in the end."""


FAN = """
start: many
nodes:
  many:
    kind: parallel
    params: {services: [transform, sum, transform], mul: 3}
    prep: {input_key: $params.val}
    failure_strategy: ignore_errors
    post: {output_key: agg, action_static: "on"}
  look:
    kind: choice
    prep: {input_key: $shared.agg}
    post: {output_key: seen}
    choice_cases:
    - action: wrong
      expr: {or: [{not: {contains: [$input, 6]}}, {ne: ["$shared.agg[0]", 6]}, {exists: $shared.nothing}]}
    - action: right
      expr:
        and:
        - {in: ["$shared.agg[2]", [5, 6]]}
        - {ge: ["$input[0]", 6]}
        - {le: ["$input[0]", 6]}
        - {gt: [$params.val, 1]}
        - {lt: [$params.val, 3]}
        - {eq: ["$input[1]", null]}
    default_action: wrong
  each:
    kind: foreach
    service: transform
    params: {mul: 2}
    prep: {input_key: $params.mixed}
    parallel_mode: concurrent
    max_parallel: 2
    failure_strategy: collect_errors
    post: {output_key: mapped}
  after: {service: transform, params: {mul: 7}, prep: {input_key: "mapped[2]"}, post: {output_key: after}}
  never: {service: route, params: {action: x}}
edges:
- {from: many, action: "on", to: look}
- {from: look, action: right, to: each}
- {from: look, action: wrong, to: never}
- {from: each, action: default, to: after}
"""

NESTED = """
start: outer
nodes:
  outer:
    kind: subflow
    params: {mul: 5}
    prep: {input_map: {n: $params.val, list: $params.list}}
    post: {output_key: sub, output_map: {grand: deep.total}, action_static: next}
    subflow:
      start: first
      nodes:
        first: {service: transform, prep: {input_key: $params.val}, post: {output_key: m, action_static: go}}
        pause:
          kind: timer
          params: {delay_ms: 30}
          prep: {input_key: m}
          post: {output_key: paused, action_static: down}
        deep:
          kind: subflow
          prep: {input_key: $input.list}
          post: {output_key: deep, output_map: {sum: total}}
          subflow:
            start: each
            nodes:
              each:
                kind: foreach
                service: transform
                prep: {input_key: $input}
                post: {output_key: mapped, action_static: to_sum}
              total: {service: sum, prep: {input_key: $shared.mapped}, post: {output_key: total}}
            edges: [{from: each, action: to_sum, to: total}]
      edges: [{from: first, action: go, to: pause}, {from: pause, action: down, to: deep}]
  end: {service: transform, params: {mul: 10}, prep: {input_key: $shared.sub.sum}, post: {output_key: end}}
edges: [{from: outer, action: next, to: end}]
"""

ASKED = """
start: wait
nodes:
  wait:
    kind: wait_event
    params: {signal_key: $shared.turn, timeout_ms: 60000}
    post: {output_key: got, action_key: way}
  ask: {kind: approval, params: {approval_key: $shared.ok}, post: {output_key: answer}}
  nay: {service: transform, params: {mul: -1}, prep: {input_key: $params.val}, post: {output_key: result}}
  aye: {service: transform, params: {mul: 1}, prep: {input_key: $params.val}, post: {output_key: result}}
  late: {kind: wait_event, params: {signal_key: $shared.never, timeout_ms: 50}}
  done: {service: route, params: {action: x}, post: {output_key: routed, output_map: {way: action}}}
edges:
- {from: wait, action: left, to: ask}
- {from: ask, action: approved, to: aye}
- {from: ask, action: rejected, to: nay}
- {from: nay, to: late}
- {from: late, to: done}
"""

LOOP = """
start: first
nodes:
  first: {service: transform, params: {mul: 1}, prep: {input_key: $params.val}, post: {output_key: n}}
  grow:
    service: transform
    params: {mul: 4}
    prep: {input_key: n}
    post: {output_key: n}
    max_attempts: 3
    attempt_delay_ms: 10
    weighted_by_load: true
    max_retries: 1
    wait_ms: 10
  more:
    kind: choice
    prep: {input_map: {n: $shared.n, most: $params.most}}
    choice_cases: [{action: again, expr: {lt: [$input.n, $input.most]}}]
    post: {action_key: way}
    default_action: enough
  way: {service: route, params: {action: goC}, post: {action_key: action}}
  goB: {service: transform, params: {op: lower}, prep: {input_key: $params.text}, post: {output_key: said}}
  goC: {service: transform, params: {op: upper}, prep: {input_key: $params.text}, post: {output_key: said}}
edges:
- {from: first, to: more}
- {from: more, action: again, to: grow}
- {from: grow, to: more}
- {from: more, action: enough, to: way}
- {from: way, action: goB, to: goB}
- {from: way, action: goC, to: goC}
"""

BROKEN = """
start: one
nodes:
  one: {service: route, params: {action: x}, post: {action_static: p, output_map: {a: action, b: none}}}
  p:
    kind: parallel
    parallel_mode: concurrent
    max_parallel: 1
    failure_strategy: fail_fast
    parallel_services: [transform, sum, route]
    params: {mul: 2, action: x}
    prep: {input_key: $params.val}
    post: {output_key: agg, action_static: next}
  after: {service: route, params: {action: x}}
edges: [{from: one, action: p, to: p}, {from: p, action: next, to: after}]
"""

PARAMS = {"val": 2, "list": [1, 2, 3], "mixed": [1, "x", 3], "most": 100, "text": "Hi"}

CASES = {
    "fan": Case(
        FAN,
        "completed",
        {"agg": [6, None, 6], "seen": [6, None, 6], "mapped": [2, None, 6], "after": 42},
        [],
    ),
    "nested": Case(
        NESTED,
        "completed",
        {
            "sub": {
                "m": 10,
                "paused": 10,
                "deep": {"mapped": [5, 10, 15], "total": 30},
                "sum": 30,
            },
            "grand": 30,
            "end": 300,
        },
        [],
    ),
    "asked": Case(
        ASKED,
        "completed",
        {
            "turn": {"way": "left"},
            "ok": False,
            "got": {"way": "left"},
            "answer": False,
            "result": -2,
            "routed": {"action": "x"},
            "way": "x",
        },
        [
            ("wait", "ok", "left"),
            ("ask", "ok", "rejected"),
            ("nay", "ok", "default"),
            ("late", "error", "error"),
            ("done", "ok", "default"),
        ],
        {"turn": {"way": "left"}, "ok": False},
    ),
    "loop": Case(
        LOOP,
        "completed",
        {"n": 128, "said": "HI"},
        [
            ("first", "ok", "default"),
            *[("more", "ok", "again"), ("grow", "ok", "default")] * 3,
            ("more", "ok", "enough"),
            ("way", "ok", "goC"),
            ("goC", "ok", "default"),
        ],
    ),
    "broken": Case(BROKEN, "failed", {"a": "x", "b": None}, [], node="p"),
}
