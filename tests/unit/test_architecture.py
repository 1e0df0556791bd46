"""docs/architecture.md names only files that exist, and names every package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
FLOORS = [ROOT, ROOT / "orchestrator"]


def files() -> list[Path]:
    """Return every Python file of the product; `workers` is a link inside the package."""
    inside = (ROOT / "orchestrator").rglob("*.py")
    return [*(path for path in inside if "workers" not in path.parts), *(ROOT / "workers").rglob("*.py")]


def quoted() -> Iterator[str]:
    """Yield the texts in backticks outside of code blocks."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))


def paths() -> list[str]:
    """Return the quoted names of files and folders."""
    return sorted({name for name in quoted() if re.fullmatch(r"[\w./]*\w/?", name) and ("/" in name or ".py" in name)})


def modules() -> list[str]:
    """Return the quoted names of modules."""
    known = {path.name.removesuffix(".py") for floor in FLOORS for path in floor.iterdir() if path.name[0] not in "._"}
    dotted = (name for name in quoted() if re.fullmatch(r"\w+(\.\w+)+", name) and not name.endswith((".py", ".md")))
    return sorted({name for name in dotted if name.split(".")[0] in known})


def listed() -> list[tuple[str, str]]:
    """Return the files in the list of packages, each with its package."""
    block = re.search(r"Packages for no single subject.*?```\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    lines = [line.split(maxsplit=1) for line in block[1].splitlines()]
    return [(room, file) for room, what in lines for file in [".", *re.findall(r"\w+\.py", what)]]


@pytest.mark.parametrize("name", paths())
def test_each_path_exists(name: str) -> None:
    found = any((floor / name).exists() for floor in FLOORS)
    assert found or ("/" not in name and name in {path.name for path in files()})


@pytest.mark.parametrize("name", modules())
def test_each_module_exists(name: str) -> None:
    path = name.removeprefix("orchestrator.").replace(".", "/")
    assert any((floor / f"{path}.py").exists() or (floor / path / "__init__.py").exists() for floor in FLOORS)


@pytest.mark.parametrize(("room", "file"), listed())
def test_each_listed_file_is_in_its_package(room: str, file: str) -> None:
    assert any((floor / room / file).exists() for floor in FLOORS)


def test_every_package_is_named() -> None:
    rooms = {path.parent for path in files() if path.name == "__init__.py"}
    rooms -= {room for room in rooms if room.parents[1].name == "plugins"}  # each is one of many plugins
    named = {name.rstrip("/") for name in paths()} | {room for room, _ in listed()} | set(quoted())
    names = {str(room.relative_to(ROOT)).removeprefix("orchestrator/") for room in rooms}
    assert names - named - {"orchestrator", "workers"} == set()


def test_the_glossary_has_twenty_words_at_most() -> None:
    words = re.findall(r"^\| \*\*", TEXT.partition("## Glossary")[2], re.MULTILINE)
    assert 0 < len(words) <= 20
