"""Validation of a flow. Problems have a path in the data as written, so that a reader can find the line.

A valid flow can be planned: all paths and expressions parse, all edges lead to nodes, and every node can be reached and
left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, NamedTuple, get_args

import msgspec

from orchestrator.domain.flow import expression
from orchestrator.domain.flow.definition import (
    EXECS,
    MAX_MS,
    Exec,
    Kind,
    Mode,
    Node,
    OnError,
    Post,
    Prep,
    Script,
    Strategy,
    without_nulls,
)
from orchestrator.domain.flow.edge_checks import of_edges, unknown_keys
from orchestrator.domain.flow.paths import parse
from orchestrator.domain.problems import MAX_PROBLEMS, Path, Problem, first_problems, for_message
from orchestrator.errors import ExpressionError, did_you_mean

KINDS: tuple[str, ...] = get_args(Kind)
MAX_NODES = 10_000
"""Nodes of a flow including its subflows, at most: the leader reads all of them."""
TOO_MANY = f"more than {MAX_NODES:,} nodes, including those of its subflows; no more are allowed."
DEEPEST = 20
"""Levels of nested flows, at most."""
MAX_KEY_LENGTH = 128
"""Characters of a node's key, at most."""
_MAX_PATH_SIZE = 2_000
"""Bytes of a node's path (its key and those of the nodes above it), at most, because it is indexed."""


class KnownNames(NamedTuple):
    """The names that a flow may use. None if any name is allowed."""

    functions: Collection[str] | None = None
    """Functions for `local_func`."""
    services: Collection[str] | None = None
    executors: Collection[str] | None = None
    flows: bool = True
    """Whether the referenced flows have been looked up and inserted."""


ANY_NAMES = KnownNames()
_FLOW_KEYS = ("schedule", "start", "nodes", "edges", "max_steps", "description", "name", "version", "flow")
_NODE_KEYS = tuple(Node.__struct_fields__)
_PARTS: dict[str, type[msgspec.Struct]] = {"prep": Prep, "post": Post, "script": Script}


def check(plain: Any, known: KnownNames = ANY_NAMES) -> list[Problem]:
    """Return the problems of a flow as written, or the first of very many."""
    return first_problems(_problems(plain, known))


def _problems(plain: Any, known: KnownNames, *, path: Path = (), depth: int = 0) -> Iterator[Problem]:
    if not isinstance(plain, dict):
        yield Problem(path, "a flow is a mapping with start, nodes and edges.")
        return
    yield from unknown_keys(plain, _FLOW_KEYS[1:] if depth else _FLOW_KEYS, path, "A flow")
    nodes = plain.get("nodes")
    if not isinstance(nodes, dict) or not nodes:
        yield Problem((*path, "nodes"), "a flow has nodes: a mapping of keys to nodes.")
        return
    if not depth and count_nodes(plain) > MAX_NODES:
        yield Problem((*path, "nodes"), TOO_MANY)
        return
    if depth > DEEPEST:
        yield Problem(path, f"subflows can be nested at most {DEEPEST} levels deep.")
        return
    for key, node in nodes.items():
        at = (*path, "nodes", key)
        if not isinstance(node, dict):
            yield Problem(at, f"node {key!r} is a mapping with a kind; found {for_message(node)}.")
        else:
            if not 1 <= len(str(key)) <= MAX_KEY_LENGTH or "/" in str(key):
                reason = f"its key must be a string of 1 to {MAX_KEY_LENGTH} characters without `/`."
                yield Problem(at, f"a node cannot be called {for_message(key)}: {reason}")
            elif _path_size(at) > _MAX_PATH_SIZE:
                reason = f"have {_path_size(at):,} bytes together; at most {_MAX_PATH_SIZE:,} are allowed."
                yield Problem(at, f"node {key!r}: its key and those of the nodes above it {reason}")
            name = f"{key!r:.140}"
            yield from (
                Problem(problem.path, f"node {name}: {problem.message}") for problem in _node(node, known, at, depth)
            )
    yield from of_edges(plain, nodes, path)


def count_nodes(plain: Any) -> int:
    """Return the number of nodes including subflows. Counting stops above `MAX_NODES`."""
    count, pending = 0, [plain]
    while pending and count <= MAX_NODES:
        flow = pending.pop()
        nodes = flow.get("nodes") if isinstance(flow, dict) else None
        if isinstance(nodes, dict):
            count += len(nodes)
            pending += [node["subflow"] for node in nodes.values() if isinstance(node, dict) and "subflow" in node]
    return count


