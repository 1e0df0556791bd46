"""Public names of a package that load when one is asked for: importing a part of the package does without them."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def load_lazily(package: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package with these globals, whose module `public` has the names."""
    whole = package["__name__"]

    def load(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {whole!r} has no attribute {name!r}")
        if find_spec(f"{whole}.{name}") is not None:
            return import_module(f"{whole}.{name}")
        package[name] = found = getattr(import_module(f"{whole}.public"), name)
        return found

    def names() -> list[str]:
        return sorted({*package, *load("__all__")})

    return load, names
