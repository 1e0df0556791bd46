"""Imports among the product's files: there are no cycles, not even of imports only for type checkers."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import orchestrator

PRODUCT = Path(orchestrator.__file__).parent
Graph = Mapping[str, set[str]]


@pytest.mark.slow
def test_no_product_file_imports_itself_indirectly() -> None:
    assert cycles(read_imports(PRODUCT)) == []


def test_imports_are_counted_wherever_they_appear(tmp_path: Path) -> None:
    write(tmp_path / "shop" / "__init__.py", "")
    write(tmp_path / "shop" / "orders.py", "from shop import stock")
    write(tmp_path / "shop" / "stock.py", "if TYPE_CHECKING:\n    from shop.orders import Order")
    write(tmp_path / "shop" / "mail.py", "def send():\n    import shop.texts.greeting")
    write(tmp_path / "shop" / "texts" / "greeting.py", "from ..mail import Address")
    write(tmp_path / "shop" / "texts" / "__init__.py", "")
    write(tmp_path / "shop" / "till.py", "import os\nfrom . import orders, mail")

    assert cycles(read_imports(tmp_path / "shop")) == [
        ["shop.mail", "shop.texts.greeting"],
        ["shop.orders", "shop.stock"],
    ]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text, encoding="utf-8")


def read_imports(package: Path) -> Graph:
    """Return what each module of a package imports from the package: at top level, in functions and in conditions."""
    files = [Path(folder, name) for folder, _, names in os.walk(package, followlinks=True) for name in names]
    modules = {module_name(package, file): file for file in files if file.suffix == ".py"}
    return {name: set(imports(name, file, modules)) - {name} for name, file in modules.items()}


def module_name(package: Path, file: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(name: str, file: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that a file imports; in `from package import name`, both names may be modules."""
    places = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = places[: len(places) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                found = f"{origin}.{alias.name}"
                yield from (one for one in [found if found in modules else origin] if one in modules)


def cycles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules whose members all import each other, directly or indirectly."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found
