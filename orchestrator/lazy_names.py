"""Lazy loading of the public names of a package, so that importing part of the package stays fast."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def load_lazily(package: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package. `package` is its globals; its module `public` has the names."""
    package_name = package["__name__"]

    def load(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {package_name!r} has no attribute {name!r}")
        if find_spec(f"{package_name}.{name}") is not None:
            return import_module(f"{package_name}.{name}")
        package[name] = value = getattr(import_module(f"{package_name}.public"), name)
        return value

    def names() -> list[str]:
        return sorted({*package, *load("__all__")})

    return load, names
