"""Plugins: entry points of installed packages, including this one.

Our own plugins are entry points, too (`pyproject.toml`), and are located in `orchestrator/plugins`, with a folder per
group. Entry points of an editable install may be out of date, so our own plugins are also found by their folders.
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
"""The group of executors. The value of an entry point is the executor's class, or an `ExecutorPlugin`."""
PAYLOAD_STORES = "orchestrator.payload_stores"
"""The group of payload stores, named by URL scheme. The value is called with the URL and returns a store."""
_PLUGINS = "orchestrator.plugins"


@cache
def own_plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the plugins that come with this package, by name."""
    from importlib.metadata import EntryPoint  # imported late: it loads forty modules, and few programs use plugins
    from pkgutil import iter_modules

    kind = group.removeprefix("orchestrator.")
    names = [module.name for module in iter_modules([str(Path(__file__).parent / "plugins" / kind)])]
    return {name: EntryPoint(name, f"{_PLUGINS}.{kind}.{name}:PLUGIN", group) for name in names}


def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the installed plugins of a group, by name."""
    return _plugins(group, tuple(sys.path))


@lru_cache(maxsize=8)
def _plugins(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:  # noqa: ARG001  # part of the cache key
    from importlib.metadata import entry_points

    installed = entry_points(group=group)
    others = {point.name: point for point in installed if not point.value.startswith(_PLUGINS)}
    ours = {point.name: point for point in installed if point.value.startswith(_PLUGINS)}
    return {**others, **own_plugins(group), **ours}


def load(point: EntryPoint, what: str, expected: str) -> Any:
    """Load an entry point. `what` and `expected` describe it in the error message."""
    try:
        return point.load()
    except Exception as error:
        raise ConfigurationError(
            f"{what} {point.name!r}: the entry point {point.value!r} cannot be loaded: {type(error).__name__}: "
            f"{error}. It names {expected}."
        ) from error
