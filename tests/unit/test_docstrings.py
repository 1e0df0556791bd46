"""Docstrings of the product can be understood alone: docs/contributing.md, Language."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import orchestrator

PRODUCT = Path(orchestrator.__file__).parent
WITHOUT_NOUN = re.compile(r"(It|Its|They|Them|Their|Those|These|Such|Who|Whose|That|Of|Say|Take note)\b")
"""First words that omit the subject of the docstring, or that no reference manual uses."""


def docstrings() -> Iterator[tuple[str, str]]:
    for path in [*PRODUCT.rglob("*.py"), *(PRODUCT / "workers").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield f"{path.relative_to(PRODUCT)}:{node.lineno}", text


def test_docstrings_begin_with_their_subject() -> None:
    found = list(docstrings())
    assert len(found) > 5_000
    assert {place: text for place, text in found if WITHOUT_NOUN.match(text)} == {}