def _path_size(path: Path) -> int:
    """Return the bytes of a node's path, as stored in rows of tasks."""
    return len("/".join(str(key) for key in path[1::3]).encode(errors="replace"))


# -- nodes


def _node(node: dict[str, Any], known: KnownNames, path: Path, depth: int) -> Iterator[Problem]:
    yield from unknown_keys(node, _NODE_KEYS, path, "a node")
    kind = node.get("kind") or "executor"
    if kind not in KINDS:
        hint = did_you_mean(str(kind), KINDS)
        yield Problem((*path, "kind"), f"there is no kind {kind!r}.{hint} Kinds: {', '.join(KINDS)}.")
        return
    yield from _types(node, path)
    yield from _mapping(node, path)
    params = node.get("params")
    params = params if isinstance(params, dict) else {}
    yield from _OF_KIND[kind](node, params, known, path, depth)


def _types(node: dict[str, Any], path: Path) -> Iterator[Problem]:
    """Yield values whose type does not match their field."""
    for key, value in node.items():
        if key in ("subflow", "choice_cases", *EXECS, *_PARTS) or key not in _NODE_KEYS or value is None:
            continue
        try:
            msgspec.convert(value, _TYPES[key])
        except msgspec.ValidationError as error:
            words = " or ".join(_WORDS.get(key, ()))
            expected = f"{key} is {words}" if words else f"{key}: {_reason(error)}"
            yield Problem((*path, key), f"{expected}; found {for_message(value)}.")
        else:
            if isinstance(value, int) and not isinstance(value, bool) and key != "priority" and value < 0:
                yield Problem((*path, key), f"{key} is not negative; found {value}.")
            elif isinstance(value, int) and key.endswith("_ms") and value > MAX_MS:
                yield Problem((*path, key), f"{key} is at most {MAX_MS:,}, a hundred years; found {value:,}.")
    for name, kind in _PARTS.items():
        part = node.get(name)
        if part is None:
            continue
        if not isinstance(part, dict):
            yield Problem((*path, name), f"{name} is a mapping; found {for_message(part)}.")
        else:
            yield from unknown_keys(part, kind.__struct_fields__, (*path, name), name)
            try:
                msgspec.convert(without_nulls(part), kind)
            except msgspec.ValidationError as error:
                yield Problem((*path, name), f"{name}: {_reason(error)}.")
            else:
                if part.get("timeout_ms") and not 0 <= part["timeout_ms"] <= MAX_MS:
                    at = (*path, name, "timeout_ms")
                    yield Problem(
                        at, f"timeout_ms is from 0 to {MAX_MS:,}, a hundred years; found {part['timeout_ms']:,}."
                    )


_WORDS = {"parallel_mode": get_args(Mode), "failure_strategy": get_args(Strategy), "on_error": get_args(OnError)}
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Node)}


def _mapping(node: dict[str, Any], path: Path) -> Iterator[Problem]:
    """Yield invalid paths in prep and post."""
    prep, post = node.get("prep"), node.get("post")
    if isinstance(prep, dict):
        at = (*path, "prep")
        if prep.get("input_key"):
            yield from _path(prep["input_key"], (*at, "input_key"))
        for name, text in _items(prep.get("input_map")):
            yield from _path(text, (*at, "input_map", name))
    if isinstance(post, dict):
        at = (*path, "post")
        for name in ("output_key", "action_key"):
            if post.get(name):  # the action of a choice may come from any path
                within = "" if (name, node.get("kind")) == ("action_key", "choice") else name
                yield from _path(post[name], (*at, name), within=within)
        for name, text in _items(post.get("output_map")):
            yield from _path(name, (*at, "output_map", name), within="output_map")
            yield from _path(text, (*at, "output_map", name), within="output_map", is_result=True)


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _path(text: Any, path: Path, *, within: str = "", is_result: bool = False) -> Iterator[Problem]:
    if not isinstance(text, str):
        yield Problem(path, f"a path must be a string, such as $shared.name; found {for_message(text)}.")
        return
    try:
        parsed = parse(text)
    except ExpressionError as error:
        yield Problem(path, str(error))
        return
    is_written = within in ("output_key", "output_map") and not is_result
    if is_written and parsed.root == "shared" and parsed.parts and isinstance(parsed.parts[0], int):
        yield Problem(path, f"{text!r} cannot be written: the shared state is a mapping with names, not a list.")
        return
    if not within or not text.startswith("$"):
        return
    if within == "action_key" or is_result:
        yield Problem(path, f"{text!r} cannot occur there: expected the name of a part of the result.")
    elif parsed.root != "shared" or not parsed.parts:
        yield Problem(path, f"{text!r} cannot be written: only keys of the shared state can, such as $shared.name.")


