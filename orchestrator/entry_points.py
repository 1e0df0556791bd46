"""Plugins: what installed packages offer under a group of entry points, this package included.

Our own plugins are entry points, too (`pyproject.toml`), and live in `orchestrator/plugins`, in a folder per group. An
editable install has the entry points of the day it was made: a plugin that is missing there is found by its folder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigurationError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

EXECUTORS = "orchestrator.executors"
"""A name is an executor; the value is its class, or an `ExecutorPlugin`."""
PAYLOAD_STORES = "orchestrator.payload_stores"
"""A name is the scheme of a URL; the value is called with the URL, and returns a store."""
_PLUGINS = "orchestrator.plugins"


@cache
def own_plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the plugins that come with this package, by name."""
    from importlib.metadata import EntryPoint  # forty modules, and most programs look for no plugin
    from pkgutil import iter_modules

    kind = group.removeprefix("orchestrator.")
    names = [module.name for module in iter_modules([str(Path(__file__).parent / "plugins" / kind)])]
    return {name: EntryPoint(name, f"{_PLUGINS}.{kind}.{name}:PLUGIN", group) for name in names}


def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the plugins of a group that are installed, by name."""
    return _plugins(group, tuple(sys.path))


@lru_cache(maxsize=8)
def _plugins(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:  # noqa: ARG001  # where it looks
    from importlib.metadata import entry_points

    installed = entry_points(group=group)
    others = {point.name: point for point in installed if not point.value.startswith(_PLUGINS)}
    ours = {point.name: point for point in installed if point.value.startswith(_PLUGINS)}
    return {**others, **own_plugins(group), **ours}


def load(point: EntryPoint, what: str, expected: str) -> Any:
    """Return what an entry point names; `what` is it for people, and `expected` says what it should name."""
    try:
        return point.load()
    except Exception as error:
        raise ConfigurationError(
            f"{what} {point.name!r}: the entry point {point.value!r} cannot be loaded: {type(error).__name__}: "
            f"{error}. It names {expected}."
        ) from error
