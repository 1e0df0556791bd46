"""The modules with an application's tasks, imported on demand.

They import the application themselves (`from shop.app import app`), so it cannot import them while it is made.
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
_NOT_THEIRS = ("<frozen", importlib.__file__, str(Path(__file__).parent.parent))
"""Files whose frames do not help: Python's import, and this package."""


class ImportFailed(ConfigurationError):
    """A module cannot be imported, and a change of a file may help; the cause is what it raised."""


class Modules:
    """Modules by name, and packages in which modules called `tasks` are looked for."""

    def __init__(self, include: Iterable[str], autodiscover: Iterable[str]) -> None:
        self._include = _names("include", include)
        self._packages = _names("autodiscover", autodiscover)
        self._are_loaded = False
        self.afterwards: list[Callable[[], object]] = []
        """What is called when all of them are imported."""

    def load(self) -> None:
        """Import them all, once, or say which cannot be imported and why."""
        if self._are_loaded:
            return
        for name in self._include:
            _import("include", name)
        for package in self._packages:
            for name in _found_in(package):
                _import("autodiscover", name)
        for function in self.afterwards:
            function()
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
    except (Exception, SystemExit) as error:  # whatever a module raises when it is imported
        raise _broken(option, name, error) from error


def _missing(option: str, name: str) -> ConfigurationError:
    parent, _, _ = name.rpartition(".")
    beside = [f"{parent}.{path.stem}" for path in _python_files(_folders(parent))] if parent else []
    return ConfigurationError(
        f"Orchestrator({option}=…): there is no module {name!r}.{did_you_mean(name, beside)} "
        f"It is looked for in the current folder and the installed packages."
    )


def _broken(option: str, name: str, error: BaseException) -> ImportFailed:
    return ImportFailed(f"Orchestrator({option}=…): module {name!r} cannot be imported. {what_failed(error)}")


def what_failed(error: BaseException) -> str:
    """Say what a module raised when it was imported, in which line of the user's and, if elsewhere, in which there."""
    if isinstance(error, SyntaxError):
        what, places = error.msg, [_place(error.filename, error.lineno, error.text)]
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THEIRS)]
        own = [frame for frame in frames if _is_own(frame.filename)] or frames
        what, places = str(error), [_place(f.filename, f.lineno, f.line) for f in (*own[-1:], *frames[-1:])]
    return "\n  in ".join([f"{type(error).__name__}: {what}", *dict.fromkeys(places)])


def _is_own(file: str) -> bool:
    """Say whether a file is of the program, and not of a library that it uses."""
    return Path(file).is_relative_to(Path.cwd()) and "site-packages" not in file


def _place(file: str | None, line: int | None, code: str | None) -> str:
    return f"{file}, line {line}" + (f": {code.strip()}" if code else "")


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
