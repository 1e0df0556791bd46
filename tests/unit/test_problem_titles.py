"""Titles of problems (RFC 9457) are short sentences: a subject, its problem, and no full stop."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import orchestrator.api

_SENTENCE = re.compile(r"(The|It|There|Postgres|Redis) [a-z].*\w")
_CALLS = {"refused": 1, "_closing": 1}
"""The index of the title among the arguments of each function."""


def titles() -> Iterator[tuple[str, str]]:
    for path in sorted(Path(orchestrator.api.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            given = [word.value for word in node.keywords if name == "Problem" and word.arg == "title"]
            if name in _CALLS:
                given.append(node.args[_CALLS[name]])
            for title in given:
                if isinstance(title, ast.Constant):
                    yield path.name, str(title.value)


def test_titles_are_short_sentences() -> None:
    from orchestrator.api.problems import _STATUSES

    found = [*titles(), *(("problems.py", title) for _, _, title in _STATUSES)]
    assert len(found) > 30
    assert [one for one in found if not _SENTENCE.fullmatch(one[1])] == []