def _executor(node: dict[str, Any], _params: Any, known: KnownNames, path: Path, _depth: int) -> Iterator[Problem]:
    yield from _runs(node, known, path)


def _runs(node: dict[str, Any], known: KnownNames, path: Path, *, of: str = "") -> Iterator[Problem]:
    """Yield problems with the executor of a node or a branch."""
    kind = node.get("exec_type") or ""
    executors = known.executors
    if kind and executors is not None and kind not in executors:
        yield Problem(
            (*path, "exec_type"),
            f"there is no executor {kind!r}.{did_you_mean(kind, executors)} Executors: {', '.join(sorted(executors))}.",
        )
    if kind == "local_func":
        name = node.get("func") or node.get("service")
        if not name:
            yield Problem(path, f"exec_type local_func{of} needs `func`, the name of a task.")
        elif known.functions is not None and str(name) not in known.functions:
            yield Problem((*path, "func"), f"there is no task {name!r}.{did_you_mean(str(name), known.functions)}")
    elif kind == "local_script":
        script = node.get("script")
        if not isinstance(script, dict) or not (script.get("cmd") or script.get("code")):
            yield Problem((*path, "script"), f"exec_type local_script{of} needs `script` with a cmd.")
    elif kind in ("", "http", "queue"):
        name = node.get("service") or node.get("func")
        if not name and not node.get("options"):
            yield Problem(path, f"it needs a service{of}, or another exec_type.")
        elif not (kind or node.get("service")) and known.functions is not None and str(name) in known.functions:
            remedy = "add exec_type: local_func, or http if you mean a service of this name."
            yield Problem((*path, "func"), f"func {name!r} is a task of the application: {remedy}")
        elif name and known.services is not None and str(name) not in known.services:
            yield Problem((*path, "service"), f"there is no service {name!r}.{did_you_mean(str(name), known.services)}")


def _choice(node: dict[str, Any], _params: Any, _known: KnownNames, path: Path, _depth: int) -> Iterator[Problem]:
    cases = node.get("choice_cases") or []
    if not isinstance(cases, list):
        yield Problem((*path, "choice_cases"), "choice_cases is a list of {action, expr}.")
        return
    if not cases and not node.get("choice_key") and not node.get("default_action") and not node.get("post"):
        yield Problem(path, "a choice needs choice_cases or a default_action.")
    seen: set[str] = set()
    for number, case in enumerate(cases):
        at = (*path, "choice_cases", number)
        if not isinstance(case, dict) or not isinstance(case.get("action"), str) or not case["action"]:
            yield Problem(at, f"case {number}: expected {{action, expr}}; found {for_message(case)}.")
            continue
        yield from unknown_keys(case, ("action", "expr"), at, "a case")
        text = msgspec.json.encode(case.get("expr"), order="sorted").decode()
        if text in seen:
            yield Problem(at, f"case {number} ({case['action']}) is never reached: an earlier one has the same expr.")
        seen.add(text)
        for problem in expression.problems(case.get("expr")):
            yield Problem((*at, "expr"), f"case {number} ({case['action']}): {problem}")


def _parallel(node: dict[str, Any], params: dict[str, Any], known: KnownNames, path: Path, _: int) -> Iterator[Problem]:
    execs = node.get("parallel_execs") or []
    services = node.get("parallel_services") or params.get("services") or []  # else they are parameters of the run
    yield from _execs(node, "parallel_execs", known, path)
    if isinstance(services, list) and known.services is not None and not execs:
        for number, name in enumerate(services):
            if isinstance(name, str) and name not in known.services:
                hint = did_you_mean(name, known.services)
                yield Problem((*path, "parallel_services", number), f"there is no service {name!r}.{hint}")


def _foreach(node: dict[str, Any], _params: Any, known: KnownNames, path: Path, _depth: int) -> Iterator[Problem]:
    prep = node.get("prep")
    if not isinstance(prep, dict) or not prep.get("input_key"):
        yield Problem(path, "a foreach needs prep.input_key, the path of a list.")
    if not node.get("foreach_execs") or node.get("service") or node.get("func") or node.get("script"):
        yield from _runs(node, known, path)
    yield from _execs(node, "foreach_execs", known, path)


