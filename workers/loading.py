"""Find the application that `module:app` names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from orchestrator.errors import ConfigurationError, did_you_mean
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.modules import ImportFailed, what_failed


def load_app(where: str) -> Orchestrator:
    """Import the application's module, and those that it includes, and return it; the current folder is importable."""
    found = _find_app(where)
    found.load_modules()
    return found


def _find_app(where: str) -> Orchestrator:
    module_name, _, attribute = where.partition(":")
    if not module_name or module_name.startswith("."):  # relative to nothing
        raise ConfigurationError(f"An application is given as module:app, e.g. tasks:app; found {where!r}.")
    if module_name.endswith(".py") or "/" in module_name:
        meant = module_name.removesuffix(".py").replace("/", ".")
        raise ConfigurationError(
            f"An application is given as module:app, not as a file; found {where!r}. Did you mean '{meant}:app'?"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"There is no module {module_name!r} to find the application in. "
                f"Looked in {folder} and the installed packages."
            ) from error
        raise _broken(where, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(where, error) from error
    if attribute:
        found = getattr(module, attribute, None)
        if isinstance(found, Orchestrator):
            return found
        candidates = [name for name, value in vars(module).items() if isinstance(value, Orchestrator)]
        hint = did_you_mean(attribute, candidates) or (f" It has: {', '.join(candidates)}." if candidates else "")
        raise ConfigurationError(f"{attribute!r} in module {module_name!r} is not an Orchestrator.{hint}")
    apps = [value for value in vars(module).values() if isinstance(value, Orchestrator)]
    if len(apps) != 1:
        raise ConfigurationError(
            f"Module {module_name!r} holds {len(apps)} applications; say which: {module_name}:NAME."
        )
    return apps[0]


def _broken(where: str, error: BaseException) -> ImportFailed:
    return ImportFailed(f"The application {where} cannot be loaded. {what_failed(error)}")
