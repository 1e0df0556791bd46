"""Problems of a workflow: where in the file, and in which words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from orchestrator.domain.dag.operators import shortened
from orchestrator.domain.problems import Path, Problem
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.dag.document import Flaw, Node

_MOST_PROBLEMS = 50
_LONGEST_SHOWN = 128


def _follow(root: Node, path: Path) -> Iterator[tuple[Node, int]]:
    """Yield each part on the way to a place, with its line, as far as the way goes."""
    node = root
    for key in path:
        if isinstance(node.value, dict) and key in node.value:
            entry = node.value[str(key)]
            node = entry.node
            yield node, entry.line if isinstance(node.value, (dict, list)) else node.line
        elif isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            yield node, node.line
        elif isinstance(key, int):
            yield node, node.line  # one alone, where a list could stand
        else:
            return


def line_of(root: Node, path: Path) -> int:
    """Return the line of a place, or of what is nearest to it."""
    line = root.line
    for _, line in _follow(root, path):  # noqa: B007
        pass
    return line


def holds(root: Node, path: Path) -> bool:
    """Say whether a document has something at a place."""
    return sum(1 for _ in _follow(root, path)) == len(path)


def words(problem: Problem) -> str:
    """Return a problem as people read it. A last index is left out: the message names the value itself."""
    path = problem.path[:-1] if problem.path and isinstance(problem.path[-1], int) else problem.path
    names = (f"[{key}]" if isinstance(key, int) else f".{_shown(key)}" for key in path)
    place = "".join(names).removeprefix(".")
    return f"{place}: {problem.message}" if place else problem.message


def _shown(key: str) -> str:
    return key if key.isprintable() and len(key) <= _LONGEST_SHOWN else shortened(key, _LONGEST_SHOWN)


def unreadable_text(source: str, flaws: Sequence[Flaw], expected: str) -> InvalidWorkflow:
    """Return an error that says why a text cannot be read at all."""
    return refusal(_at_lines(source, flaws or [(1, f"expected {expected}, found nothing.")]))


def refuse(source: str, flaws: Iterable[Flaw], problems: Iterable[tuple[int, str]]) -> None:
    """Say everything that is wrong with a text, if anything is, from its first line on."""
    if lines := sorted([*flaws, *problems], key=lambda found: found[0]):
        raise refusal(_at_lines(source, lines))


def _at_lines(source: str, found: Iterable[tuple[int, str]]) -> list[str]:
    return [f"{source}:{line}: {message}" for line, message in found]


def refusal(lines: Iterable[str]) -> InvalidWorkflow:
    """Return an error that says what is wrong, in as many lines as people read."""
    every = list(lines)
    more = [f"… and {len(every) - _MOST_PROBLEMS} more."] if len(every) > _MOST_PROBLEMS else []
    return InvalidWorkflow("\n".join(every[:_MOST_PROBLEMS] + more))
