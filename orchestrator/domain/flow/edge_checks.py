"""Edges that lead nowhere, actions that never come, nodes that are never reached, and cycles without a way out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from orchestrator.domain.flow.definition import DEFAULT, ERROR, TIMEOUT
from orchestrator.domain.problems import Path, Problem, shown
from orchestrator.errors import did_you_mean

_EDGE_KEYS = ("from", "action", "to")
_ALWAYS = frozenset((DEFAULT, ERROR, TIMEOUT))
"""Actions for which any node may have an edge."""
_MOST_NAMED = 20
_MOST_WORK = 1_000_000
"""Pairs of characters that are compared in one flow, of the actions of edges that no run takes and of those that they
may have meant: a million take some 0.1 seconds."""


def unknown_keys(plain: Mapping[str, Any], keys: Collection[str], path: Path, what: str) -> Iterator[Problem]:
    """Yield keys that mean nothing."""
    for key in plain:
        if key not in keys:
            yield Problem((*path, key), f"{what} has no {key!r}.{did_you_mean(str(key), keys)}")


def of_edges(plain: dict[str, Any], nodes: dict[str, Any], path: Path) -> Iterator[Problem]:
    """Yield what is wrong with the edges of a flow, and with its start."""
    start = plain.get("start")
    if not isinstance(start, str) or start not in nodes:
        hint = did_you_mean(str(start), nodes)
        yield Problem((*path, "start"), f"start names a node; there is no {start!r}.{hint}")
    edges = plain.get("edges") or []
    if not isinstance(edges, list):
        yield Problem((*path, "edges"), "edges is a list of {from, action, to}.")
        return
    ways: dict[str, list[str]] = {}
    never: dict[tuple[str, str, str], Path] = {}
    """Edges that no run ever takes: to, from, action."""
    seen: dict[tuple[str, str], int] = {}
    endings: dict[str, set[str] | None] = {}
    """The actions that nodes can end with, worked out once for all edges that lead from them."""
    for number, edge in enumerate(edges):
        at = (*path, "edges", number)
        found = edge if isinstance(edge, dict) else {}
        source, to, action = found.get("from"), found.get("to") or "", found.get("action") or DEFAULT
        if not isinstance(source, str) or not isinstance(to, str) or not isinstance(action, str):
            yield Problem(at, f"an edge is a mapping {{from, action, to}} of texts; found {shown(edge)}.")
            continue
        yield from unknown_keys(found, _EDGE_KEYS, at, "an edge")
        if source not in nodes:
            yield Problem((*at, "from"), f"edge from {source!r}: there is no such node.{did_you_mean(source, nodes)}")
        if to and to not in nodes:
            hint = did_you_mean(to, nodes)
            yield Problem((*at, "to"), f"edge {action!r} from {source!r} leads to {to!r}: there is no such node.{hint}")
        if (source, action) in seen:
            yield Problem(at, f"node {source!r} has two edges for the action {action!r}.")
        seen[source, action] = number
        if source not in endings:
            endings[source] = _actions(nodes.get(source))
        possible = endings[source]
        if possible is not None and action not in possible and action not in _ALWAYS:
            never[to, source, action] = at
            continue
        ways.setdefault(source, []).append(to if to in nodes else "")  # one mistake is enough: it leads out
    if isinstance(start, str) and start in nodes:
        yield from _reachable(nodes, start, ways, seen, never, endings, path)


def _actions(node: Any) -> set[str] | None:
    """Return the actions that a node can end with, beside those of failures; None if only its output says."""
    if not isinstance(node, dict):
        return None
    post = node.get("post") if isinstance(node.get("post"), dict) else {}
    assert isinstance(post, dict)
    if node.get("kind") == "choice" and not post.get("action_key") and not node.get("choice_key"):
        cases = [case.get("action") for case in node.get("choice_cases") or [] if isinstance(case, dict)]
        found = [*cases, node.get("default_action") or post.get("action_static") or DEFAULT, post.get("action_static")]
    elif post.get("action_static") and node.get("kind") != "choice":
        found = [post["action_static"]]
    elif node.get("kind") == "approval" or post.get("action_key"):
        return None
    else:
        found = [node.get("default_action") or DEFAULT]
    return {action for action in found if isinstance(action, str) and action}


def _reachable(
    nodes: dict[str, Any],
    start: str,
    ways: Mapping[str, list[str]],
    seen: Mapping[tuple[str, str], int],
    never: Mapping[tuple[str, str, str], Path],
    endings: Mapping[str, set[str] | None],
    path: Path,
) -> Iterator[Problem]:
    """Yield nodes that no run comes to, and of the edges that none ever takes those that are mistakes.

    Such an edge does no harm, unless it is the only one to its node, or is like an action that has none.
    """
    reached = _closure([start], ways)
    missed = set()
    without: dict[str, tuple[list[str], int]] = {}
    """Actions of nodes for which they have no edge, and the characters of these."""
    work = 0
    for (to, source, action), at in never.items():
        possible = endings[source] or set()
        if source not in without:
            names = sorted(one for one in possible if (source, one) not in seen)
            without[source] = names, sum(map(len, names))
        others, characters = without[source]
        work += len(action) * characters
        is_like_one = work <= _MOST_WORK and bool(did_you_mean(action, others))
        if (to in nodes and to not in reached) or is_like_one:
            missed.add(to)
            yield Problem(at, f"node {source!r} never ends with the action {action!r}: it ends with {_some(possible)}.")
    for key in nodes:
        if key not in reached and key not in missed:
            yield Problem((*path, "nodes", key), f"node {key!r} is never reached: no way leads to it from {start!r}.")
    back: dict[str, list[str]] = {}
    for source, targets in ways.items():
        for to in targets:
            back.setdefault(to, []).append(source)
    ends = [key for key in nodes if "" in ways.get(key, ()) or _may_end(nodes[key], key, seen)]
    leaving = _closure(ends, back)
    for key in nodes:
        if key in reached and key not in leaving:
            names = sorted(other for other in reached if other not in leaving and other in nodes)
            first = ", ".join(repr(name) for name in names[:5])
            yield Problem(
                (*path, "nodes", key),
                f"node {key!r} stands in a cycle that has no way out ({first}): let one of them end with an action "
                f"that has no edge, or that leads out.",
            )
            return


def _some(actions: Collection[str]) -> str:
    """Return actions as they stand in a message, or the first of very many."""
    said = ", ".join(map(repr, sorted(actions)[:_MOST_NAMED]))
    return f"{said} and {len(actions) - _MOST_NAMED:,} more" if len(actions) > _MOST_NAMED else said


def _may_end(node: Any, key: str, seen: Mapping[tuple[str, str], int]) -> bool:
    """Say whether a node can end with an action that leads nowhere."""
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


def _closure(found: list[str], ways: Mapping[str, list[str]]) -> set[str]:
    reached = set(found)
    waiting = list(found)
    while waiting:
        for to in ways.get(waiting.pop(), ()):
            if to not in reached:
                reached.add(to)
                waiting.append(to)
    return reached
