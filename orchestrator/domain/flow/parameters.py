"""Which parameters a run of a flow can make use of: those that its nodes look up, and those that its functions take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from orchestrator.domain.flow.definition import Exec, Flow, Node
from orchestrator.domain.flow.paths import parse
from orchestrator.errors import ExpressionError

_LOCAL = "local_func"


class _Any(Exception):
    """Something is given all parameters."""


def parameters(flow: Flow) -> set[str] | None:
    """Return the names of the parameters that a run can use; None if a node is given all, whatever they are called."""
    try:
        return {*_of(flow, flow.takes, is_root=True)}
    except _Any:
        return None


def _of(flow: Flow, takes: Mapping[str, tuple[str, ...]], *, is_root: bool) -> Iterator[str]:
    for node in flow.nodes.values():
        yield from _called(node, takes)
        execs = (*node.parallel_execs, *node.foreach_execs, *node.subflow_execs)
        for prep in (node.prep, *(one.prep for one in execs)):
            if is_root:  # where $input is all parameters
                yield from _looked_up([prep.input_key, *prep.input_map.values()], "input")
        yield from _looked_up(msgspec.to_builtins(msgspec.structs.replace(node, subflow=None)), "params")
        if node.subflow is not None:
            yield from _of(node.subflow, takes, is_root=False)


def _looked_up(value: Any, root: str) -> Iterator[str]:
    """Yield the first part of every path from a root."""
    if isinstance(value, str) and value.startswith(f"${root}"):
        try:
            path = parse(value)
        except ExpressionError:  # a text, and no path
            return
        if path.root != root:
            return
        if not path.parts:
            raise _Any
        yield str(path.parts[0])
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _looked_up(one, root)


def _called(node: Node, takes: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield what the functions have parameters for that a node runs."""
    execs = [*node.parallel_execs, *node.foreach_execs, *node.subflow_execs]
    execs += [Exec(func=name) for name in node.parallel_services]
    if node.kind == "executor" or (node.kind == "foreach" and not node.foreach_execs):
        execs.append(Exec(func=node.func, service=node.service))
    if node.kind == "parallel" and not execs:
        raise _Any  # its services are a parameter
    for one in execs:
        names = takes.get(one.func or one.service) if (one.exec_type or node.exec_type) == _LOCAL else None
        if names is None or "params" in names:
            raise _Any
        yield from names
