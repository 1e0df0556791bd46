"""Checks of edges: unknown targets, actions that never occur, unreachable nodes, and cycles without an exit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from orchestrator.domain.flow.definition import DEFAULT, ERROR, TIMEOUT
from orchestrator.domain.problems import Path, Problem, for_message
from orchestrator.errors import did_you_mean

_EDGE_KEYS = ("from", "action", "to")
_ALWAYS = frozenset((DEFAULT, ERROR, TIMEOUT))
"""Actions for which every node may have an edge."""
_MAX_NAMED = 20
_MAX_COMPARISONS = 1_000_000
"""Pairs of characters compared in one flow to find misspelled actions, at most: a million take some 0.1 seconds."""


def unknown_keys(plain: Mapping[str, Any], keys: Collection[str], path: Path, what: str) -> Iterator[Problem]:
    """Yield unknown keys."""
    for key in plain:
        if key not in keys:
            yield Problem((*path, key), f"{what} has no {key!r}.{did_you_mean(str(key), keys)}")


def of_edges(plain: dict[str, Any], nodes: dict[str, Any], path: Path) -> Iterator[Problem]:
    """Yield problems with a flow's start and edges."""
    start = plain.get("start")
    if not isinstance(start, str) or start not in nodes:
        hint = did_you_mean(str(start), nodes)
        yield Problem((*path, "start"), f"start names a node; there is no {start!r}.{hint}")
    edges = plain.get("edges") or []
    if not isinstance(edges, list):
        yield Problem((*path, "edges"), "edges is a list of {from, action, to}.")
        return
    successors: dict[str, list[str]] = {}
    unused: dict[tuple[str, str, str], Path] = {}
    """Edges that no run ever takes, by (to, from, action)."""
    seen: dict[tuple[str, str], int] = {}
    possible_actions: dict[str, set[str] | None] = {}
    """The actions that nodes can end with, computed once per node."""
    for number, edge in enumerate(edges):
        at = (*path, "edges", number)
        fields = edge if isinstance(edge, dict) else {}
        source, to, action = fields.get("from"), fields.get("to") or "", fields.get("action") or DEFAULT
        if not isinstance(source, str) or not isinstance(to, str) or not isinstance(action, str):
            yield Problem(at, f"an edge is a mapping {{from, action, to}} of texts; found {for_message(edge)}.")
            continue
        yield from unknown_keys(fields, _EDGE_KEYS, at, "an edge")
        if source not in nodes:
            yield Problem((*at, "from"), f"edge from {source!r}: there is no such node.{did_you_mean(source, nodes)}")
        if to and to not in nodes:
            hint = did_you_mean(to, nodes)
            yield Problem((*at, "to"), f"edge {action!r} from {source!r} leads to {to!r}: there is no such node.{hint}")
        if (source, action) in seen:
            yield Problem(at, f"node {source!r} has two edges for the action {action!r}.")
        seen[source, action] = number
        if source not in possible_actions:
            possible_actions[source] = _actions(nodes.get(source))
        possible = possible_actions[source]
        if possible is not None and action not in possible and action not in _ALWAYS:
            unused[to, source, action] = at
            continue
        successors.setdefault(source, []).append(to if to in nodes else "")  # unknown targets count as exits
    if isinstance(start, str) and start in nodes:
        yield from _reachable(nodes, start, successors, seen, unused, possible_actions, path)


def _actions(node: Any) -> set[str] | None:
    """Return the actions that a node can end with, except those of failures. None if they depend on its output."""
    if not isinstance(node, dict):
        return None
    post = node.get("post") if isinstance(node.get("post"), dict) else {}
    assert isinstance(post, dict)
    if node.get("kind") == "choice" and not post.get("action_key") and not node.get("choice_key"):
        cases = [case.get("action") for case in node.get("choice_cases") or [] if isinstance(case, dict)]
        names = [*cases, node.get("default_action") or post.get("action_static") or DEFAULT, post.get("action_static")]
    elif post.get("action_static") and node.get("kind") != "choice":
        names = [post["action_static"]]
    elif node.get("kind") == "approval" or post.get("action_key"):
        return None
    else:
        names = [node.get("default_action") or DEFAULT]
    return {action for action in names if isinstance(action, str) and action}


