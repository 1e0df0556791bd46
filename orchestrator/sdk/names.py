"""Names of functions and classes that are the same in every process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from orchestrator.errors import InvalidTask
from orchestrator.sdk.checks import check_name


def module_name(thing: object) -> str:
    """Return the module of a function or class, as another process would import it."""
    if thing.__module__ != "__main__":
        return thing.__module__
    # A script that runs directly must give its tasks the same names as when a worker imports it.
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name.removesuffix(".__main__")
    return Path(getattr(main, "__file__", None) or "main").stem


def registered_name(function: Callable[..., Any], name: str | None, what: str = "task") -> str:
    """Return the name under which a function is registered: `name` if given, else `module.function`."""
    if name is not None:
        return check_name(what, name)
    if not hasattr(function, "__qualname__"):
        raise InvalidTask(f"Only a function can be a {what} without a name; found {function!r}.")
    return check_name(what, f"{module_name(function)}.{function.__qualname__.replace('<locals>.', '')}")


def type_name(kind: type) -> str:
    """Return the name under which an error's type is stored and compared."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{module_name(kind)}.{kind.__qualname__}"


def type_names(error: BaseException) -> frozenset[str]:
    return frozenset(type_name(kind) for kind in type(error).__mro__)


def also_called(error: BaseException, names: Iterable[str]) -> frozenset[str]:
    """Return those of the names that refer to the type of an error or to one of its base classes.

    A class often has several names: `requests.Timeout` is `requests.exceptions.Timeout`.
    """
    kinds = type(error).__mro__
    return frozenset(name for name in names if _known_as(name) in kinds)


def _known_as(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module or "builtins"), attribute, None)
