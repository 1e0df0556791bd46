"""Find the application that `module:app` names."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

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
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if module_name.endswith(".py") or "/" in module_name:
        raise ConfigurationError(
            f"An application is given as module:app, not as a file; found {where!r}.{_meant(module_name, attribute)}"
        )
    if not module_name or module_name.startswith("."):  # relative to nothing
        raise ConfigurationError(f"An application is given as module:app, e.g. tasks:app; found {where!r}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"There is no module {module_name!r} to find the application in.{_nearest(module_name)} "
                f"Looked in {folder} and the installed packages."
            ) from error
        raise broken(where, error) from error
    except (Exception, SystemExit) as error:
        raise broken(where, error) from error
    apps = _applications(module)
    if attribute:
        found = _as_app(getattr(module, attribute, None))
        if found is not None:
            return found
        inner = _meant(f"{module_name}.celery", attribute) if hasattr(module, "__path__") else ""
        hint = inner or did_you_mean(attribute, apps) or (f" It has: {', '.join(apps)}." if apps else _NONE)
        raise ConfigurationError(f"{attribute!r} in module {module_name!r} is not an Orchestrator.{hint}")
    if len({id(app) for app in apps.values()}) != 1:
        several = f" Say which: {', '.join(f'{module_name}:{name}' for name in apps)}." if apps else _NONE
        raise ConfigurationError(f"Module {module_name!r} holds {len(apps)} applications.{several}")
    return next(iter(apps.values()))


_NONE = " It has none: app = Orchestrator() makes one."


def _applications(module: ModuleType) -> dict[str, Orchestrator]:
    found = ((name, _as_app(value)) for name, value in vars(module).items())
    return {name: app for name, app in found if app is not None}


def _as_app(value: object) -> Orchestrator | None:
    """Return an application, or the one below an object of another API, such as `orchestrator.compat.celery`."""
    if isinstance(value, Orchestrator) or not hasattr(type(value), "__orchestrator__"):
        return value if isinstance(value, Orchestrator) else None
    below: Orchestrator = value.__orchestrator__  # type: ignore[attr-defined]
    return below


def _meant(file: str, attribute: str) -> str:
    """Return ` Did you mean 'x:app'?` for a file, if there is such an application."""
    name = file.removesuffix(".py").removeprefix("./").replace("/", ".")
    try:
        apps = _applications(importlib.import_module(name))
    except (Exception, SystemExit):  # noqa: BLE001  # it is not what was asked for, and a hint more or less
        return ""
    found = attribute if attribute in apps else next(iter(apps), None)
    return f" Did you mean '{name}:{found}'?" if found else ""


def _nearest(module: str) -> str:
    """Return ` Did you mean 'x'?` for a module that is not there, if one like it is."""
    package, _, _ = module.rpartition(".")
    front = f"{package}." if package else ""
    with suppress(OSError, ValueError):  # what cannot be the name of a file
        beside = (Path.cwd() / package.replace(".", "/")).glob("*.py")
        return did_you_mean(module, [f"{front}{path.stem}" for path in beside if path.stem != "__init__"])
    return ""


def broken(where: str, error: BaseException) -> ImportFailed:
    """Return the error of an application whose module raised another when it was imported."""
    return ImportFailed(f"The application {where} cannot be loaded. {what_failed(error)}")
