"""Patterns of strings that msgspec checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

import orchestrator
from orchestrator.domain.plain import anchored


@pytest.mark.parametrize(
    ("text", "fits"), [("ab", True), ("ab\n", False), ("\nab", False), ("a", True), ("abx", False)]
)
def test_a_pattern_matches_only_whole_strings(text: str, fits: bool) -> None:
    type_ = Annotated[str, msgspec.Meta(pattern=anchored("a|ab"))]
    if fits:
        assert msgspec.convert(text, type_) == text
    else:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(text, type_)


def test_no_pattern_accepts_a_trailing_line_break() -> None:
    ends = re.compile(r'pattern=[rf]*"[^"\n]*(?<!\*)\$"')
    package = Path(orchestrator.__file__).parent
    files = [file for folder in (package, package / "workers") for file in folder.rglob("*.py")]
    assert len(files) > 400
    assert [f"{file.name}: {found}" for file in files for found in ends.findall(file.read_text())] == []