def _execs(node: dict[str, Any], name: str, known: KnownNames, path: Path) -> Iterator[Problem]:
    """Yield problems with the executors of branches, items or nodes of a subflow."""
    execs = node.get(name) or []
    if not isinstance(execs, list):
        yield Problem((*path, name), f"{name} is a list.")
        return
    for number, entry in enumerate(execs):
        at = (*path, name, number)
        if not isinstance(entry, dict):
            yield Problem(at, f"{name}: expected a mapping; found {for_message(entry)}.")
            continue
        unknown = [*islice(unknown_keys(entry, Exec.__struct_fields__, at, name), MAX_PROBLEMS)]
        yield from unknown
        yield from _mapping(entry, at)
        try:
            msgspec.convert(without_nulls(entry), Exec)
        except msgspec.ValidationError as error:
            if not unknown:
                yield Problem(at, f"{name} {number}: {_reason(error)}.")
        base = _inner_executor(node, entry.get("node")) if name == "subflow_execs" else node
        if not unknown and base is not None:
            merged = {key: base.get(key) for key in ("service", "exec_type", "func", "script", "options")}
            merged |= {key: value for key, value in entry.items() if value}
            yield from _runs(merged, known, at, of=f" in {name} {number}")


def _inner_executor(node: dict[str, Any], key: Any) -> dict[str, Any] | None:
    """Return a node of a subflow if its kind is `executor`, else None."""
    inner = node.get("subflow")
    nodes = inner.get("nodes") if isinstance(inner, dict) else None
    inner_node = nodes.get(key) if isinstance(nodes, dict) and isinstance(key, str) else None
    return inner_node if isinstance(inner_node, dict) and (inner_node.get("kind") or "executor") == "executor" else None


def _subflow(node: dict[str, Any], _params: Any, known: KnownNames, path: Path, depth: int) -> Iterator[Problem]:
    inner = node.get("subflow")
    at = (*path, "subflow")
    if isinstance(inner, str) or (isinstance(inner, dict) and inner.get("flow") and "nodes" not in inner):
        yield Problem(at, f"flow {inner if isinstance(inner, str) else inner['flow']!r} was not found.")
        return
    if isinstance(inner, dict) and inner.get("flow") and not inner["nodes"] and not known.flows:
        return
    if not isinstance(inner, dict):
        yield Problem(at, "a subflow needs `subflow`: a flow, or the name of one that is published.")
        return
    yield from _problems(inner, known, path=at, depth=depth + 1)
    yield from _execs(node, "subflow_execs", known, path)
    nodes = inner.get("nodes")
    for number, entry in enumerate(node.get("subflow_execs") or []):
        requested = entry.get("node") if isinstance(entry, dict) else None
        if isinstance(nodes, dict) and not (isinstance(requested, str) and requested in nodes):
            hint = did_you_mean(str(requested), nodes)
            yield Problem((*path, "subflow_execs", number), f"its subflow has no node {requested!r}.{hint}")


def _timer(_node: Any, params: dict[str, Any], _known: KnownNames, path: Path, _depth: int) -> Iterator[Problem]:
    if "delay_ms" not in params:
        yield Problem(path, "a timer needs params.delay_ms.")
    yield from _milliseconds(params, "delay_ms", path)


def _waits(
    node: dict[str, Any], params: dict[str, Any], _known: KnownNames, path: Path, _depth: int
) -> Iterator[Problem]:
    name = "approval_key" if node.get("kind") == "approval" else "signal_key"
    if params.get(name):
        yield from _path(params[name], (*path, "params", name))
    elif name == "signal_key":
        yield Problem(path, "a wait_event needs params.signal_key, the path of what it waits for.")
    yield from _milliseconds(params, "timeout_ms", path)


def _milliseconds(params: dict[str, Any], name: str, path: Path) -> Iterator[Problem]:
    value = params.get(name)
    if expression.is_path(value):
        yield from _path(value, (*path, "params", name))
    elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
        yield Problem(
            (*path, "params", name), f"params.{name} is a number of milliseconds; found {for_message(value)}."
        )
    elif value is not None and value > MAX_MS:
        yield Problem(
            (*path, "params", name), f"params.{name} is at most {MAX_MS:,}, a hundred years; found {value:,}."
        )


_OF_KIND: dict[str, Callable[[dict[str, Any], dict[str, Any], KnownNames, Path, int], Iterator[Problem]]] = {
    "executor": _executor,
    "choice": _choice,
    "parallel": _parallel,
    "foreach": _foreach,
    "subflow": _subflow,
    "timer": _timer,
    "wait_event": _waits,
    "approval": _waits,
}


def _reason(error: Exception) -> str:
    return str(error).split(" - at")[0].lower().rstrip(".").replace("`", "").replace(" | null", "")
