"""The modules in which an application's tasks stand, imported when somebody needs them.

They import the application themselves (`from shop.app import app`), so it cannot import them while it is made.
"""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from orchestrator.errors import ConfigurationError, did_you_mean

TASKS = "tasks"
"""What modules are called that autodiscovery imports."""
_NOT_THEIRS = ("<frozen", importlib.__file__, str(Path(__file__).parent.parent))
"""Where frames stand that nobody can mend: Python's import, and this package."""


class Modules:
    """Modules by name, and packages in which modules called `tasks` are looked for."""

    def __init__(self, include: Iterable[str], autodiscover: Iterable[str]) -> None:
        self._include = _names("include", include)
        self._packages = _names("autodiscover", autodiscover)
        self._are_loaded = False

    def load(self) -> None:
        """Import them all, or say which cannot be and why. Whoever comes a second time finds it done."""
        if self._are_loaded:
            return
        for name in self._include:
            _import("include", name)
        for package in self._packages:
            for name in _found_in(package):
                _import("autodiscover", name)
        self._are_loaded = True


def _names(option: str, given: Iterable[str]) -> list[str]:
    names = None if isinstance(given, str) else list(given)
    if names is None or not all(isinstance(name, str) and name.replace(".", "_").isidentifier() for name in names):
        raise ConfigurationError(
            f"Orchestrator({option}=…): expected a list of names such as ['shop.mail'], found {given!r:.200}."
        )
    return names


def _import(option: str, name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(option, name, error) from error
        raise _missing(option, name) from error
    except Exception as error:  # whatever a module raises when it is imported
        raise _broken(option, name, error) from error


def _missing(option: str, name: str) -> ConfigurationError:
    parent, _, _ = name.rpartition(".")
    beside = [f"{parent}.{path.stem}" for path in _python_files(_folders(parent))] if parent else []
    return ConfigurationError(
        f"Orchestrator({option}=…): there is no module {name!r}.{did_you_mean(name, beside)} "
        f"It is looked for in the current folder and the installed packages."
    )


def _broken(option: str, name: str, error: Exception) -> ConfigurationError:
    if isinstance(error, SyntaxError):
        what, file, line = error.msg, error.filename, error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frame = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)][-1]
        what, file, line = str(error), frame.filename, frame.lineno
    kind = type(error).__name__
    return ConfigurationError(
        f"Orchestrator({option}=…): module {name!r} cannot be imported. {kind}: {what}\n  in {file}, line {line}"
    )


def _found_in(package: str) -> list[str]:
    """Return the modules called `tasks` in a package and all below it; where that is a package, its modules too."""
    folders = _folders(package)
    if not folders:
        raise ConfigurationError(
            f"Orchestrator(autodiscover=…): there is no package {package!r}. A single module belongs into include=."
        )
    found = sorted({name for folder in folders for name in _tasks_below(folder, package)})
    if not found:
        raise ConfigurationError(
            f"Orchestrator(autodiscover=…): package {package!r} has no module called {TASKS!r}, nor has one below it. "
            f"Looked in {', '.join(map(str, folders))}. Modules of other names belong into include=."
        )
    return found


def _folders(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def _tasks_below(folder: Path, package: str, *, everything: bool = False) -> Iterator[str]:
    for file in _python_files([folder]):
        if everything or file.stem == TASKS:
            yield package if file.stem == "__init__" else f"{package}.{file.stem}"
    for inner in folder.iterdir():
        if inner.is_dir() and inner.name.isidentifier() and any(_python_files([inner])):
            yield from _tasks_below(inner, f"{package}.{inner.name}", everything=everything or inner.name == TASKS)


def _python_files(folders: Iterable[Path]) -> Iterator[Path]:
    return (file for folder in folders for file in folder.glob("*.py") if file.stem.isidentifier())
