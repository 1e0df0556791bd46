"""Flows in files: YAML or JSON to a `Flow`. Everything that is wrong is reported at once, each with its line:

order.yaml:12: node 'ship': there is no kind 'exectuor'. Did you mean 'executor'?
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.domain.flow import checks
from orchestrator.domain.flow.checks import ANYTHING, Flaw, Known
from orchestrator.domain.flow.definition import Flow, body_of
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.dag import document, schedule_fields
from orchestrator.sdk.dag.document import Node
from orchestrator.sdk.dag.fields import Bad, Fields
from orchestrator.sdk.dag.problems import refusal

_DEEPEST = 20

Find = Callable[[str, int | None], tuple[int, dict[str, Any]] | None]
"""Returns the version and the body of a published flow, of its newest version if none is named."""


def load(path: str | Path, known: Known = ANYTHING, find: Find | None = None) -> Flow:
    """Read a flow from a file."""
    return loads(document.text_of(path), str(path), known, find)


def loads(text: str, source: str = "<text>", known: Known = ANYTHING, find: Find | None = None) -> Flow:
    """Read a flow from a text; `source` is what messages call it."""
    root, unreadable = document.read(text)
    lines = [(flaw.line, f"{source}:{flaw.line}: {flaw.message}") for flaw in unreadable]
    if root is None:
        raise refusal([line for _, line in lines] or [f"{source}:1: expected a flow, found nothing."])
    plain, known = _looked_up(root.plain(), known, find)
    plain, unfit = _with_schedule(plain)
    for flaw in [*checks.first_flaws(plain, known), *unfit]:
        line = _line(root, flaw)
        lines.append((line, f"{source}:{line}: {flaw.message}"))
    if lines:
        raise refusal([line for _, line in sorted(lines, key=lambda pair: pair[0])])
    return checks.definition(plain)


def from_data(plain: Any, source: str = "flow", known: Known = ANYTHING, find: Find | None = None) -> Flow:
    """Read a flow from plain data in the shape of a file."""
    try:
        document.from_plain(plain)
    except InvalidWorkflow as error:
        raise InvalidWorkflow(f"{source}: {error}") from None
    plain, known = _looked_up(plain, known, find)
    plain, unfit = _with_schedule(plain)
    found = [f"{source}: {flaw.message}" for flaw in [*checks.first_flaws(plain, known), *unfit]]
    if found:
        raise refusal(found)
    return checks.definition(plain)


def checked(flow: Flow) -> Flow:
    """Return a flow that was made elsewhere, or say everything that is wrong with it, its schedule left out."""
    plain = body_of(msgspec.structs.replace(flow, schedule=None))
    if found := [f"flow: {flaw.message}" for flaw in checks.first_flaws(plain)]:
        raise refusal(found)
    return flow


def _with_schedule(plain: Any) -> tuple[Any, list[Flaw]]:
    """Return a flow with its schedule as it is kept, and what is wrong with that."""
    if not isinstance(plain, dict) or plain.get("schedule") is None:
        return plain, []
    reader = Fields()
    read = schedule_fields.schedule(reader, document.from_plain(plain["schedule"]), ("schedule",))
    unfit = [Flaw(one.path, f"{'.'.join(map(str, one.path))}: {one.message}") for one in reader.problems]
    return {**plain, "schedule": None if isinstance(read, Bad) else read}, unfit


def _looked_up(plain: Any, known: Known, find: Find | None) -> tuple[Any, Known]:
    """Return a flow with those that it names; where nobody can look for them, they stand there without nodes."""
    if find is not None:
        return embedded(plain, find), known
    return embedded(plain, lambda _, version: (version or 0, {"start": "", "nodes": {}})), known._replace(flows=False)


def embedded(plain: Any, find: Find, above: tuple[str, ...] = ()) -> Any:
    """Return a flow in which those that it names stand themselves, in the version that they have now.

    So a run never changes its course because another flow is published meanwhile.
    """
    if not isinstance(plain, dict) or not isinstance(plain.get("nodes"), dict) or len(above) > _DEEPEST:
        return plain
    return {**plain, "nodes": {key: _embedded(node, find, above) for key, node in plain["nodes"].items()}}


def _embedded(node: Any, find: Find, above: tuple[str, ...]) -> Any:
    inner = node.get("subflow") if isinstance(node, dict) else None
    if isinstance(inner, str):
        inner = {"flow": inner}
    if not isinstance(inner, dict):
        return node
    name, version = inner.get("flow"), inner.get("version")
    if isinstance(name, str) and "nodes" not in inner:
        if name in above:
            raise InvalidWorkflow(
                f"Flow {name!r} stands in itself: {' → '.join([*above, name])}. A loop is an edge that leads back."
            )
        found = find(name, version if isinstance(version, int) and version > 0 else None)
        if found is None:
            return {**node, "subflow": inner}
        inner = {**found[1], "flow": name, "version": found[0]}
        return {**node, "subflow": inner}  # what is published holds its own already
    return {**node, "subflow": embedded(inner, find, (*above, *([name] if isinstance(name, str) else [])))}


def _line(root: Node, flaw: Flaw) -> int:
    """Return the line of a place, or of the last part of the way to it that there is."""
    node, line = root, root.line
    for part in flaw.place:
        if isinstance(part, str) and isinstance(node.value, dict) and part in node.value:
            line, node = node.value[part]
        elif isinstance(part, int) and isinstance(node.value, list) and part < len(node.value):
            node = node.value[part]
            line = node.line
        else:
            break
    return line
