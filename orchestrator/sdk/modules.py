"""The modules with an application's tasks, imported on demand.

These modules import the application (`from shop.app import app`), so its constructor cannot import them.
"""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from orchestrator.errors import ConfigurationError, did_you_mean

TASKS = "tasks"
"""The name of modules that autodiscovery imports."""
_HIDDEN_FILES = ("<frozen", importlib.__file__, str(Path(__file__).parent.parent))
"""Files left out of tracebacks: Python's import machinery, and this package."""


class ImportFailed(ConfigurationError):
    """A module raised an exception while it was imported, which is the cause. An edit of a file may help."""


class Modules:
    """Modules to import: those listed by name, and those named `tasks` in some packages."""

    def __init__(self, include: Iterable[str], autodiscover: Iterable[str]) -> None:
        self._include = _names("include", include)
        self._packages = _names("autodiscover", autodiscover)
        self._are_loaded = False
        self.afterwards: list[Callable[[], object]] = []
        """Callbacks that run once all modules are imported."""

    def load(self) -> None:
        """Import all modules, once. Raise ConfigurationError if a module cannot be imported."""
        if self._are_loaded:
            return
        for name in self._include:
            _import("include", name)
        for package in self._packages:
            for name in _discovered(package):
                _import("autodiscover", name)
        for function in self.afterwards:
            function()
        self._are_loaded = True


def _names(option: str, values: Iterable[str]) -> list[str]:
    names = None if isinstance(values, str) else list(values)
    if names is None or not all(isinstance(name, str) and name.replace(".", "_").isidentifier() for name in names):
        raise ConfigurationError(
            f"Orchestrator({option}=…): expected a list of names such as ['shop.mail'], found {values!r:.200}."
        )
    return names


def _import(option: str, name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(option, name, error) from error
        raise _missing(option, name) from error
    except (Exception, SystemExit) as error:  # anything may be raised on import
        raise _broken(option, name, error) from error


def _missing(option: str, name: str) -> ConfigurationError:
    parent, _, _ = name.rpartition(".")
    siblings = [f"{parent}.{path.stem}" for path in _python_files(_folders(parent))] if parent else []
    return ConfigurationError(
        f"Orchestrator({option}=…): there is no module {name!r}.{did_you_mean(name, siblings)} The current "
        "folder and the installed packages were searched."
    )


def _broken(option: str, name: str, error: BaseException) -> ImportFailed:
    return ImportFailed(f"Orchestrator({option}=…): module {name!r} cannot be imported. {describe_import_error(error)}")


def describe_import_error(error: BaseException) -> str:
    """Describe the exception of an import: its text, the line in the user's code, and the line that raised it."""
    if isinstance(error, SyntaxError):
        message, locations = error.msg, [_location(error.filename, error.lineno, error.text)]
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_HIDDEN_FILES)]
        own = [frame for frame in frames if _is_own(frame.filename)] or frames
        message, locations = str(error), [_location(f.filename, f.lineno, f.line) for f in (*own[-1:], *frames[-1:])]
    return "\n  in ".join([f"{type(error).__name__}: {message}", *dict.fromkeys(locations)])


def _is_own(file: str) -> bool:
    """Return whether a file belongs to the program rather than to an installed library."""
    return Path(file).is_relative_to(Path.cwd()) and "site-packages" not in file


def _location(file: str | None, line: int | None, code: str | None) -> str:
    return f"{file}, line {line}" + (f": {code.strip()}" if code else "")


def _discovered(package: str) -> list[str]:
    """Return the modules named `tasks` in a package at any depth. If `tasks` is a package, return its modules too."""
    folders = _folders(package)
    if not folders:
        raise ConfigurationError(
            f"Orchestrator(autodiscover=…): there is no package {package!r}. A single module belongs in include=."
        )
    found = sorted({name for folder in folders for name in _tasks_below(folder, package)})
    if not found:
        raise ConfigurationError(
            f"Orchestrator(autodiscover=…): package {package!r} has no module called {TASKS!r}, nor has one "
            f"below it. Looked in {', '.join(map(str, folders))}. Modules of other names belong in include=."
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
