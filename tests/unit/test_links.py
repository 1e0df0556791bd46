"""Links in the documentation, and paths in docstrings and comments, have existing targets."""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("examples/*.md")]
SOURCES = sorted(
    file
    for top in ("orchestrator", "workers", "migrations", "tests", "examples")
    for file in (REPOSITORY / top).rglob("*.py")
)
ROOTS = [REPOSITORY, REPOSITORY / "orchestrator", REPOSITORY / "tests"]
"""Roots of paths in code, beside the folder of the file that names the path."""
FOLDERS = sorted(
    {folder.name for root in ROOTS for folder in root.iterdir() if folder.is_dir() and folder.name[0] not in "._"}
)
PATH = re.compile(rf"(?<![\w/.:{{-])(?:(?:{'|'.join(FOLDERS)})/[\w/.-]*[\w…]|(?<=`)[\w/]+\.(?:py|md|sh)(?=`))")


@cache
def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one) for one in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}  # as GitHub generates them


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_has_a_target(page: Path) -> None:
    dead = []
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
        file = (page.parent / target) if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(f"{target}#{anchor}")

    assert dead == []


def comments(file: Path) -> Iterator[str]:
    """Yield the docstrings of a file, including those of attributes, and its comments."""
    source = file.read_text(encoding="utf-8")
    if PATH.search(source) is None:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def path_exists(path: str, file: Path) -> bool:
    above = file.parents[: len(file.relative_to(REPOSITORY).parts) - 1]
    return any(exists_below(root, path) for root in (*ROOTS, *above))


@cache
def exists_below(root: Path, path: str) -> bool:
    return any(root.glob(path.replace("…", "*"))) if "…" in path else (root / path).exists()


@pytest.mark.slow
def test_every_path_named_in_code_exists() -> None:
    gone = [
        f"{file.relative_to(REPOSITORY)}: {path}"
        for file in SOURCES
        for text in comments(file)
        for path in PATH.findall(text)
        if not path_exists(path, file)
    ]

    assert gone == []


@pytest.mark.slow
def test_the_site_build_fails_on_dead_anchors_and_unlisted_guides(
    tmp_path: Path,
) -> None:
    config = (REPOSITORY / ".mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n")[0]
    (tmp_path / ".mkdocs.yml").write_text(config + "nav: [index.md]\n", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    shutil.copy(REPOSITORY / "docs" / ".site.py", tmp_path / "docs")
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n[dead](#end)\n")
    (tmp_path / "docs" / "orphan.md").write_text("# Nobody finds it\n")
    command = re.search(r"mkdocs\"( build .*?) &&", (REPOSITORY / "scripts" / "docs").read_text())
    assert command is not None
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command[1].split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "no such anchor" in done.stderr
    assert "orphan.md" in done.stderr
