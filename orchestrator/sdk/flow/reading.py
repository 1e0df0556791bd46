"""Flows in files: YAML or JSON to a `Flow`. Everything that is wrong is reported at once, each with its line:

order.yaml:12: node 'ship': there is no kind 'exectuor'. Did you mean 'executor'?
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.domain.flow import checks
from orchestrator.domain.flow.checks import ANYTHING, Known
from orchestrator.domain.flow.definition import Flow, body_of, from_plain
from orchestrator.domain.problems import Problem
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.dag import document, schedule_fields
from orchestrator.sdk.dag.fields import Bad, Fields, line_of, refusal, refuse, unreadable_text

_DEEPEST = 20

Find = Callable[[str, int | None], tuple[int, dict[str, Any]] | None]
"""Returns the version and the body of a published flow, of its newest version if none is named."""


def load(path: str | Path, known: Known = ANYTHING, find: Find | None = None) -> Flow:
    return loads(document.text_of(path), str(path), known, find)


def loads(text: str, source: str = "<text>", known: Known = ANYTHING, find: Find | None = None) -> Flow:
    """Read a flow from a text; `source` is what messages call it."""
    root, unreadable = document.read(text)
    if root is None:
        raise unreadable_text(source, unreadable, "a flow")
    plain, known = _looked_up(root.plain(), known, find)
    plain, unfit = _with_schedule(plain)
    problems = [*checks.check(plain, known), *unfit]
    refuse(source, unreadable, ((line_of(root, problem.path), problem.message) for problem in problems))
    return from_plain(plain)


def from_data(plain: Any, source: str = "flow", known: Known = ANYTHING, find: Find | None = None) -> Flow:
    if checks.count_nodes(plain) > checks.MOST_NODES:
        raise InvalidWorkflow(f"{source}: {checks.TOO_MANY}")
    try:
        document.from_plain(plain)
    except InvalidWorkflow as error:
        raise InvalidWorkflow(f"{source}: {error}") from None
    plain, known = _looked_up(plain, known, find)
    plain, unfit = _with_schedule(plain)
    found = [f"{source}: {problem.message}" for problem in [*checks.check(plain, known), *unfit]]
    if found:
        raise refusal(found)
    return from_plain(plain)


def checked(flow: Flow) -> Flow:
    """Return a flow that was made elsewhere, or say everything that is wrong with it, its schedule left out."""
    plain = body_of(msgspec.structs.replace(flow, schedule=None))
    if found := [f"flow: {problem.message}" for problem in checks.check(plain)]:
        raise refusal(found)
    return flow


def _with_schedule(plain: Any) -> tuple[Any, list[Problem]]:
    """Return a flow with its schedule as it is kept, and what is wrong with that."""
    if not isinstance(plain, dict) or plain.get("schedule") is None:
        return plain, []
    reader = Fields()
    read = schedule_fields.schedule(reader, document.from_plain(plain["schedule"]), ("schedule",))
    unfit = [Problem(one.path, f"{'.'.join(map(str, one.path))}: {one.message}") for one in reader.problems]
    return {**plain, "schedule": None if isinstance(read, Bad) else read}, unfit


def _looked_up(plain: Any, known: Known, find: Find | None) -> tuple[Any, Known]:
    """Return a flow with those that it names; where they cannot be looked up, they stand there without nodes."""
    if find is not None:
        return embedded(plain, find), known
    return embedded(plain, lambda _, version: (version or 0, {"start": "", "nodes": {}})), known._replace(flows=False)


def embedded(plain: Any, find: Find) -> Any:
    """Return a flow in which those that it names stand themselves, in the version that they have now.

    So a run never changes its course because another flow is published meanwhile.
    """
    return _Embedding(find).of_flow(plain, ())


class _Embedding:
    """Puts flows into the nodes that name them, until there are too many nodes."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._found: dict[tuple[str, int | None], tuple[dict[str, Any], int] | None] = {}
        """By name and version: a flow, and how many nodes it has. However many nodes name it, it is read once."""
        self._nodes = 0

    def of_flow(self, plain: Any, above: tuple[str, ...]) -> Any:
        if not isinstance(plain, dict) or not isinstance(plain.get("nodes"), dict) or len(above) > _DEEPEST:
            return plain
        self._count(len(plain["nodes"]))
        return {**plain, "nodes": {key: self._of_node(node, above) for key, node in plain["nodes"].items()}}

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > checks.MOST_NODES:
            raise InvalidWorkflow(f"The flow has {checks.TOO_MANY}")

    def _of_node(self, node: Any, above: tuple[str, ...]) -> Any:
        inner = node.get("subflow") if isinstance(node, dict) else None
        if isinstance(inner, str):
            inner = {"flow": inner}
        if not isinstance(inner, dict):
            return node
        name, version = inner.get("flow"), inner.get("version")
        if not isinstance(name, str) or "nodes" in inner:
            return {**node, "subflow": self.of_flow(inner, (*above, *([name] if isinstance(name, str) else [])))}
        if name in above:
            raise InvalidWorkflow(
                f"Flow {name!r} stands in itself: {' → '.join([*above, name])}. A loop is an edge that leads back."
            )
        found = self._named(name, version if isinstance(version, int) and version > 0 else None)
        if found is None:
            return {**node, "subflow": inner}
        self._count(found[1])
        return {**node, "subflow": found[0]}  # what is published holds its own already

    def _named(self, name: str, version: int | None) -> tuple[dict[str, Any], int] | None:
        if (name, version) not in self._found:
            found = self._find(name, version)
            taken = None if found is None else {**found[1], "flow": name, "version": found[0]}
            self._found[name, version] = None if taken is None else (taken, checks.count_nodes(taken))
        return self._found[name, version]
