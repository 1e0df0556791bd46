"""A click group that imports its commands on demand and prints errors as messages, not tracebacks."""

from __future__ import annotations

import codecs
import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from orchestrator.errors import NotFound, OrchestratorError, did_you_mean
from orchestrator.settings import load_settings
from orchestrator.terminal_safe import terminal_safe

_STORE = "orchestrator.store.postgres_errors"


class LazyGroup(click.Group):
    """Maps command names to `module[:attribute]` below the package (attribute `command` by default) and a help text."""

    def __init__(self, *args: Any, package: str, modules: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._package = package
        self._modules = modules

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command. Output never fails because of the stream or its encoding."""
        _prepare_output()
        return super().main(*args, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self._modules)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in self._modules:
            return None
        collects = gc.isenabled()
        gc.disable()  # imported objects stay alive; garbage collection would take a tenth of the import time
        try:
            module, _, attribute = self._modules[name][0].partition(":")
            command: click.Command = getattr(
                importlib.import_module(f"{self._package}.{module}"), attribute or "command"
            )
        finally:
            if collects:
                gc.enable()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self._modules and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean(args[0], self._modules)}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse arguments that no command could store, find or print: bytes that are not UTF-8, and NUL."""
        for word in args:
            if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
                ctx.fail(f"{ascii(word)[:200]} is not text: it holds a NUL character, or bytes that are not UTF-8.")
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in self._modules.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An OrchestratorError or an outage ends it with a message instead of a traceback."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            error.message = terminal_safe(error.message)  # type: ignore[misc]  # the message quotes what the user typed
            raise
        except NotFound as error:
            raise click.ClickException(terminal_safe(_of_another_kind(error) or str(error))) from error
        except OrchestratorError as error:
            raise click.ClickException(terminal_safe(str(error))) from error
        except msgspec.MsgspecError as error:
            raise click.ClickException(terminal_safe(f"This release cannot read the stored data: {error}.")) from error
        except _errors_of("redis.exceptions", "RedisError") as error:
            raise click.ClickException(terminal_safe(f"Redis cannot be used: {error}")) from error
        except _errors_of(_STORE, "UNAVAILABLE") as error:
            reason = sys.modules[_STORE].explain(error, load_settings().namespace)
            raise click.ClickException(terminal_safe(f"Postgres cannot be used: {reason}")) from error
        except OSError as error:
            if error.filename is None and error.errno not in _SYSTEM_ERRORS:
                raise
            raise click.ClickException(terminal_safe(_about_files(error))) from error


def _of_another_kind(error: NotFound) -> str | None:
    """Return a message if the user gave the id of a run for a task, or the reverse."""
    if error.sought is None:
        return None
    from orchestrator.cli.terminal.ids import of_another_kind  # imports the store

    return of_another_kind(*error.sought)


_SYSTEM_ERRORS = {
    errno.ENOENT: "The current folder no longer exists. Change to another one.",
    errno.ENOSPC: "Cannot write output: no space left on device.",
}
"""Messages for OS errors that name no file."""


def _about_files(error: OSError) -> str:
    if error.filename is None:
        return _SYSTEM_ERRORS[error.errno or 0]
    return f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}."


def _prepare_output() -> None:
    """Make printing safe: discard output without a stream, and print `?` for characters that the encoding lacks.

    Python chooses ASCII where no encoding is set; UTF-8 replaces it, as in click.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # open until the process ends
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            is_unset = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(encoding="utf-8" if is_unset else None, errors="replace")


def _errors_of(module: str, name: str) -> Any:
    """Return the exception types of a module, or `()` if it was never imported: then it cannot have raised one."""
    return getattr(sys.modules.get(module), name, ())
