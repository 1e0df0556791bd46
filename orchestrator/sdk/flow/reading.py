"""Read flows from YAML or JSON files. All problems are reported together, each with its line:

order.yaml:12: node 'ship': there is no kind 'exectuor'. Did you mean 'executor'?
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.domain.flow import checks
from orchestrator.domain.flow.checks import ANY_NAMES, KnownNames
from orchestrator.domain.flow.definition import Flow, body_of, from_plain
from orchestrator.domain.problems import Problem
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.dag import document, schedule_fields
from orchestrator.sdk.dag.fields import Bad, Fields, line_of, refusal, refuse, unreadable_text

_MAX_DEPTH = 20

Find = Callable[[str, int | None], tuple[int, dict[str, Any]] | None]
"""Returns the version and body of a published flow; without a version, of the newest one."""


def load(path: str | Path, known: KnownNames = ANY_NAMES, find: Find | None = None) -> Flow:
    return loads(document.text_of(path), str(path), known, find)


def loads(text: str, source: str = "<text>", known: KnownNames = ANY_NAMES, find: Find | None = None) -> Flow:
    """Read a flow from a string. `source` names it in messages."""
    root, unreadable = document.read(text)
    if root is None:
        raise unreadable_text(source, unreadable, "a flow")
    plain, known = _with_subflows(root.plain(), known, find)
    plain, schedule_problems = _with_schedule(plain)
    problems = [*checks.check(plain, known), *schedule_problems]
    refuse(source, unreadable, ((line_of(root, problem.path), problem.message) for problem in problems))
    return from_plain(plain)


def from_data(plain: Any, source: str = "flow", known: KnownNames = ANY_NAMES, find: Find | None = None) -> Flow:
    if checks.count_nodes(plain) > checks.MAX_NODES:
        raise InvalidWorkflow(f"{source}: {checks.TOO_MANY}")
    try:
        document.from_plain(plain)
    except InvalidWorkflow as error:
        raise InvalidWorkflow(f"{source}: {error}") from None
    plain, known = _with_subflows(plain, known, find)
    plain, schedule_problems = _with_schedule(plain)
    lines = [f"{source}: {problem.message}" for problem in [*checks.check(plain, known), *schedule_problems]]
    if lines:
        raise refusal(lines)
    return from_plain(plain)


def checked(flow: Flow) -> Flow:
    """Check a flow that was built elsewhere, except its schedule. Raise InvalidWorkflow with all its problems."""
    plain = body_of(msgspec.structs.replace(flow, schedule=None))
    if lines := [f"flow: {problem.message}" for problem in checks.check(plain)]:
        raise refusal(lines)
    return flow


def _with_schedule(plain: Any) -> tuple[Any, list[Problem]]:
    """Return a flow with its schedule in stored form, and the problems of the schedule."""
    if not isinstance(plain, dict) or plain.get("schedule") is None:
        return plain, []
    reader = Fields()
    read = schedule_fields.schedule(reader, document.from_plain(plain["schedule"]), ("schedule",))
    problems = [Problem(found.path, f"{'.'.join(map(str, found.path))}: {found.message}") for found in reader.problems]
    return {**plain, "schedule": None if isinstance(read, Bad) else read}, problems


def _with_subflows(plain: Any, known: KnownNames, find: Find | None) -> tuple[Any, KnownNames]:
    """Return a flow with the flows that it names embedded; without nodes if they cannot be looked up."""
    if find is not None:
        return embedded(plain, find), known
    return embedded(plain, lambda _, version: (version or 0, {"start": "", "nodes": {}})), known._replace(flows=False)


def embedded(plain: Any, find: Find) -> Any:
    """Return a flow with the flows that it names embedded in their current version.

    A run therefore never changes its course because another flow is published in the meantime.
    """
    return _Embedder(find).of_flow(plain, ())


class _Embedder:
    """Embeds flows into the nodes that name them, up to the maximum number of nodes."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._flows_by_name: dict[tuple[str, int | None], tuple[dict[str, Any], int] | None] = {}
        """Flows by name and version, with their number of nodes. Each flow is read once, however many nodes name it."""
        self._nodes = 0

    def of_flow(self, plain: Any, ancestors: tuple[str, ...]) -> Any:
        if not isinstance(plain, dict) or not isinstance(plain.get("nodes"), dict) or len(ancestors) > _MAX_DEPTH:
            return plain
        self._count(len(plain["nodes"]))
        return {**plain, "nodes": {key: self._of_node(node, ancestors) for key, node in plain["nodes"].items()}}

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > checks.MAX_NODES:
            raise InvalidWorkflow(f"The flow has {checks.TOO_MANY}")

    def _of_node(self, node: Any, ancestors: tuple[str, ...]) -> Any:
        inner = node.get("subflow") if isinstance(node, dict) else None
        if isinstance(inner, str):
            inner = {"flow": inner}
        if not isinstance(inner, dict):
            return node
        name, version = inner.get("flow"), inner.get("version")
        if not isinstance(name, str) or "nodes" in inner:
            return {**node, "subflow": self.of_flow(inner, (*ancestors, *([name] if isinstance(name, str) else [])))}
        if name in ancestors:
            raise InvalidWorkflow(
                f"Flow {name!r} contains itself: {' → '.join([*ancestors, name])}. To make a loop, add an edge "
                "that leads back."
            )
        flow = self._named(name, version if isinstance(version, int) and version > 0 else None)
        if flow is None:
            return {**node, "subflow": inner}
        self._count(flow[1])
        return {**node, "subflow": flow[0]}  # a published flow already contains its subflows

    def _named(self, name: str, version: int | None) -> tuple[dict[str, Any], int] | None:
        if (name, version) not in self._flows_by_name:
            stored = self._find(name, version)
            body = None if stored is None else {**stored[1], "flow": name, "version": stored[0]}
            self._flows_by_name[name, version] = None if body is None else (body, checks.count_nodes(body))
        return self._flows_by_name[name, version]