def _reachable(
    nodes: dict[str, Any],
    start: str,
    successors: Mapping[str, list[str]],
    seen: Mapping[tuple[str, str], int],
    unused: Mapping[tuple[str, str, str], Path],
    possible_actions: Mapping[str, set[str] | None],
    path: Path,
) -> Iterator[Problem]:
    """Yield nodes that no run reaches, and unused edges that look like mistakes.

    An unused edge is a mistake if it is the only one to its node, or if its action resembles one without an edge.
    """
    reached = _closure([start], successors)
    missed = set()
    unconnected: dict[str, tuple[list[str], int]] = {}
    """By node, the actions without an edge, and their total length."""
    work = 0
    for (to, source, action), at in unused.items():
        possible = possible_actions[source] or set()
        if source not in unconnected:
            keys = sorted(one for one in possible if (source, one) not in seen)
            unconnected[source] = keys, sum(map(len, keys))
        candidates, characters = unconnected[source]
        work += len(action) * characters
        is_misspelled = work <= _MAX_COMPARISONS and bool(did_you_mean(action, candidates))
        if (to in nodes and to not in reached) or is_misspelled:
            missed.add(to)
            yield Problem(at, f"node {source!r} never ends with the action {action!r}: it ends with {_some(possible)}.")
    for key in nodes:
        if key not in reached and key not in missed:
            yield Problem((*path, "nodes", key), f"node {key!r} is never reached: no way leads to it from {start!r}.")
    predecessors: dict[str, list[str]] = {}
    for source, targets in successors.items():
        for to in targets:
            predecessors.setdefault(to, []).append(source)
    ends = [key for key in nodes if "" in successors.get(key, ()) or _may_end(nodes[key], key, seen)]
    leaving = _closure(ends, predecessors)
    for key in nodes:
        if key in reached and key not in leaving:
            keys = sorted(other for other in reached if other not in leaving and other in nodes)
            first = ", ".join(repr(name) for name in keys[:5])
            yield Problem(
                (*path, "nodes", key),
                f"node {key!r} stands in a cycle that has no way out ({first}): let one of them end with an action "
                f"that has no edge, or that leads out.",
            )
            return


def _some(actions: Collection[str]) -> str:
    """Return the list of actions for a message, or the first of very many."""
    listed = ", ".join(map(repr, sorted(actions)[:_MAX_NAMED]))
    return f"{listed} and {len(actions) - _MAX_NAMED:,} more" if len(actions) > _MAX_NAMED else listed


def _may_end(node: Any, key: str, seen: Mapping[tuple[str, str], int]) -> bool:
    """Return whether a node can end with an action that has no edge."""
    if (key, DEFAULT) in seen:
        return False
    if not isinstance(node, dict):
        return True
    post = node.get("post") if isinstance(node.get("post"), dict) else {}
    assert isinstance(post, dict)
    kind = node.get("kind") or "executor"
    if kind == "choice" and not post.get("action_key"):
        cases = [case.get("action") for case in node.get("choice_cases") or [] if isinstance(case, dict)]
        return any((key, action) not in seen for action in [*cases, node.get("default_action") or DEFAULT])
    if kind == "approval" and not post.get("action_static"):
        return (key, "approved") not in seen or (key, "rejected") not in seen
    if post.get("action_static"):
        return (key, post["action_static"]) not in seen
    return True


def _closure(starts: list[str], successors: Mapping[str, list[str]]) -> set[str]:
    reached = set(starts)
    pending = list(starts)
    while pending:
        for to in successors.get(pending.pop(), ()):
            if to not in reached:
                reached.add(to)
                pending.append(to)
    return reached
