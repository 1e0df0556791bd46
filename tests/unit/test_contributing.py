"""docs/contributing.md names the true places of code and tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "contributing.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*`[^|]+) \|$", PAGE, re.MULTILINE)


def missing(cell: str, *roots: Path) -> list[str]:
    return [path for path in re.findall(r"`([^`]+)`", cell) if not any((root / path).exists() for root in roots)]


def test_the_page_has_a_table_of_features() -> None:
    assert len(ROWS) > 30


@pytest.mark.parametrize(("feature", "code", "tests"), ROWS, ids=[row[0] for row in ROWS])
def test_code_and_tests_of_a_feature_are_where_the_table_says(feature: str, code: str, tests: str) -> None:
    assert missing(code, REPOSITORY / "orchestrator", REPOSITORY) == []
    assert missing(tests, REPOSITORY / "tests") == []


def test_each_package_of_the_product_has_a_row() -> None:
    product = REPOSITORY / "orchestrator"
    named = {Path(path) for _, code, _ in ROWS for path in re.findall(r"`([^`]+)`", code)}
    packages = {file.parent.relative_to(product) for file in product.rglob("*.py")} - {Path()}

    assert [
        str(package)
        for package in sorted(packages)
        if not any(package in (path, *path.parents) or path in package.parents for path in named)
    ] == []


def test_the_rest_of_the_page_names_existing_paths() -> None:
    text = PAGE.partition("## Code and tests")[0]
    paths = [path for path in re.findall(r"`([\w/.]+)`", text) if "/" in path]

    assert len(paths) > 5
    assert [path for path in paths if missing(f"`{path}`", REPOSITORY, REPOSITORY / "orchestrator")] == []
